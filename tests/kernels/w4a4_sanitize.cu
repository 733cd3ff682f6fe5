// Every W4A4 kernel once per kind of tile, tail and alignment, on buffers of exactly the size they need: for
// compute-sanitizer, which torch's caching allocator would blind. Also checks that a second launch gives the same bits.
//
//   nvcc -std=c++17 -O3 -lineinfo -gencode arch=compute_90a,code=sm_90a -Ikernels/csrc tests/kernels/w4a4_sanitize.cu
//   compute-sanitizer --tool memcheck ./a.out; compute-sanitizer --tool racecheck ./a.out
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "w4a4.cu"

static void require(int status, const char* what) {
  if (status != 0) {
    std::printf("%s: %s\n", what, requant_w4a4_error(status));
    std::exit(1);
  }
}

template <class T>
struct Buffer {
  T* data = nullptr;
  size_t count;
  explicit Buffer(size_t n) : count(n) { require(cudaMalloc(&data, n * sizeof(T)), "cudaMalloc"); }
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) {
    require(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  std::vector<T> read() const {
    std::vector<T> host(count);
    require(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "run");
    return host;
  }
};

static std::mt19937 generator(1);

static std::vector<uint8_t> bytes(size_t count, int low, int high) {
  std::vector<uint8_t> out(count);
  for (auto& byte : out) byte = static_cast<uint8_t>(low + generator() % (high - low));
  return out;
}

static void run(bool mxfp4, int block_rows, int tokens, int N, int K, int splits, std::vector<int> rows_per_expert) {
  const int group = mxfp4 ? 32 : 16, experts = rows_per_expert.empty() ? 1 : static_cast<int>(rows_per_expert.size());
  std::vector<int> offsets{0}, token;
  int row_tiles = 0;
  for (int count : rows_per_expert) {
    offsets.push_back(offsets.back() + count);
    row_tiles += (count + block_rows - 1) / block_rows;
    for (int i = 0; i < count; ++i) token.push_back(static_cast<int>(generator() % tokens));
  }
  const bool grouped = !rows_per_expert.empty();
  const int rows = grouped ? offsets.back() : tokens;
  if (!grouped) row_tiles = (rows + block_rows - 1) / block_rows;

  std::vector<uint16_t> x_host(static_cast<size_t>(tokens) * K);
  for (auto& bits : x_host) bits = static_cast<uint16_t>(0x3E00 + generator() % 0x300 + (generator() % 2 << 15));
  Buffer<uint16_t> x(x_host);
  Buffer<uint8_t> x_codes(static_cast<size_t>(tokens) * K / 2), x_scales(static_cast<size_t>(tokens) * K / group);
  Buffer<float> x_global(tokens), row_amax(tokens), w_global(std::vector<float>(experts, 0.5f));
  Buffer<uint8_t> w_codes(bytes(static_cast<size_t>(experts) * N * K / 2, 0, 256));
  Buffer<uint8_t> w_scales(bytes(static_cast<size_t>(experts) * N * K / group, mxfp4 ? 120 : 0x28, mxfp4 ? 134 : 0x58));
  Buffer<int> token_buffer(grouped ? token : std::vector<int>{0}), offset_buffer(offsets);
  Buffer<float> y(static_cast<size_t>(rows) * N), partial(static_cast<size_t>(splits) * rows * N);

  QuantizeArgs quantize{x.data, x_codes.data, x_scales.data, x_global.data, row_amax.data, tokens, K};
  for (int mode : {2, 1}) {  // per tensor, then per token, which the matmul below uses
    require(requant_w4a4_quantize(&quantize, mxfp4, mode, nullptr), "quantize");
    require(cudaDeviceSynchronize(), "quantize");
  }
  GemmArgs gemm{x_codes.data, x_scales.data, x_global.data, w_codes.data, w_scales.data, w_global.data,
                grouped ? token_buffer.data : nullptr, grouped ? offset_buffer.data : nullptr, y.data, partial.data,
                rows, N, K, experts, splits, 1, 0};
  std::vector<float> first;
  for (int launch = 0; launch < 2; ++launch) {
    require(cudaMemset(y.data, 0xFF, y.count * sizeof(float)), "poison");
    require(requant_w4a4_gemm(&gemm, mxfp4, block_rows, row_tiles + (grouped ? 1 : 0), nullptr), "gemm");
    require(cudaDeviceSynchronize(), "gemm");
    std::vector<float> out = y.read();
    for (float value : out)
      if (!(value == value)) require(cudaErrorUnknown, "an output was not written");
    if (launch == 0) first = out;
    else if (memcmp(first.data(), out.data(), out.size() * sizeof(float))) require(cudaErrorUnknown, "not reproducible");
  }
  std::printf("ok %s rows %d (tile %d) N %d K %d splits %d experts %d\n", mxfp4 ? "mxfp4" : "nvfp4", rows, block_rows,
              N, K, splits, experts);
}

int main() {
  for (bool mxfp4 : {false, true}) {
    for (int block_rows : {16, 32, 64, 128}) {
      run(mxfp4, block_rows, block_rows, 128, 1024, 1, {});         // whole tiles
      run(mxfp4, block_rows, block_rows + 3, 130, 768, 3, {});      // tails of M and N, K split
      run(mxfp4, block_rows, 5, 37, 576, 1, {});                    // K % 256, odd N
      run(mxfp4, block_rows, 5, 37, mxfp4 ? 1376 : 1328, 2, {});    // scale rows at odd bytes, K % 32 for NVFP4
      run(mxfp4, block_rows, 9, 132, 320, 1, {3, 0, block_rows + 1, 1});
      run(mxfp4, block_rows, 9, 132, 512, 2, std::vector<int>(70, 1));
    }
    run(mxfp4, 16, 1, 1, 32, 1, {});
  }
  std::printf("done\n");
  return 0;
}
