// From the warps' sums to y, in a fixed order.
#pragma once
#include "w4a16_ring.cuh"

namespace requant {

// A row of totals is padded so that the four lanes that hold different tokens of one row write to different banks.
__host__ __device__ constexpr int totals_pitch(int rows_per_block) { return rows_per_block + 4; }

// Sum totals[column][token][row] over column warps, then over the cluster, in that order, and store y.
// A warp takes its own 16 or 32 rows and every column_warps-th token, so that no index needs a division.
template <int ROWS_PER_WARP, bool GROUPED>
__device__ __forceinline__ void store_outputs(const Params& p, const Unit& unit, float* totals, float* remote, int width,
                                              int column, int row_warp, int lane) {
  constexpr int kTokensAtOnce = 32 / ROWS_PER_WARP;
  const int rows_per_block = p.row_warps * ROWS_PER_WARP, row_pitch = totals_pitch(rows_per_block);
  const int pitch = width * row_pitch;
  const int local_row = row_warp * ROWS_PER_WARP + lane % ROWS_PER_WARP;
  const int row = unit.row_group * rows_per_block + local_row;
  const int token0 = column * kTokensAtOnce + lane / ROWS_PER_WARP, step = p.column_warps * kTokensAtOnce;
  const auto column_sum = [&](int token) {
    const float* at = totals + token * row_pitch + local_row;
    float v = at[0];
#pragma unroll 4
    for (int c = 1; c < p.column_warps; ++c) v += at[c * pitch];
    return v;
  };
  float scale = p.global_scale;
  if (p.global_scales != nullptr) scale *= p.global_scales[unit.expert];
  if (!(scale > 0.0f)) scale = __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
  const auto store = [&](int token, float v) {
    if (row >= p.rows) return;
    v *= scale;
    const int slot = GROUPED ? p.slots[unit.first_slot + token] : token;
    if (GROUPED && p.slot_weights != nullptr) v *= p.slot_weights[slot];
    const size_t at = static_cast<size_t>(slot) * p.rows + row;
    if (p.output_is_float) {
      static_cast<float*>(p.y)[at] = v;
    } else {
      static_cast<__nv_bfloat16*>(p.y)[at] = __float2bfloat16(v);
    }
  };
  if (p.cluster == 1) {
#pragma unroll 2
    for (int t = token0; t < unit.tokens; t += step) store(t, column_sum(t));
    return;
  }
  // Block t % cluster finishes token t. Everyone's sums for it go to remote[from block][t / cluster][row], which lies
  // over the ring: the first barrier says that all rings have drained.
  const int each = (width + p.cluster - 1) >> p.cluster_shift;
  cluster_arrive();
  cluster_wait();
  const uint32_t mine = shared_address(remote + blockIdx.x * each * row_pitch + local_row);
#pragma unroll 4
  for (int t = token0; t < unit.tokens; t += step) {
    store_to_block(mine + (t >> p.cluster_shift) * row_pitch * 4, t & (p.cluster - 1), column_sum(t));
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll 2
  for (int t = token0 * p.cluster + blockIdx.x; t < unit.tokens; t += step * p.cluster) {
    const float* at = remote + (t >> p.cluster_shift) * row_pitch + local_row;
    float v = at[0];
#pragma unroll 8
    for (int rank = 1; rank < p.cluster; ++rank) v += at[rank * each * row_pitch];
    store(t, v);
  }
}

// Outputs of slots whose expert does not exist are NaN: visible, where an old buffer's numbers would not be.
__device__ __forceinline__ void poison_unrouted(const Params& p) {
  const int width = p.gating == Gating::kNone ? p.rows : p.rows / 2;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * 32 + threadIdx.x, threads = blockDim.y * blockDim.z * 32;
  for (int i = p.tile_count[1] + blockIdx.y; i < p.slot_count; i += gridDim.y) {
    const size_t base = static_cast<size_t>(p.slots[i]) * width;
    for (int row = thread; row < width; row += threads) {
      if (p.output_is_float) {
        static_cast<float*>(p.y)[base + row] = __uint_as_float(0x7FC00000u);
      } else {
        static_cast<uint16_t*>(p.y)[base + row] = 0x7FC0;
      }
    }
  }
}

}  // namespace requant
