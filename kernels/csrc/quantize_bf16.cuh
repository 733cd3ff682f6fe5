// BF16 -> NVFP4 at the speed of memory: w4a4_encode.cuh's rule and bytes, with the work per weight cut to what a copy
// leaves time for.
//
// Division. The rule divides every weight by its block's step in FP32, rounded to nearest. With r = 1/step rounded to
// nearest, q = w*r and one correction, fma(fma(-q, step, w), r, q), give that same quotient (Markstein 1990), as long as
// nothing leaves FP32's normal range: so steps in [2^-60, 2^10] take this way.
// Rounding to E2M1. An FP32 between 2^22 and 2^23 is a multiple of 1/2, up to 2^24 of 1, up to 2^25 of 2. So adding
// 2^22 times q's binade rounds q to nearest even on E2M1's grid, and the sum's low bits are the code's, since E2M1's even
// codes are the even multiples. This needs q < 7: a block scale that is a normal E4M3 number leaves at most 6 * 17/16.
// Blocks outside these limits (tiny or huge scales, NaN, infinity) are encoded by the rule itself.
#pragma once
#include <stddef.h>

#include "w4a4_encode.cuh"

namespace requant {

constexpr int AMAX_UNROLL = 8;    // 16-byte loads a thread has in flight
constexpr int ENCODE_UNROLL = 2;  // blocks a thread has in flight, 32 bytes each
constexpr float FAST_STEP_MIN = 0x1p-60f, FAST_STEP_MAX = 0x1p10f;

// Larger magnitudes of two BF16 side by side; as unsigned integers, so that NaN is largest.
FP4_HD uint32_t larger(uint32_t a, uint32_t b) {
  b &= 0x7FFF7FFFu;
#ifdef __CUDA_ARCH__
  return __vmaxu2(a, b);
#else
  const uint32_t low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
  return (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16 | low;
#endif
}

// a / b for b whose reciprocal, rounded to nearest, is `inverse`.
FP4_HD float quotient(float a, float b, float inverse) {
  const float q = a * inverse;
  return fmaf(fmaf(-q, b, a), inverse, q);
}

// 0 <= q < 7 to its magnitude code, in the top 3 bits of the word.
FP4_HD uint32_t top_code(float q) {
  const float binade = emulation::bits_float(emulation::float_bits(q) & 0x7F800000u);
  const uint32_t sum = emulation::float_bits(fmaf(binade > 1.0f ? binade : 1.0f, 0x1p22f, q));
  return (sum + (sum >> 22) - 2 * (127 + 22)) << 29;  // multiples of the grid's step, plus 2 for each binade above 1
}

// (value, the `count` top bits of `top`): how codes are strung together, the last first.
FP4_HD uint32_t push(uint32_t value, uint32_t top, int count) {
#ifdef __CUDA_ARCH__
  return __funnelshift_l(top, value, count);
#else
  return value << count | top >> (32 - count);
#endif
}

struct GlobalScaleOf {  // a tensor's global scale and what is derived from it once per thread
  float scale, six, inverse_six;
  bool fast;
};

FP4_HD GlobalScaleOf prepare(float global_scale) {
  const float six = E2M1_MAX * global_scale;
  return {global_scale, six, 1.0f / six, six >= 0x1p-80f && six <= 0x1p80f};
}

FP4_HD bool encode_fast(const uint32_t (&pairs)[8], const GlobalScaleOf& global, uint32_t (&codes)[2], uint32_t& scale) {
  uint32_t top = 0;
  FP4_UNROLL
  for (int i = 0; i < 8; ++i) top = larger(top, pairs[i]);
  const uint32_t amax = (top & 0xFFFF) > top >> 16 ? top & 0xFFFF : top >> 16;
  const float wanted = amax == 0 ? 1.0f : quotient(bf16_value(amax), global.six, global.inverse_six);
  if (!(global.fast && wanted >= 0x1p-6f && wanted <= 449.0f && amax < BF16_INFINITY)) return false;
  scale = e4m3_byte(fminf(wanted, E4M3_MAX));
  const float step = emulation::bits_float((scale << 20) + ((127 - 7) << 23)) * global.scale;
  if (!(step >= FAST_STEP_MIN && step <= FAST_STEP_MAX)) return false;
  const float inverse = 1.0f / step;
  FP4_UNROLL
  for (int word = 0; word < 2; ++word) {
    uint32_t out = 0;
    FP4_UNROLL
    for (int i = 3; i >= 0; --i) {
      const uint32_t pair = pairs[4 * word + i], magnitudes = pair & 0x7FFF7FFFu;
      const uint32_t signs = pair & (magnitudes + 0x7FFF7FFFu);  // bits 15 and 31: set where negative and not zero
      out = push(out, signs, 1);
      out = push(out, top_code(quotient(emulation::bits_float(magnitudes & 0x7FFF0000u), step, inverse)), 3);
      out = push(out, signs << 16, 1);
      out = push(out, top_code(quotient(emulation::bits_float(magnitudes << 16), step, inverse)), 3);
    }
    codes[word] = out;
  }
  return true;
}

#ifdef __CUDACC__
// The rule itself, for the few blocks that encode_fast leaves. Reads its block anew: an array handed over to a function
// would live in memory, for every block.
__device__ __noinline__ void encode_slow(const uint4* w, size_t block, float global_scale, uint2* out_codes,
                                         uint8_t* out_scales) {
  const uint4 a = w[2 * block], b = w[2 * block + 1];
  const uint32_t pairs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  uint32_t codes[2];
  out_scales[block] = static_cast<uint8_t>(encode_nvfp4(pairs, global_scale, codes));
  out_codes[block] = make_uint2(codes[0], codes[1]);
}

__global__ void __launch_bounds__(256) bf16_amax_kernel(const uint4* w, size_t blocks, unsigned* amax) {
  const size_t loads = blocks * 2, stride = blockDim.x, first = blockIdx.x * stride * AMAX_UNROLL + threadIdx.x;
  uint4 v[AMAX_UNROLL];
FP4_UNROLL
  for (int i = 0; i < AMAX_UNROLL; ++i)
    v[i] = first + i * stride < loads ? w[first + i * stride] : make_uint4(0, 0, 0, 0);
  uint32_t top = 0;
FP4_UNROLL
  for (int i = 0; i < AMAX_UNROLL; ++i) top = larger(larger(larger(larger(top, v[i].x), v[i].y), v[i].z), v[i].w);
  const unsigned mine = __reduce_max_sync(0xFFFFFFFFu, max(top & 0xFFFF, top >> 16));
  __shared__ unsigned warps[8];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x < 32) {
    const unsigned all = __reduce_max_sync(0xFFFFFFFFu, threadIdx.x < 8 ? warps[threadIdx.x] : 0);
    // A CTA that cannot raise the maximum stays away from the atomic: there are many, and few do.
    if (threadIdx.x == 0 && all << 16 > *static_cast<volatile unsigned*>(amax)) atomicMax(amax, all << 16);
  }
}

// amax / (6 * 448), 1 where all is zero, never 0 (quantize.nvfp4_global_scale).
__global__ void global_scale_kernel(const unsigned* amax, float* scale_2) {
  *scale_2 = *amax ? fmaxf(nvfp4_global_scale(emulation::bits_float(*amax)), 0x1p-149f) : 1.0f;
}

// Blocks are taken from the end: what the amax pass read last is still in the L2 cache.
__global__ void __launch_bounds__(256) bf16_nvfp4_kernel(const uint4* w, size_t blocks, const float* scale_2,
                                                         uint2* out_codes, uint8_t* out_scales) {
  const GlobalScaleOf global = prepare(*scale_2);
  const size_t stride = blockDim.x, cta = gridDim.x - 1 - blockIdx.x, first = cta * stride * ENCODE_UNROLL + threadIdx.x;
  uint4 v[ENCODE_UNROLL][2];
FP4_UNROLL
  for (int i = 0; i < ENCODE_UNROLL; ++i) {
    const size_t block = first + i * stride;
    if (block < blocks) v[i][0] = __ldcs(w + 2 * block), v[i][1] = __ldcs(w + 2 * block + 1);
  }
FP4_UNROLL
  for (int i = 0; i < ENCODE_UNROLL; ++i) {
    const size_t block = first + i * stride;
    if (block >= blocks) continue;
    const uint32_t pairs[8] = {v[i][0].x, v[i][0].y, v[i][0].z, v[i][0].w, v[i][1].x, v[i][1].y, v[i][1].z, v[i][1].w};
    uint32_t codes[2], scale;
    if (encode_fast(pairs, global, codes, scale)) {
      out_scales[block] = static_cast<uint8_t>(scale);
      __stcs(out_codes + block, make_uint2(codes[0], codes[1]));
    } else {
      encode_slow(w, block, global.scale, out_codes, out_scales);
    }
  }
}

#endif

}  // namespace requant
