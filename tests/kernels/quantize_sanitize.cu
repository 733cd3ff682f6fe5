// Every kernel of csrc/quantize.cu on buffers of exactly the size it needs, whole tiles and tails: for compute-sanitizer,
// which torch's caching allocator would blind. Also holds outputs to the rules compiled for the host, so that a clean run
// is known to have done the work.
//
//   nvcc -std=c++17 -O3 -lineinfo -gencode arch=compute_90a,code=sm_90a -Ikernels/csrc tests/kernels/quantize_sanitize.cu
//   compute-sanitizer --tool memcheck ./a.out; compute-sanitizer --tool racecheck ./a.out
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "quantize.cu"

static void require(bool right, const char* what) {
  if (!right) {
    std::printf("FAILED: %s (%s)\n", what, cudaGetErrorString(cudaGetLastError()));
    std::exit(1);
  }
}

template <class T>
struct Buffer {
  T* data = nullptr;
  size_t count;
  explicit Buffer(size_t n) : count(n) {
    require(cudaMalloc(&data, n * sizeof(T)) == cudaSuccess, "cudaMalloc");
    require(cudaMemset(data, 0, n * sizeof(T)) == cudaSuccess, "cudaMemset");
  }
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) {
    require(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess, "copy");
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  std::vector<T> read() const {
    std::vector<T> host(count);
    require(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess, "a kernel");
    return host;
  }
};

static std::mt19937 generator(1);
static unsigned draw(unsigned most) { return generator() % most; }

// MXFP4 blocks; every fourth out of range, some dead, some of codes that shift.
static void repack(size_t blocks, int m) {
  std::vector<uint8_t> codes(blocks * 16), scales(blocks);
  static const uint8_t POOLS[4][4] = {{0x00, 0x80, 0x08, 0x88}, {0x46, 0x64, 0x24, 0x42}, {0x11, 0x12, 0x21, 0x22}, {0x75, 0x31, 0xF9, 0xA5}};
  for (size_t i = 0; i < blocks; ++i) {
    const uint8_t* pool = POOLS[draw(4)];
    for (int j = 0; j < 16; ++j) codes[16 * i + j] = pool[draw(4)];
    scales[i] = static_cast<uint8_t>(127 + m + (draw(4) ? static_cast<int>(draw(15)) - 6 : -7 - static_cast<int>(draw(9))));
  }
  Buffer<uint8_t> in_codes(codes), in_scales(scales), out_codes(blocks * 16), out_scales(blocks * 2);
  Buffer<unsigned> range(std::vector<unsigned>{255, 0});
  Buffer<unsigned long long> counts(4), hist(8192), err(256), two(2);
  require(requant_scale_range(in_scales.data, blocks, range.data, nullptr) == 0, "scale_range");
  require(requant_half_census(in_codes.data, in_scales.data, blocks, hist.data, nullptr) == 0, "half_census");
  require(requant_lossy_error(in_codes.data, in_scales.data, blocks, m, err.data, two.data, nullptr) == 0, "lossy_error");
  require(requant_repack_halves(in_codes.data, in_scales.data, blocks, m, out_codes.data, out_scales.data, counts.data,
                                nullptr) == 0, "repack_halves");
  Tally tally;
  std::vector<unsigned long long> bins(8192);
  unsigned least = 255, most = 0;
  const std::vector<uint8_t> got_codes = out_codes.read(), got_scales = out_scales.read();
  for (size_t i = 0; i < blocks; ++i) {
    uint64_t halves[2];
    memcpy(halves, &codes[16 * i], 16);
    const bool dead = ((halves[0] | halves[1]) & 0x7777777777777777ull) == 0;
    least = scales[i] < least ? scales[i] : least, most = scales[i] > most ? scales[i] : most;
    for (int half = 0; half < 2; ++half) {
      const Limits found = limits_of(halves[half]);
      ++bins[scales[i] * 32 + found.halvings * 8 + found.doublings * 2 + found.live];
      const unsigned byte = settle_half(halves[half], scales[i] - E8M0_BIAS - m, dead, tally);
      require(got_scales[2 * i + half] == byte, "a scale differs");
    }
    require(memcmp(&got_codes[16 * i], halves, 16) == 0, "codes differ");
  }
  const std::vector<unsigned long long> found = counts.read();
  require(found[0] == tally.shifted && found[1] == tally.lossy && found[2] == tally.below && found[3] == tally.impossible,
          "counts differ");
  require(hist.read() == bins, "the census differs");
  require(range.read() == std::vector<unsigned>({least, most}), "the range differs");
  for (size_t i = 0; i < blocks; ++i) scales[i] = static_cast<uint8_t>(127 + m - 6 + draw(15));
  Buffer<uint8_t> inside(scales);
  require(requant_repack_window(in_codes.data, inside.data, blocks, m, out_codes.data, out_scales.data, nullptr) == 0, "window");
  require(out_codes.read() == codes, "the window's codes differ");
  std::printf("ok repack: %zu blocks, m %d, %llu shifted, %llu lossy\n", blocks, m, found[0], found[1]);
}

static void check_block(const uint32_t (&codes)[2], uint32_t scale, const std::vector<uint8_t>& got_codes,
                        const std::vector<uint8_t>& got_scales, size_t block) {
  require(got_scales[block] == scale, "a scale differs");
  require(memcmp(&got_codes[8 * block], codes, 8) == 0, "codes differ");
}

