// From FP4 bytes to tensor-core operands, exactly.
//
// E2M1 is s e2 m1. Its three magnitude bits, placed at the bottom of a half's exponent and the top of its mantissa
// (bits 9..11), read as magnitude * 2^-14, subnormal 0.5 included, because a half's subnormals continue the same ladder.
// So a code costs bit moves only, and the factor 2^14 is paid once per output (kCodeFactor).
// Eight codes of a 32-bit word come out as four registers of two halves; the order (0,4) (1,5) (2,6) (3,7) is the one
// that needs the fewest instructions, and it is free: x is stored in the same order.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "ptx.cuh"

namespace requant {

constexpr float kCodeFactor = 16384.0f;  // 2^14: decode_e2m1 yields value / 2^14

// 8 codes -> halves (c0,c4), (c1,c5), (c2,c6), (c3,c7), each value / 2^14.
__device__ __forceinline__ void decode_e2m1(uint32_t word, uint32_t (&pairs)[4]) {
  const uint32_t odd = (word & 0x80808080u) | ((word >> 3) & 0x0E0E0E0Eu);         // high bytes of c1 c3 c5 c7
  const uint32_t even = ((word << 4) & 0x80808080u) | ((word << 1) & 0x0E0E0E0Eu);  // high bytes of c0 c2 c4 c6
  pairs[0] = __byte_perm(even, 0, 0x2404);
  pairs[1] = __byte_perm(odd, 0, 0x2404);
  pairs[2] = even & 0xFF00FF00u;
  pairs[3] = odd & 0xFF00FF00u;
}

// 8 codes -> BF16 pairs (c0,c1), (c2,c3), (c4,c5), (c6,c7) in the order of memory, each value / 2^126. The multiplication
// puts a code's sign on bit 15 (<< 12) and its magnitude on bits 6..8 (<< 6), which do not overlap. Six more instructions
// than decode_e2m1, and x needs no preparation.
__device__ __forceinline__ void decode_e2m1_bf16(uint32_t word, uint32_t (&pairs)[4]) {
  const uint32_t even = word & 0x0F0F0F0Fu, odd = (word >> 4) & 0x0F0F0F0Fu;
  // Bytes: code 2i, zero, code 2i + 1, zero. Selectors 8.. repeat the sign of a byte that has none: zero.
  pairs[0] = (permute_bytes(even, odd, 0x8480u) * 0x1040u) & 0x81C081C0u;
  pairs[1] = (permute_bytes(even, odd, 0x8581u) * 0x1040u) & 0x81C081C0u;
  pairs[2] = (permute_bytes(even, odd, 0x8682u) * 0x1040u) & 0x81C081C0u;
  pairs[3] = (permute_bytes(even, odd, 0x8783u) * 0x1040u) & 0x81C081C0u;
}

// Two E4M3 bytes (low half of `bytes`) -> two halves, exactly; NaN stays NaN.
__device__ __forceinline__ __half2 decode_e4m3x2(uint32_t bytes) {
  uint32_t halves;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(bytes)));
#else
  // E4M3 bits under a half's exponent read as value / 2^8; 0x7F and 0xFF are the NaNs.
  const uint32_t spread = (bytes & 0xFFu) | ((bytes & 0xFF00u) << 8);
  halves = ((spread & 0x00800080u) << 8) | ((spread & 0x007F007Fu) << 7);
  const __half2 scaled = __hmul2(*reinterpret_cast<__half2*>(&halves), __float2half2_rn(256.0f));
  halves = *reinterpret_cast<const uint32_t*>(&scaled);
  if ((spread & 0x7Fu) == 0x7Fu) halves |= 0x00007FFFu;
  if ((spread & 0x7F0000u) == 0x7F0000u) halves |= 0x7FFF0000u;
#endif
  return *reinterpret_cast<__half2*>(&halves);
}

// An E8M0 byte -> 2^(byte - 127) as float; 0 is the subnormal 2^-127, 255 is NaN. (A plain shift gets both wrong.)
__device__ __forceinline__ float decode_e8m0(uint32_t byte) {
  uint32_t bits = byte << 23;
  if (byte == 0u) bits = 0x00400000u;
  if (byte == 255u) bits = 0x7FC00000u;
  return __uint_as_float(bits);
}

__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, __half2 b) {
  const __half2 product = __hmul2(*reinterpret_cast<__half2*>(&a), b);
  return *reinterpret_cast<const uint32_t*>(&product);
}

constexpr float kBf16ScaleLift = 0x1p110f;   // keeps code * scale in BF16's range: value / 2^16
constexpr float kBf16CodeFactor = 0x1p16f;

// Two E4M3 bytes -> BF16 pair, times kBf16ScaleLift; exact, NaN stays NaN.
__device__ __forceinline__ __nv_bfloat162 decode_e4m3x2_bf16(uint32_t bytes) {
  const float2 two = __half22float2(decode_e4m3x2(bytes));
  return __floats2bfloat162_rn(two.x * kBf16ScaleLift, two.y * kBf16ScaleLift);
}

__device__ __forceinline__ uint32_t multiply_bf162(uint32_t a, __nv_bfloat162 b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), b);
  return *reinterpret_cast<const uint32_t*>(&product);
}

}  // namespace requant
