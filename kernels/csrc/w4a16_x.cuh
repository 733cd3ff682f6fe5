// Activations: copied to shared memory, scaled to halves, laid out as the MMA reads them.
#pragma once
#include "w4a16_ring.cuh"

namespace requant {

// The x of one chunk of K for one column warp, shared by that column's row warps: copied, then scaled to halves in place.
//
// A lane's piece is 8 consecutive k of one token. Lanes are dealt so that both the copy and the MMA's reads are free of
// bank conflicts; in shared memory a piece lies at [line][step 0..7][token][p].
template <ScaleMode MODE, bool SINGLE>
struct Activations {
  static constexpr int kHalves = SINGLE ? 1 : 2;  // pieces of a lane per stage and token pair
  static constexpr int kStepK = MODE == ScaleMode::kScaleAfter ? 32 : 8;   // k from one step to the next
  static constexpr int kLaneK = MODE == ScaleMode::kScaleAfter ? 8 : 64;   // k from one lane p to the next
  static constexpr int kHalfK = 4 * kStepK;

  int p, token, step;  // of this lane, in the first pair
  // This warp's items: pairs pair, pair + pair_step, ... and of each the stages stage, stage + stage_step, ...
  int pairs, pair, pair_step, stage, stage_step;

  __device__ __forceinline__ Activations(const Params& params, int width, int lane, int row_warp)
      : p(lane & 3), token(SINGLE ? 0 : (lane >> 2) & 1), step(SINGLE ? lane >> 2 : lane >> 3), pairs((width + 1) / 2) {
    if (pairs >= params.row_warps) {
      pair = row_warp;
      pair_step = params.row_warps;
      stage = 0;
      stage_step = 1;
    } else {  // several warps to a pair; `pairs` is a power of two
      const int shift = __ffs(pairs) - 1;
      pair = row_warp & (pairs - 1);
      pair_step = pairs;
      stage = row_warp >> shift;
      stage_step = params.row_warps >> shift;
      if (stage >= stage_step) stage = 1 << 20;  // one warp too many for an even deal
    }
  }

  __device__ __forceinline__ uint32_t offset(int of_pair, int width) const {
    return (step * width + 2 * of_pair + token) * 64 + p * kPiece;
  }

  template <bool GROUPED>
  __device__ __forceinline__ void copy(const Params& params, const Unit& unit, uint32_t x_shared, int width,
                                       int first_stage, int stages) const {
#pragma unroll 1
    for (int u = pair; u < pairs; u += pair_step) {
      const int t = 2 * u + token;
      const bool present = t < unit.tokens;
      int row = present ? t : 0;
      if (GROUPED && present) row = t == 0 ? unit.first_row : params.x_rows[unit.first_slot + t];
      int k = (first_stage + stage * params.column_warps) * kStageK + p * kLaneK + step * kStepK;
      const __nv_bfloat16* from = params.x + static_cast<size_t>(row) * params.k + k;
      uint32_t to = x_shared + offset(u, width) + stage * width * kStageXBytes;
      k = present ? k : params.k;
#pragma unroll 1
      for (int s = stage; s < stages; s += stage_step) {
#pragma unroll
        for (int i = 0; i < kHalves * kStageLines; ++i) {
          const int line = i / kHalves, half = i % kHalves, ahead = line * kLineK + half * kHalfK;
          const bool inside = k + ahead < params.k;
          copy_async_cached(to + (line * 8 + half * 4) * width * 64, inside ? from + ahead : params.x, inside ? 16 : 0);
        }
        k += stage_step * params.column_warps * kStageK;
        from += stage_step * params.column_warps * kStageK;
        to += stage_step * width * kStageXBytes;
      }
    }
  }

  // Raise largest[token] to the largest |x| (as bf16 bits) among this warp's pieces.
  __device__ __forceinline__ void find_largest(const uint8_t* x_shared, uint32_t* largest, int width, int stages,
                                               int lane) const {
#pragma unroll 1
    for (int u = pair; u < pairs; u += pair_step) {
      const uint8_t* at = x_shared + offset(u, width);
      uint32_t most = 0;
#pragma unroll 2
      for (int s = stage; s < stages; s += stage_step) {
#pragma unroll
        for (int i = 0; i < kHalves * kStageLines; ++i) {
          const uint4 v = *reinterpret_cast<const uint4*>(at + (s * kStageLines * 8 + i * (8 / kHalves)) * width * 64);
          const uint32_t a = __vmaxu2(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu);
          const uint32_t b = __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu);
          most = __vmaxu2(most, __vmaxu2(a, b));
        }
      }
      most = max(most & 0xFFFFu, most >> 16);
      const uint32_t of_first = __reduce_max_sync(~0u, token ? 0u : most);
      const uint32_t of_second = SINGLE ? 0u : __reduce_max_sync(~0u, token ? most : 0u);
      if (lane == 0 || (!SINGLE && lane == 4)) atomicMax(largest + 2 * u + token, token ? of_second : of_first);
    }
  }

  // The power of two (as a biased exponent) that brings a token's largest |x| to [2^14, 2^15).
  __device__ static __forceinline__ int shift_for(uint32_t largest) {
    // 253: the inverse 2^-126 must still be a normal float.
    return max(min(127 + static_cast<int>(kHalfTargetExponent) - static_cast<int>(largest >> 7), 253), 1);
  }

  // What undoes that power of two and kCodeFactor.
  __device__ static __forceinline__ float restore(uint32_t largest) {
    if (MODE == ScaleMode::kBf16) return kBf16CodeFactor;
    return __uint_as_float(static_cast<uint32_t>(254 - shift_for(largest)) << 23) * kCodeFactor;
  }

  // bf16 -> half * 2^n in place, each lane on the pieces that it copied.
  __device__ __forceinline__ void convert(uint8_t* x_shared, const uint32_t* largest, int width, int stages) const {
#pragma unroll 1
    for (int u = pair; u < pairs; u += pair_step) {
      uint8_t* at = x_shared + offset(u, width);
      const float factor = __uint_as_float(static_cast<uint32_t>(shift_for(largest[2 * u + token])) << 23);
#pragma unroll 2
      for (int s = stage; s < stages; s += stage_step) {
#pragma unroll
        for (int i = 0; i < kHalves * kStageLines; ++i) {
          uint4* piece = reinterpret_cast<uint4*>(at + (s * kStageLines * 8 + i * (8 / kHalves)) * width * 64);
          *piece = to_halves(*piece, factor);
        }
      }
    }
  }

  // Elements 0..7 -> pairs (0,4) (1,5) (2,6) (3,7), the order of decode_e2m1.
  __device__ static __forceinline__ uint4 to_halves(uint4 v, float factor) {
    const auto pair = [factor](uint32_t low, uint32_t high, bool upper) {
      const float a = __uint_as_float(upper ? low & 0xFFFF0000u : low << 16) * factor;
      const float b = __uint_as_float(upper ? high & 0xFFFF0000u : high << 16) * factor;
      const __half2 h = __floats2half2_rn(a, b);
      return *reinterpret_cast<const uint32_t*>(&h);
    };
    return make_uint4(pair(v.x, v.z, false), pair(v.x, v.z, true), pair(v.y, v.w, false), pair(v.y, v.w, true));
  }
};

}  // namespace requant
