// The block-scaled FP4 tensor core instruction of SM120, or the same thing in integers.
//
//   fp4_mma<FORMAT, BYTE, TA, TB>(d, a, b, sfa, sfb)      d += A . B, one warp, m16 n8 k64
//
// On SM120/121 this is one `mma.sync` (OMMA in SASS). Everywhere else, and on SM120 too under -DREQUANT_FP4_EMULATE, it
// is a warp-collective emulation with the same fragments and, bit for bit, the same result. So a kernel written for
// SM120 can be proven on another chip: only this instruction differs. Speed under emulation means nothing.
//
// Fragments, g = lane / 4, p = lane % 4; one 32-bit register holds 8 codes, low nibble = lowest k:
//   a[0], a[1]   rows g, g + 8, k = 8p .. 8p+7           a[2], a[3]   the same rows, k = 32 + 8p ..
//   b[0], b[1]   column g, k = 8p .. and 32 + 8p ..      (B lies [N][K])
//   d[0], d[1]   row g, columns 2p, 2p + 1               d[2], d[3]   row g + 8
// Scales: a 32-bit register holds a row's bytes in the order of k. Four E4M3 bytes cover k64; so do two E8M0 bytes, which
// start at byte BYTE = 0 or 2. Rows g and g + 8 are read from lanes 2 TA and 2 TA + 1 of quad g, column n from lane TB of
// quad n. So one register per lane can serve 32 rows (TA = 0, 1) or 32 columns (TB = 0..3) without reloading.
//
// Arithmetic: see kernels/mma_model.py, which says it once more and is held against golden cases (MMA-Sim,
// arXiv 2511.10909). The host part compiles with any C++17 compiler; a host "warp" is an array of 32 lanes.
#pragma once
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define FP4_HD __host__ __device__ __forceinline__
#define FP4_UNROLL _Pragma("unroll")  // arrays indexed by constants only stay in registers
#else
#define FP4_HD inline
#define FP4_UNROLL
#endif

