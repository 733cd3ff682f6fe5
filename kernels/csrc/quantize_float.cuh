// F16, F32 and FP8 weights -> NVFP4: each value widened to FP32 as the CPU does it (decode.py), then w4a4_encode.cuh's rule.
//
// These run behind a transfer over PCIe, at a fiftieth of the memory's rate: they are written plainly, divide by IEEE, and
// take one block of 16 per thread.
#pragma once
#include <stddef.h>

#include "w4a4_encode.cuh"

namespace requant {

enum class Source : int { F16 = 0, F32 = 1, FP8 = 2 };

// A weight as it is stored. FP8: value = e4m3 * grid[row / high][column / wide]; `row` is that of its first row here.
struct FloatArgs {
  const void* w;
  size_t blocks;       // of 16, along rows
  int blocks_per_row;
  const float* grid;   // [.., across]; FP8 alone
  int high, wide, across;
  long long row;
};

FP4_HD float half_value(uint32_t bits) {  // F16, exact
  const uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
  if (exponent == 31) return emulation::bits_float(sign | 0x7F800000u | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return emulation::bits_float(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
}

FP4_HD float fp8_value(uint32_t byte) {  // E4M3, NaN for 0x7F and 0xFF
  const uint32_t magnitude = byte & 0x7F;
  if (magnitude == 0x7F) return emulation::bits_float(0x7FC00000u);
  return byte & 0x80 ? -e4m3_value(magnitude) : e4m3_value(magnitude);
}

template <Source KIND>
FP4_HD void load_values(const FloatArgs& args, size_t block, float (&v)[16]) {
  if constexpr (KIND == Source::F32) {
    const float* from = static_cast<const float*>(args.w) + block * 16;
    FP4_UNROLL
    for (int i = 0; i < 16; ++i) v[i] = from[i];
  } else if constexpr (KIND == Source::F16) {
    uint32_t words[8];
    memcpy(words, static_cast<const uint8_t*>(args.w) + block * 32, sizeof words);
    FP4_UNROLL
    for (int i = 0; i < 16; ++i) v[i] = half_value(words[i / 2] >> (16 * (i % 2)) & 0xFFFF);
  } else {
    uint32_t words[4];
    memcpy(words, static_cast<const uint8_t*>(args.w) + block * 16, sizeof words);
    const long long row = args.row + static_cast<long long>(block / args.blocks_per_row);
    const int column = static_cast<int>(block % args.blocks_per_row) * 16;
    const float* scales = args.grid + row / args.high * args.across;
    int at = column / args.wide, left = args.wide - column % args.wide;
    float scale = scales[at];
    FP4_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (left-- == 0) scale = scales[++at], left = args.wide - 1;
      v[i] = fp8_value(words[i / 4] >> (8 * (i % 4)) & 0xFF) * scale;
    }
  }
}

FP4_HD uint32_t values_amax(const float (&v)[16]) {  // a float's bits, as integers: NaN is largest
  uint32_t top = 0;
  FP4_UNROLL
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = emulation::float_bits(v[i]) & 0x7FFFFFFFu;
    top = top > bits ? top : bits;
  }
  return top;
}

struct FloatValues {
  const float (&v)[16];
  FP4_HD float operator()(int i) const { return v[i]; }
};

#ifdef __CUDACC__
template <Source KIND>
__global__ void __launch_bounds__(256) float_amax_kernel(const FloatArgs args, unsigned* amax) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  unsigned top = 0;
  for (size_t block = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; block < args.blocks; block += stride) {
    float v[16];
    load_values<KIND>(args, block, v);
    top = max(top, values_amax(v));
  }
  top = __reduce_max_sync(0xFFFFFFFFu, top);
  if (threadIdx.x % 32 == 0 && top > *static_cast<volatile unsigned*>(amax)) atomicMax(amax, top);
}

template <Source KIND>
__global__ void __launch_bounds__(256) float_nvfp4_kernel(const FloatArgs args, const float* scale_2, uint2* out_codes,
                                                          uint8_t* out_scales) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t block = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; block < args.blocks; block += stride) {
    float v[16];
    load_values<KIND>(args, block, v);
    uint32_t codes[2];
    out_scales[block] = static_cast<uint8_t>(encode_nvfp4_values(FloatValues{v}, values_amax(v), *scale_2, codes));
    out_codes[block] = make_uint2(codes[0], codes[1]);
  }
}
#endif

}  // namespace requant
