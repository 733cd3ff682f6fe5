// What becomes of a tile's sums in w4a16_split.cuh: scales, a bias, a gated activation, and y.
#pragma once
#include "w4a16_stream_copies.cuh"

namespace requant {

// SwiGLU, or gpt-oss's form of it. Comparisons that leave a NaN what it is.
__device__ __forceinline__ float gated(const Params& p, float gate, float up) {
  if (p.limit > 0.0f) {
    gate = gate > p.limit ? p.limit : gate;
    up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
    up += 1.0f;
  }
  return __fdividef(gate, 1.0f + __expf(-gate * p.alpha)) * up;
}

// A lane's outputs in one segment: of each tile row g or g + 8, for up to two tokens. Where gate and up rows take turns, lane
// g + 1 holds the up row of an even g; where the gate's come first, a tile is 8 of them and their 8 up rows.
template <bool EXTRA>
struct SplitOutputs {
  int64_t row_zero[2];  // the token's first output; -1: no such token
  float scale, weight[2];
  const __nv_bfloat16* bias;  // of the expert, or null
  uint32_t of_row;            // of the tile's row, BF16 bits: asked for a tile ahead, not looked at before it is wanted
  int row, step;              // of the weight; from tile to tile
  bool stores;

  __device__ __forceinline__ SplitOutputs(const Params& p, const Segment& s, int token0, int token1, int lane) {
    const int g = lane >> 2, half = lane >> 1 & 1;
    scale = p.global_scale * (p.global_scales != nullptr ? p.global_scales[s.expert] : 1.0f);
    if (!(scale > 0.0f)) scale = __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
    bias = EXTRA && p.bias != nullptr ? p.bias + static_cast<size_t>(s.expert) * p.rows : nullptr;
    const Gating gating = EXTRA ? p.gating : Gating::kNone;
    const bool halves = gating == Gating::kHalves;
    step = halves ? kTileRows / 2 : kTileRows;
    row = s.tile * step + g + half * (halves ? p.rows / 2 : kTileRows / 2);
    stores = gating == Gating::kNone || (halves ? half == 0 : g % 2 == 0);
    const int width = gating == Gating::kNone ? p.rows : p.rows / 2, tokens[2] = {token0, token1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool present = tokens[i] >= 0 && tokens[i] < s.tokens;
      const int number = !present ? -1 : tokens[i] == 0 ? s.first_number : load_fresh(EXTRA && p.settled, p.slots + s.first_slot + tokens[i]);
      row_zero[i] = present ? static_cast<int64_t>(number) * width : -1;
      weight[i] = present && p.slot_weights != nullptr ? p.slot_weights[number] : 1.0f;
    }
    if (EXTRA && bias != nullptr) {  // to the L2 for all tiles: a lane takes every 32nd
#pragma unroll 1
      for (int i = lane; i < s.tiles; i += 32) {
        prefetch_to_l2(bias + (s.tile + i) * step);
        if (halves) prefetch_to_l2(bias + p.rows / 2 + (s.tile + i) * step);
      }
    }
    if (EXTRA) of_row = load_bias(p);
  }

  __device__ __forceinline__ uint32_t load_bias(const Params& p) const {
    return bias != nullptr && row < p.rows ? __ldg(reinterpret_cast<const uint16_t*>(bias) + row) : 0u;
  }

  __device__ __forceinline__ void next_tile(const Params& p) {
    row += step;
    if (EXTRA) of_row = load_bias(p);
  }

  // Every lane of the warp comes here.
  __device__ __forceinline__ void store(const Params& p, int which, float v) const {
    v *= scale;
    if (EXTRA) v += __uint_as_float(opaque(of_row) << 16);
    int column = row;
    if (EXTRA && p.gating != Gating::kNone) {
      const bool halves = p.gating == Gating::kHalves;
      const float up = halves ? __shfl_xor_sync(~0u, v, 2) : __shfl_down_sync(~0u, v, 4);
      v = gated(p, v, up);
      if (!halves) column = row / 2;
    }
    if (!stores || row_zero[which] < 0 || row >= p.rows) return;
    v *= weight[which];
    if (p.output_is_float) {
      static_cast<float*>(p.y)[row_zero[which] + column] = v;
    } else {
      static_cast<__nv_bfloat16*>(p.y)[row_zero[which] + column] = __float2bfloat16(v);
    }
  }
};

}  // namespace requant