// The instruction exists for architecture- or family-specific SM12x targets only (sm_120a, sm_120f, sm_121a).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300 && !defined(REQUANT_FP4_EMULATE) && \
    (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define FP4_MMA_NATIVE 1
#else
#define FP4_MMA_NATIVE 0
#endif

namespace requant {

enum class Format { NVFP4, MXFP4 };

namespace emulation {

FP4_HD uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

FP4_HD float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

FP4_HD int leading_bit(uint64_t value) {  // value != 0
#ifdef __CUDA_ARCH__
  return 63 - __clzll(static_cast<long long>(value));
#else
  return 63 - __builtin_clzll(value);
#endif
}

// Four nibbles -> four bytes of |value| in halves: 0 1 2 3 4 6 8 12. Bit 3 of each nibble must be clear.
FP4_HD uint32_t magnitudes(uint32_t nibbles) {
#ifdef __CUDA_ARCH__
  return __byte_perm(0x03020100u, 0x0C080604u, nibbles);
#else
  const uint64_t table = 0x0C08060403020100ull;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i)
    bytes |= static_cast<uint32_t>((table >> (8 * ((nibbles >> (4 * i)) & 7))) & 0xFF) << (8 * i);
  return bytes;
#endif
}

// Sum of four products of signed bytes.
FP4_HD int dot_bytes(uint32_t x, uint32_t y, int sum) {
#ifdef __CUDA_ARCH__
  return __dp4a(static_cast<int>(x), static_cast<int>(y), sum);
#else
  for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(x >> (8 * i)) * static_cast<int8_t>(y >> (8 * i));
  return sum;
#endif
}

// Dot of 8 + 8 E2M1 codes in quarters, exact. The signs of both codes go into x's bytes as two's complement.
FP4_HD int dot_codes(uint32_t a, uint32_t b) {
  int sum = 0;
  FP4_UNROLL
  for (int half = 0; half < 2; ++half, a >>= 16, b >>= 16) {
    uint32_t x = magnitudes(a & 0x7777u), y = magnitudes(b & 0x7777u);
    uint32_t sign = a ^ b;
    uint32_t negative =
        (sign >> 3 & 1) | (sign >> 7 & 1) << 8 | (sign >> 11 & 1) << 16 | (sign >> 15 & 1) << 24;
    negative &= (x + 0x7F7F7F7Fu) >> 7;  // where x is 0 there is nothing to negate, and ~0 + 1 would carry
    sum = dot_bytes((x ^ negative * 255u) + negative, y, sum);
  }
  return sum;
}

struct Scale {  // eighths / 8 * 2^exponent
  int eighths, exponent;
  bool nan;
};

template <Format FORMAT>
FP4_HD Scale decode_scale(uint32_t byte) {
  if (FORMAT == Format::MXFP4) {
    byte &= 0xFF;
    return {8, static_cast<int>(byte) - 127, byte == 0xFF};
  }
  byte &= 0x7F;  // ue4m3: the sign bit is ignored
  int field = static_cast<int>(byte >> 3), mantissa = static_cast<int>(byte & 7);
  int eighths = field ? 8 + mantissa : mantissa;
  return {eighths, eighths == 0 ? -126 : (field ? field : 1) - 7, byte == 0x7F};
}

// value * 2^left, cut toward zero; left <= 27.
FP4_HD int64_t shift(int64_t value, int left) {
  if (left >= 0) return value * (int64_t{1} << left);
  if (left < -62) return 0;
  return value < 0 ? -((-value) >> -left) : value >> -left;
}

// One output of one instruction: c plus four exact dots (in quarters) under their scales.
template <Format FORMAT>
FP4_HD float accumulate(float c, const int (&dots)[4], uint32_t scales_a, uint32_t scales_b) {
  constexpr int FRACTION = 35;  // bits kept below the largest exponent
  const float nan = bits_float(0x7FFFFFFFu);
  uint32_t bits = float_bits(c), field = bits >> 23 & 0xFF, fraction = bits & 0x7FFFFF;
  if (field == 255 && fraction) return nan;

  int c_exponent = field ? static_cast<int>(field) - 127 : -126;
  int64_t c_significand = field ? fraction | 0x800000 : fraction;
  if (bits >> 31) c_significand = -c_significand;

  int64_t product[4];
  int exponent[4], largest = c_exponent;
  FP4_UNROLL
  for (int group = 0; group < 4; ++group) {
    int byte = FORMAT == Format::NVFP4 ? group : group / 2;
    Scale a = decode_scale<FORMAT>(scales_a >> (8 * byte)), b = decode_scale<FORMAT>(scales_b >> (8 * byte));
    if (a.nan || b.nan) return nan;
    product[group] = int64_t{dots[group]} * a.eighths * b.eighths;
    exponent[group] = a.exponent + b.exponent;
    if (exponent[group] > largest) largest = exponent[group];
  }
  if (field == 255) return c;

  int64_t total = shift(c_significand, FRACTION - 23 + c_exponent - largest);
  FP4_UNROLL
  for (int group = 0; group < 4; ++group)  // a product has 8 fraction bits: quarters * eighths * eighths
    total += shift(product[group], FRACTION - 8 + exponent[group] - largest);
  if (total == 0) return 0.0f;

  uint32_t sign = total < 0 ? 0x80000000u : 0;
  int64_t magnitude = total < 0 ? -total : total;
  int unit = largest - FRACTION;  // exponent of magnitude's last bit
  int leading = leading_bit(static_cast<uint64_t>(magnitude)) + unit;
  if (leading > 127) return bits_float(sign | 0x7F800000u);
  int result_unit = (leading > -126 ? leading : -126) - 23;
  uint32_t significand = static_cast<uint32_t>(shift(magnitude, unit - result_unit));
  uint32_t biased = leading >= -126 ? static_cast<uint32_t>(leading + 126) << 23 : 0;  // its leading 1 adds the rest
  return bits_float(sign | (biased + significand));
}

// What one lane computes. `warp` says what the other lanes hold: warp.a(i, lane), .b(i, lane), .sfa(lane), .sfb(lane).
// On a GPU these are shuffles, so every lane must call this, in step.
template <Format FORMAT, class Warp>
FP4_HD void mma_lane(const Warp& warp, int lane, float (&d)[4], int byte, int ta, int tb) {
  int g = lane / 4, p = lane % 4;
  int column[2] = {2 * p, 2 * p + 1};
  int dots[2][2][4] = {};  // [row g, g + 8][column][group of 16]
  FP4_UNROLL
  for (int half = 0; half < 2; ++half) {
    FP4_UNROLL
    for (int chunk = 0; chunk < 4; ++chunk) {  // 8 codes, held by lane `chunk` of the quad
      uint32_t y[2] = {warp.b(half, 4 * column[0] + chunk), warp.b(half, 4 * column[1] + chunk)};
      FP4_UNROLL
      for (int row = 0; row < 2; ++row) {
        uint32_t x = warp.a(2 * half + row, 4 * g + chunk);
        FP4_UNROLL
        for (int c = 0; c < 2; ++c) dots[row][c][2 * half + chunk / 2] += dot_codes(x, y[c]);
      }
    }
  }
  uint32_t scale_b[2] = {warp.sfb(4 * column[0] + tb) >> (8 * byte), warp.sfb(4 * column[1] + tb) >> (8 * byte)};
  FP4_UNROLL
  for (int row = 0; row < 2; ++row) {
    uint32_t scale_a = warp.sfa(4 * g + 2 * ta + row) >> (8 * byte);
    FP4_UNROLL
    for (int c = 0; c < 2; ++c)
      d[2 * row + c] = accumulate<FORMAT>(d[2 * row + c], dots[row][c], scale_a, scale_b[c]);
  }
}

#ifdef __CUDACC__
struct ShuffleWarp {
  const uint32_t (&a_)[4];
  const uint32_t (&b_)[2];
  uint32_t sfa_, sfb_;
  __device__ uint32_t a(int i, int lane) const { return __shfl_sync(0xFFFFFFFFu, a_[i], lane); }
  __device__ uint32_t b(int i, int lane) const { return __shfl_sync(0xFFFFFFFFu, b_[i], lane); }
  __device__ uint32_t sfa(int lane) const { return __shfl_sync(0xFFFFFFFFu, sfa_, lane); }
  __device__ uint32_t sfb(int lane) const { return __shfl_sync(0xFFFFFFFFu, sfb_, lane); }
};

// Not inlined, and operands by value: a kernel holds dozens of these, and compiles in seconds rather than minutes.
template <Format FORMAT>
__device__ __noinline__ float4 mma_warp(float4 c, uint4 a4, uint2 b2, uint32_t sfa, uint32_t sfb, int byte, int ta,
                                        int tb) {
  float d[4] = {c.x, c.y, c.z, c.w};
  const uint32_t a[4] = {a4.x, a4.y, a4.z, a4.w}, b[2] = {b2.x, b2.y};
  mma_lane<FORMAT>(ShuffleWarp{a, b, sfa, sfb}, static_cast<int>(threadIdx.x % 32), d, byte, ta, tb);
  return make_float4(d[0], d[1], d[2], d[3]);
}
#endif

}  // namespace emulation

#ifdef __CUDACC__
template <Format FORMAT, int BYTE, int TA, int TB>
__device__ __forceinline__ void fp4_mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t sfa,
                                        uint32_t sfb) {
  static_assert(FORMAT == Format::NVFP4 ? BYTE == 0 : BYTE == 0 || BYTE == 2, "E4M3 scales fill the register");
  static_assert(TA >= 0 && TA < 2 && TB >= 0 && TB < 4, "lane selectors of a quad");
#if FP4_MMA_NATIVE
  if constexpr (FORMAT == Format::NVFP4) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {%12,%13}, %11, {%12,%14};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(sfa), "r"(sfb), "n"(BYTE), "n"(TA),
          "n"(TB));
  } else {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {%12,%13}, %11, {%12,%14};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(sfa), "r"(sfb), "n"(BYTE), "n"(TA),
          "n"(TB));
  }
#else
  float4 sum = emulation::mma_warp<FORMAT>(make_float4(d[0], d[1], d[2], d[3]), make_uint4(a[0], a[1], a[2], a[3]),
                                           make_uint2(b[0], b[1]), sfa, sfb, BYTE, TA, TB);
  d[0] = sum.x, d[1] = sum.y, d[2] = sum.z, d[3] = sum.w;
#endif
}
#endif

}  // namespace requant
