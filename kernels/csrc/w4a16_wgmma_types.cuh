// What the files of the wgmma kernel share: sizes, the launch's parameters, the barriers of its rings.
#pragma once
#include "hopper.cuh"
#include "w4a16_types.cuh"

namespace requant {

constexpr int kWgRows = 64;                           // rows of a tile
constexpr int kWgThreads = 128;
constexpr int kWgTileBytes = kWgRows * kLine;         // codes of one stage
constexpr int kBlockK = 64;                           // k of one swizzled row of x
constexpr int kStageBlocks = kStageK / kBlockK;
constexpr int kWgMaxGroups = 4;                       // warpgroups per block
constexpr int kWgMaxDepth = 8;
constexpr int kRingBarriers = 5 * kWgMaxGroups * kWgMaxDepth;  // full and empty of weights; full, empty and sorted of x
constexpr int kSumsPitch = kWgRows + 4;  // floats from token to token: four lanes' tokens fall on different banks

// Blocks of 64 k in one stage of x: fewer for many tokens, so that two stages of several k groups fit.
template <int TOKENS>
constexpr int kXBlocks = TOKENS == 64 ? 2 : 4;

// Whether x is sorted, or the codes gathered.
template <int TOKENS>
constexpr bool kSorted = TOKENS <= 32;

// Warps that fetch and sort the x of one k group.
template <int TOKENS>
constexpr int kXWarps = TOKENS == 32 ? 2 : 1;

template <int TOKENS>
constexpr int kWgMaxThreads = kWgMaxGroups * (kWgThreads + 32 + 32 * kXWarps<TOKENS>);

struct WgmmaParams {
  CUtensorMap codes_map, x_map;
  const void *codes, *x;  // what the maps describe
  const uint8_t* block_scales;
  void* y;
  const float* global_scales;
  float global_scale;
  int tokens, rows, k, output_is_float;
  int row_groups, k_groups, cluster;  // k_groups: a power of two
  int stages_each, stages_left;  // K stages per participant, and how many take one more
  int depth, x_depth;            // ring stages of weights and of x
  int scale_copy;                // bytes per copy of block scales: 16, 8, 4
  int k_shift, tokens_shift;     // log2 of k_groups, and of the tokens that a participant finishes
  int sums_share;                // the sums take the place of the rings
  int codes_offset, scales_offset, sums_offset, barriers_offset;  // x lies at 0
  int constant_weights;
};

template <Format FORMAT>
struct WgScales {
  static constexpr int kRow = FormatTraits<FORMAT>::kStageScales;  // bytes per row and stage
  static constexpr int kTile = kWgRows * kRow;
};

__device__ __forceinline__ int wg_first_stage(const WgmmaParams& p, int participant) {
  return participant * p.stages_each + min(participant, p.stages_left);
}
__device__ __forceinline__ int wg_stages(const WgmmaParams& p, int participant) {
  return p.stages_each + (participant < p.stages_left ? 1 : 0);
}

// A position in a ring: which slot, and the parity of its barriers.
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int depth) {
    if (++slot == depth) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct WgBarriers {
  uint32_t base;
  // kind 0: full, 1: empty; of weights per warpgroup, of x per k group; x also 2: sorted.
  __device__ __forceinline__ uint32_t weights(int kind, int group, int slot) const {
    return base + ((kind * kWgMaxGroups + group) * kWgMaxDepth + slot) * 8;
  }
  __device__ __forceinline__ uint32_t x(int kind, int group, int slot) const {
    return base + (((2 + kind) * kWgMaxGroups + group) * kWgMaxDepth + slot) * 8;
  }
};

}  // namespace requant
