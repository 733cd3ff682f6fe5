// The x of dense layers with few tokens (w4a16_dense.cuh): from memory to registers, scaled there, stored once as halves.
//
// A power of two belongs to a stage of K and a token, so one warp finds it alone and no barrier stands between finding and
// using it; the sums of a stage meet its inverse in FP32 when the stage ends. Of a stage, elements down to 2^-28 of the
// largest keep all their bits.
#pragma once
#include "w4a16_x.cuh"

namespace requant {

// In shared memory: halves at [stage][step 0..7][token][p], and what undoes their scale at [stage][token]. An item is a stage
// of a pair of tokens; the block's warps take items in turn.
template <Format FORMAT, int TOKENS, int BATCH = 4>
class ScaledX {
  using X = Activations<scale_mode<FORMAT, TOKENS>(), TOKENS == 1>;
  static constexpr int kPairs = (TOKENS + 1) / 2, kPieces = X::kHalves;
  static constexpr int kBatch = BATCH;  // items of a warp that are on their way at once

 public:
  // Works out where the first items lie, all of it before the wait for the previous kernel.
  __device__ __forceinline__ ScaledX(const Params& p, int warp, int warps, int lane, int first_stage, int stages)
      : p_(lane & 3), token_(TOKENS == 1 ? 0 : (lane >> 2) & 1), step_(TOKENS == 1 ? lane >> 2 : lane >> 3), warp_(warp),
        warps_(warps),
        at_((step_ * TOKENS + token_) * 64 + p_ * kPiece), writes_scale_((lane & ~(TOKENS == 1 ? 0 : 4)) == 0),
        x_(reinterpret_cast<const uint8_t*>(p.x)) {
    place(p, first_stage, warp, stages * kPairs);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) from_[b] = opaque(from_[b]);
    present_ = opaque(present_);
  }

  // Send for the first items: as many as there is room for.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        pieces_[b][i] = load_or_zero(x_ + from_[b] + i * X::kHalfK * 2, (present_ >> (b * kPieces + i) & 1) != 0);
      }
    }
  }

  // Scale and store what `load` has sent for, and the items for which there was no room.
  __device__ __forceinline__ void finish(const Params& p, uint8_t* to, float* restore, int first_stage, int stages) {
    const int items = stages * kPairs;
    for (int item = warp_;;) {
      scale(to, restore, item, items);
      item += kBatch * warps_;
      if (item >= items) break;
      place(p, first_stage, item, items);
      load();
    }
  }

  // A later chunk of K.
  __device__ __forceinline__ void again(const Params& p, int first_stage, int stages) {
    place(p, first_stage, warp_, stages * kPairs);
    load();
  }

 private:
  __device__ __forceinline__ void place(const Params& p, int first_stage, int item, int items) {
    present_ = 0;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int stage = item / kPairs, t = 2 * (item % kPairs) + token_;
      const int k = (first_stage + stage) * kStageK + p_ * X::kLaneK + step_ * X::kStepK;
      const bool present = item < items && t < p.tokens;
      from_[b] = (static_cast<uint32_t>(t) * p.k + k) * 2;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (present && k + i * X::kHalfK < p.k) present_ |= 1u << (b * kPieces + i);
      }
      item += warps_;
    }
  }

  __device__ __forceinline__ void scale(uint8_t* to, float* restore, int item, int items) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (item >= items) break;
      const int stage = item / kPairs, pair = item % kPairs;
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const uint4 v = pieces_[b][i];
        const uint32_t low = __vmaxu2(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu);
        const uint32_t high = __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu);
        most = i == 0 ? __vmaxu2(low, high) : __vmaxu2(most, __vmaxu2(low, high));
      }
      most = max(most & 0xFFFFu, most >> 16);
      uint32_t largest = __reduce_max_sync(~0u, token_ ? 0u : most);
      if (TOKENS > 1) {
        const uint32_t second = __reduce_max_sync(~0u, token_ ? most : 0u);
        if (token_) largest = second;
      }
      const float factor = __uint_as_float(static_cast<uint32_t>(X::shift_for(largest)) << 23);
      uint8_t* at = to + at_ + stage * TOKENS * kStageXBytes + pair * 128;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        *reinterpret_cast<uint4*>(at + i * 4 * TOKENS * 64) = X::to_halves(pieces_[b][i], factor);
      }
      if (writes_scale_) restore[stage * TOKENS + 2 * pair + token_] = X::restore(largest);
      item += warps_;
    }
  }

  const int p_, token_, step_, warp_, warps_, at_;
  const bool writes_scale_;
  const uint8_t* const x_;
  uint32_t from_[kBatch], present_;
  uint4 pieces_[kBatch][kPieces];
};

}  // namespace requant
