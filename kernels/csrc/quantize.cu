// MXFP4, BF16, F16, F32 and FP8 -> NVFP4 on the GPU: the CPU's rules (repack_jit.py, quantize.py), its bytes, at the speed of
// a copy. Each entry point launches on the given stream and returns a cudaError_t; the caller (gpu_quantize.py) has
// checked shapes and alignment. No allocation, no synchronisation: safe inside a CUDA graph.
//
// One thread takes one 32-block (16 bytes of codes, 1 scale byte in, 2 out) or one 16-block of BF16 (32 bytes in, 8 + 1
// out); tensors are flat lists of blocks, since a row is a whole number of them.
#include "quantize_bf16.cuh"
#include "quantize_float.cuh"
#include "quantize_repack.cuh"

using namespace requant;

namespace {

constexpr int THREADS = 256;

unsigned grid_for(size_t items, int per_thread) {
  const size_t blocks = (items + size_t{THREADS} * per_thread - 1) / (size_t{THREADS} * per_thread);
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 0x7FFFFFFF ? 0x7FFFFFFF : blocks);
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

constexpr unsigned MOST_CTAS = 4096;  // of the kernels that stride over the grid

unsigned strided_grid(size_t items) {
  const unsigned grid = grid_for(items, 1);
  return grid < MOST_CTAS ? grid : MOST_CTAS;
}

FloatArgs float_args(const void* w, size_t blocks, int blocks_per_row, const float* grid, int high, int wide, long long row) {
  return {w, blocks, blocks_per_row, grid, high, wide, wide ? (16 * blocks_per_row + wide - 1) / wide : 0, row};
}

}  // namespace

