// BF16 values to one FP4 block: the encoding rules, without threads or memory. Compiles for the host too.
//
// NVFP4, 16 values under a given global scale s2 (modelopt's rule, FP32 throughout):
//   s = amax / (6 s2), 1 where that is 0; scale = e4m3(clamp(s, 2^-9, 448)), ties to even
//   code = nearest E2M1 to v / (scale * s2), ties to even, above 5 saturates to 6; the sign only where v / ... < 0
// MXFP4, 32 values (modelopt's rule): scale = the smallest 2^e >= 2^-127 with amax <= 6 2^e;
//   code = nearest E2M1 to v / 2^e, ties toward zero; the sign where v <= 0, so a zero is 0x8
//
// Neither format has an infinity or a NaN among its codes, but both have a NaN scale: a block that holds one gets it,
// with codes 0. So the rows and only the rows that held a NaN or an infinity come out of the matmul as NaN.
#pragma once
#include <math.h>

#include "fp4_mma.cuh"

namespace requant {

constexpr float E2M1_MAX = 6.0f;
constexpr float E4M3_MAX = 448.0f;
constexpr float E4M3_MIN = 0x1p-9f;
constexpr uint32_t BF16_INFINITY = 0x7F80;
constexpr uint32_t FP32_INFINITY = 0x7F800000;

FP4_HD float bf16_value(uint32_t bits) { return emulation::bits_float(bits << 16); }

// Global scale under which the largest finite |value| lands on 6 * 448; 1 where all is zero.
FP4_HD float nvfp4_global_scale(float amax) { return amax > 0.0f ? amax / (E2M1_MAX * E4M3_MAX) : 1.0f; }

// value in [2^-9, 448] to the nearest E4M3 byte, ties to even.
FP4_HD uint32_t e4m3_byte(float value) {
  if (value < 0x1p-6f) return static_cast<uint32_t>(rintf(value * 512.0f));  // subnormals count 2^-9
  uint32_t bits = emulation::float_bits(value);
  bits += 0x7FFFF + (bits >> 20 & 1);  // keep 3 of 23 fraction bits
  return (bits >> 20) - ((127 - 7) << 3);
}

FP4_HD float e4m3_value(uint32_t byte) {
  uint32_t field = byte >> 3, mantissa = byte & 7;
  if (field == 0) return static_cast<float>(mantissa) * E4M3_MIN;
  return emulation::bits_float((field + 127 - 7) << 23 | mantissa << 20);
}

// Largest |value| of a block as BF16 bits: integer order is magnitude order, and >= BF16_INFINITY says "not finite".
template <int GROUP>
FP4_HD uint32_t block_amax(const uint32_t (&pairs)[GROUP / 2]) {
  uint32_t amax = 0;
  FP4_UNROLL
  for (int i = 0; i < GROUP / 2; ++i) {
    uint32_t low = pairs[i] & 0x7FFF, high = pairs[i] >> 16 & 0x7FFF;
    amax = amax > low ? amax : low;
    amax = amax > high ? amax : high;
  }
  return amax;
}

// 16 values to 16 nibbles under the scale that amax asks for; returns its byte. amax: a float's bits, >= FP32_INFINITY
// where one of them is not finite. `value(i)` gives them, widened to FP32.
template <class Value>
FP4_HD uint32_t encode_nvfp4_values(const Value& value, uint32_t amax, float global_scale, uint32_t (&codes)[2]) {
  codes[0] = codes[1] = 0;
  if (amax >= FP32_INFINITY) return 0x7F;
  float wanted = emulation::bits_float(amax) / (E2M1_MAX * global_scale);
  if (wanted == 0.0f) wanted = 1.0f;
  uint32_t scale = e4m3_byte(fminf(fmaxf(wanted, E4M3_MIN), E4M3_MAX));
  float step = e4m3_value(scale) * global_scale;
  if (step == 0.0f) return scale;  // a step under FP32's range: the values round to zero
  FP4_UNROLL
  for (int i = 0; i < 16; ++i) {
    float x = value(i) / step, m = fabsf(x);
    uint32_t order = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    codes[i / 8] |= (order | (x < 0.0f) << 3) << (4 * (i % 8));
  }
  return scale;
}

struct PairValues {  // of BF16 pairs, the first in the low half
  const uint32_t (&pairs)[8];
  FP4_HD float operator()(int i) const { return bf16_value(pairs[i / 2] >> (16 * (i % 2)) & 0xFFFF); }
};

// pairs: 16 BF16 values, the first in the low half. codes: 16 nibbles. Returns the scale byte.
FP4_HD uint32_t encode_nvfp4(const uint32_t (&pairs)[8], float global_scale, uint32_t (&codes)[2]) {
  return encode_nvfp4_values(PairValues{pairs}, block_amax<16>(pairs) << 16, global_scale, codes);
}

// pairs: 32 BF16 values. codes: 32 nibbles. Returns the scale byte.
FP4_HD uint32_t encode_mxfp4(const uint32_t (&pairs)[16], uint32_t (&codes)[4]) {
  codes[0] = codes[1] = codes[2] = codes[3] = 0;
  uint32_t amax = block_amax<32>(pairs);
  if (amax >= BF16_INFINITY) return 0xFF;
  int exponent;
  float mantissa = frexpf(bf16_value(amax), &exponent);  // in [0.5, 1); 6 = 0.75 * 2^3
  exponent -= mantissa <= 0.75f ? 3 : 2;
  if (amax == 0 || exponent < -127) exponent = -127;
  float inverse = ldexpf(1.0f, -exponent);  // exact, at most 2^127
  FP4_UNROLL
  for (int i = 0; i < 32; ++i) {
    float x = bf16_value(pairs[i / 2] >> (16 * (i % 2)) & 0xFFFF) * inverse, m = fabsf(x);
    uint32_t order = (m > 0.25f) + (m > 0.75f) + (m > 1.25f) + (m > 1.75f) + (m > 2.5f) + (m > 3.5f) + (m > 5.0f);
    codes[i / 8] |= (order | (x <= 0.0f) << 3) << (4 * (i % 8));
  }
  return static_cast<uint32_t>(exponent + 127);
}

}  // namespace requant