static void bf16(size_t blocks) {
  std::vector<uint16_t> w(blocks * 16);
  for (auto& bits : w) bits = static_cast<uint16_t>(0x3800 + draw(0x600) + (draw(2) << 15));
  w[3] = 0x0001;  // a block under encode_fast's range
  Buffer<uint16_t> in(w);
  Buffer<unsigned> amax(1);
  Buffer<float> scale(1);
  Buffer<uint8_t> codes(blocks * 8), scales(blocks);
  require(requant_bf16_amax(in.data, blocks, amax.data, nullptr) == 0, "bf16_amax");
  require(requant_global_scale(amax.data, scale.data, nullptr) == 0, "global_scale");
  require(requant_bf16_nvfp4(in.data, blocks, scale.data, codes.data, scales.data, nullptr) == 0, "bf16_nvfp4");
  const std::vector<uint8_t> got_codes = codes.read(), got_scales = scales.read();
  const float global = scale.read()[0];
  for (size_t i = 0; i < blocks; ++i) {
    uint32_t pairs[8], expected[2];
    memcpy(pairs, &w[16 * i], 32);
    const uint32_t byte = encode_nvfp4(pairs, global, expected);
    check_block(expected, byte, got_codes, got_scales, i);
  }
  std::printf("ok bf16: %zu blocks\n", blocks);
}

template <Source KIND>
static void floats(int rows, int blocks_per_row, int high, int wide, int row) {
  const size_t blocks = static_cast<size_t>(rows) * blocks_per_row, item = KIND == Source::F32 ? 4 : KIND == Source::F16 ? 2 : 1;
  std::vector<uint8_t> w(blocks * 16 * item);
  for (size_t i = 0; i < blocks * 16; ++i) {
    if constexpr (KIND == Source::F32) {
      const float value = (static_cast<float>(draw(2001)) - 1000.0f) * 0.001f;
      memcpy(&w[4 * i], &value, 4);
    } else if constexpr (KIND == Source::F16) {
      const uint16_t bits = static_cast<uint16_t>(draw(0x4800) | draw(2) << 15);
      memcpy(&w[2 * i], &bits, 2);
    } else {
      w[i] = static_cast<uint8_t>(draw(0x7F) | draw(2) << 7);
    }
  }
  const int across = wide ? (16 * blocks_per_row + wide - 1) / wide : 1, down = high ? (row + rows + high - 1) / high : 1;
  std::vector<float> grid(static_cast<size_t>(across) * down);
  for (auto& scale : grid) scale = static_cast<float>(1 + draw(1000)) * 0x1p-12f;
  Buffer<uint8_t> in(w), codes(blocks * 8), scales(blocks);
  Buffer<float> on_gpu(grid), scale(1);
  Buffer<unsigned> amax(1);
  const int kind = static_cast<int>(KIND);
  require(requant_float_amax(kind, in.data, blocks, blocks_per_row, on_gpu.data, high, wide, row, amax.data, nullptr) == 0, "amax");
  require(requant_global_scale(amax.data, scale.data, nullptr) == 0, "global_scale");
  require(requant_float_nvfp4(kind, in.data, blocks, blocks_per_row, on_gpu.data, high, wide, row, scale.data, codes.data,
                              scales.data, nullptr) == 0, "float_nvfp4");
  const FloatArgs args{w.data(), blocks, blocks_per_row, grid.data(), high, wide, across, row};
  const std::vector<uint8_t> got_codes = codes.read(), got_scales = scales.read();
  const float global = scale.read()[0];
  uint32_t top = 0;
  for (size_t i = 0; i < blocks; ++i) {
    float v[16];
    uint32_t expected[2];
    load_values<KIND>(args, i, v);
    top = values_amax(v) > top ? values_amax(v) : top;
    const uint32_t byte = encode_nvfp4_values(FloatValues{v}, values_amax(v), global, expected);
    check_block(expected, byte, got_codes, got_scales, i);
  }
  require(amax.read()[0] == top, "amax differs");
  std::printf("ok floats kind %d: %d x %d, blocks %d x %d from row %d\n", kind, rows, 16 * blocks_per_row, high, wide, row);
}

int main() {
  for (size_t blocks : {size_t{1}, size_t{31}, size_t{1024}, size_t{1025}, size_t{9001}, size_t{70000}})
    for (int m : {-14, 0, 40}) repack(blocks, m);
  for (size_t blocks : {size_t{1}, size_t{33}, size_t{512}, size_t{4097}, size_t{70001}}) bf16(blocks);
  floats<Source::F32>(37, 5, 0, 0, 0);
  floats<Source::F32>(600, 200, 0, 0, 0);
  floats<Source::F16>(37, 5, 0, 0, 0);
  floats<Source::F16>(600, 200, 0, 0, 0);
  floats<Source::FP8>(300, 24, 128, 128, 64);
  floats<Source::FP8>(100, 9, 32, 32, 0);    // ragged at the right
  floats<Source::FP8>(70, 7, 1, 112, 5);     // per channel
  floats<Source::FP8>(50, 6, 16, 24, 3);     // block edges inside a group of 16
  std::printf("done\n");
  return 0;
}
