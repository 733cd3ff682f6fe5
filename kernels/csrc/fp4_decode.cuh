// From FP4 bytes to tensor-core operands, exactly.
//
// E2M1 is s e2 m1. Its three magnitude bits, placed at the bottom of a half's exponent and the top of its mantissa
// (bits 9..11), read as magnitude * 2^-14, subnormal 0.5 included, because a half's subnormals continue the same ladder.
// So a code costs bit moves only, and the factor 2^14 is paid once per output (kCodeFactor).
// Eight codes of a 32-bit word come out as four registers of two halves; the order (0,4) (1,5) (2,6) (3,7) is the one
// that needs the fewest instructions, and it is free: x is stored in the same order.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

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

}  // namespace requant