extern "C" {

// range[0], range[1] (set to 255, 0 by the caller): smallest and largest of `count` E8M0 bytes.
int requant_scale_range(const uint8_t* scales, size_t count, unsigned* range, void* stream) {
  scale_range_kernel<<<grid_for(count, 64), THREADS, 0, stream_of(stream)>>>(scales, count, range);
  return cudaGetLastError();
}

// Step 1: codes copied, scales 2^(k - m) with k - m in [-6, 8], which the caller knows from the range.
int requant_repack_window(const void* codes, const uint8_t* scales, size_t blocks, int m, void* out_codes,
                          void* out_scales, void* stream) {
  const RepackArgs args{static_cast<const uint4*>(codes), scales, static_cast<uint4*>(out_codes),
                        static_cast<uint16_t*>(out_scales), nullptr, blocks, m};
  window_kernel<<<grid_for(blocks, REPACK_UNROLL), THREADS, 0, stream_of(stream)>>>(args);
  return cudaGetLastError();
}

// Step 2. counts[4] is added to, in halves: shifted, lossy, nonzero scales below 2^-6, impossible (m too small); the rest
// is exact.
int requant_repack_halves(const void* codes, const uint8_t* scales, size_t blocks, int m, void* out_codes,
                          void* out_scales, unsigned long long* counts, void* stream) {
  const RepackArgs args{static_cast<const uint4*>(codes), scales, static_cast<uint4*>(out_codes),
                        static_cast<uint16_t*>(out_scales), counts, blocks, m};
  halves_kernel<<<grid_for(blocks, REPACK_UNROLL), THREADS, 0, stream_of(stream)>>>(args);
  return cudaGetLastError();
}

// hist[256][4][4][2] is added to: halves by E8M0 byte, exact halvings, exact doublings, live.
int requant_half_census(const void* codes, const uint8_t* scales, size_t blocks, unsigned long long* hist,
                        void* stream) {
  const unsigned most = 132 * 7, grid = grid_for(blocks, 8);  // a CTA clears and flushes 32 KB, and 7 fit an H200's SM
  census_kernel<<<grid < most ? grid : most, THREADS, 0, stream_of(stream)>>>(static_cast<const uint4*>(codes), scales, blocks, hist);
  return cudaGetLastError();
}

// err[256]: squared error per E8M0 byte, unit 4^(byte - 128); counts[0]: scales below 2^-6, counts[1]: impossible.
int requant_lossy_error(const void* codes, const uint8_t* scales, size_t blocks, int m, unsigned long long* err,
                        unsigned long long* counts, void* stream) {
  lossy_error_kernel<<<grid_for(blocks, LOSSY_PER_THREAD), THREADS, 0, stream_of(stream)>>>(static_cast<const uint4*>(codes), scales,
                                                                             blocks, m, err, counts);
  return cudaGetLastError();
}

// amax[0] (a float's bits) is raised to the largest |w|; an infinity or a NaN makes it >= 0x7F800000.
int requant_bf16_amax(const void* w, size_t blocks, unsigned* amax, void* stream) {
  bf16_amax_kernel<<<grid_for(2 * blocks, AMAX_UNROLL), THREADS, 0, stream_of(stream)>>>(static_cast<const uint4*>(w), blocks,
                                                                                     amax);
  return cudaGetLastError();
}

// scale_2[0] = the global scale that amax asks for. One thread: it is a division.
int requant_global_scale(const unsigned* amax, float* scale_2, void* stream) {
  global_scale_kernel<<<1, 1, 0, stream_of(stream)>>>(amax, scale_2);
  return cudaGetLastError();
}

// Encode under scale_2[0]. Blocks with an infinity or a NaN get a NaN scale and codes 0.
int requant_bf16_nvfp4(const void* w, size_t blocks, const float* scale_2, void* out_codes, uint8_t* out_scales,
                       void* stream) {
  bf16_nvfp4_kernel<<<grid_for(blocks, ENCODE_UNROLL), THREADS, 0, stream_of(stream)>>>(
      static_cast<const uint4*>(w), blocks, scale_2, static_cast<uint2*>(out_codes), out_scales);
  return cudaGetLastError();
}

// kind: enum Source. grid float32 [.., ceil(K / wide)] for FP8, whose blocks are high x wide; row: of the tensor, where w
// starts. amax[0] as in requant_bf16_amax.
int requant_float_amax(int kind, const void* w, size_t blocks, int blocks_per_row, const float* grid, int high, int wide,
                       long long row, unsigned* amax, void* stream) {
  const FloatArgs args = float_args(w, blocks, blocks_per_row, grid, high, wide, row);
  const unsigned ctas = strided_grid(blocks);
  switch (static_cast<Source>(kind)) {
    case Source::F16: float_amax_kernel<Source::F16><<<ctas, THREADS, 0, stream_of(stream)>>>(args, amax); break;
    case Source::F32: float_amax_kernel<Source::F32><<<ctas, THREADS, 0, stream_of(stream)>>>(args, amax); break;
    case Source::FP8: float_amax_kernel<Source::FP8><<<ctas, THREADS, 0, stream_of(stream)>>>(args, amax); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

// As requant_bf16_nvfp4, of the sources of requant_float_amax.
int requant_float_nvfp4(int kind, const void* w, size_t blocks, int blocks_per_row, const float* grid, int high, int wide,
                        long long row, const float* scale_2, void* out_codes, uint8_t* out_scales, void* stream) {
  const FloatArgs args = float_args(w, blocks, blocks_per_row, grid, high, wide, row);
  const unsigned ctas = strided_grid(blocks);
  uint2* const codes = static_cast<uint2*>(out_codes);
  cudaStream_t on = stream_of(stream);
  switch (static_cast<Source>(kind)) {
    case Source::F16: float_nvfp4_kernel<Source::F16><<<ctas, THREADS, 0, on>>>(args, scale_2, codes, out_scales); break;
    case Source::F32: float_nvfp4_kernel<Source::F32><<<ctas, THREADS, 0, on>>>(args, scale_2, codes, out_scales); break;
    case Source::FP8: float_nvfp4_kernel<Source::FP8><<<ctas, THREADS, 0, on>>>(args, scale_2, codes, out_scales); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

// A tile's way there and back in one call, between four events: sent, worked on, fetched. One call, since a caller that
// has to take turns with other threads between two of them would make the GPU wait, and the events lie.
struct RequantTile {
  const void* host_in;
  void* device_in;
  void* host_out;
  const void* device_out;
  size_t sent, fetched, blocks, scales_at, out_scales_at;  // bytes; blocks of 16 or 32; scales within the buffers
  void* sum;             // of `op`
  const float* scale_2;  // encode
  const float* grid;     // FP8
  long long row;
  int op, kind, blocks_per_row, high, wide, m;
  void* marks[4];
  void* stream;
};

enum TileOp : int { TILE_AMAX, TILE_ENCODE, TILE_CENSUS, TILE_LOSSY, TILE_HALVES };

int requant_tile(const RequantTile* tile) {
  const RequantTile& t = *tile;
  const cudaStream_t stream = stream_of(t.stream);
  const auto mark = [&](int i) { return cudaEventRecord(static_cast<cudaEvent_t>(t.marks[i]), stream); };
  int status = mark(0);
  if (!status && t.sent) status = cudaMemcpyAsync(t.device_in, t.host_in, t.sent, cudaMemcpyHostToDevice, stream);
  if (!status) status = mark(1);
  if (status) return status;
  const auto* scales = static_cast<const uint8_t*>(t.device_in) + t.scales_at;
  auto* out = static_cast<uint8_t*>(const_cast<void*>(t.device_out));
  auto* out_scales = out + t.out_scales_at;
  auto* total = static_cast<unsigned long long*>(t.sum);
  switch (t.op) {
    case TILE_AMAX:
      status = t.kind < 0 ? requant_bf16_amax(t.device_in, t.blocks, static_cast<unsigned*>(t.sum), stream)
                          : requant_float_amax(t.kind, t.device_in, t.blocks, t.blocks_per_row, t.grid, t.high, t.wide, t.row,
                                               static_cast<unsigned*>(t.sum), stream);
      break;
    case TILE_ENCODE:
      status = t.kind < 0 ? requant_bf16_nvfp4(t.device_in, t.blocks, t.scale_2, out, out_scales, stream)
                          : requant_float_nvfp4(t.kind, t.device_in, t.blocks, t.blocks_per_row, t.grid, t.high, t.wide, t.row,
                                                t.scale_2, out, out_scales, stream);
      break;
    case TILE_CENSUS: status = requant_half_census(t.device_in, scales, t.blocks, total, stream); break;
    case TILE_LOSSY: status = requant_lossy_error(t.device_in, scales, t.blocks, t.m, total, total + 256, stream); break;
    case TILE_HALVES: status = requant_repack_halves(t.device_in, scales, t.blocks, t.m, out, out_scales, total, stream); break;
    default: status = cudaErrorInvalidValue;
  }
  if (!status) status = mark(2);
  if (!status && t.fetched) status = cudaMemcpyAsync(t.host_out, t.device_out, t.fetched, cudaMemcpyDeviceToHost, stream);
  return status ? status : mark(3);
}

const char* requant_quantize_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
}
