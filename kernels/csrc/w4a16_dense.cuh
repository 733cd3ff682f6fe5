// Dense layers with few tokens (M <= 8): the ring of w4a16_ring.cuh and the tile of w4a16_tile.cuh with nothing in the way.
//
// Why beside w4a16_core.cuh: a layer of 4096 x 4096 reads its weights in 2.1 us, so what runs once per launch counts as much as
// the weights do. Here
//   * weights come by the copy engine where there is one (w4a16_dense_weights.cuh);
//   * everything that reads no memory (addresses, zeros, barriers) comes before the wait for the previous kernel. Where two
//     launches' blocks fit a multiprocessor side by side, that part is over by the time the previous kernel ends;
//   * x goes from memory to registers, is scaled there and stored once as halves. Its power of two belongs to a stage and a
//     token, so one warp finds it alone, and one barrier of the block is all that x needs; the sums of a stage meet the
//     inverse in FP32 when the stage ends. A stage's elements down to 2^-28 of its largest keep all their bits;
//   * any warp prepares any (stage, pair of tokens);
//   * blocks of a cluster send each other sums that count themselves in (st.async), where a barrier that releases stores
//     would wait for all of the block's memory traffic.
#pragma once
#include <type_traits>

#include "w4a16_dense_weights.cuh"
#include "w4a16_dense_x.cuh"
#include "w4a16_sums.cuh"
#include "w4a16_tile.cuh"

namespace requant {

// totals[column][token][row] -> y. A warp takes its own rows and every so many tokens, so that no index needs a division.
template <int ROWS_PER_WARP>
__device__ __forceinline__ void store_dense(const Params& p, int row_group, const float* totals, uint32_t remote,
                                            uint32_t barrier, int width, int column, int row_warp, int lane) {
  constexpr int kTokensAtOnce = 32 / ROWS_PER_WARP;
  const int rows_per_block = p.row_warps * ROWS_PER_WARP, row_pitch = totals_pitch(rows_per_block);
  const int pitch = width * row_pitch, local_row = row_warp * ROWS_PER_WARP + lane % ROWS_PER_WARP;
  const int row = row_group * rows_per_block + local_row;
  const int token0 = column * kTokensAtOnce + lane / ROWS_PER_WARP, step = p.column_warps * kTokensAtOnce;
  const auto column_sum = [&](int token) {
    const float* at = totals + token * row_pitch + local_row;
    float v = 0.0f;
#pragma unroll 1
    for (int c = 0; c < p.column_warps; c += 4) {
      float part[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) part[i] = c + i < p.column_warps ? at[i * pitch] : 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) v += part[i];
      at += 4 * pitch;
    }
    return v;
  };
  float scale = p.global_scale;
  if (p.global_scales != nullptr) scale *= *p.global_scales;
  if (!(scale > 0.0f)) scale = __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
  const auto store = [&](int t, float v) {
    if (row >= p.rows) return;
    v *= scale;
    const size_t at = static_cast<size_t>(t) * p.rows + row;
    if (p.output_is_float) {
      static_cast<float*>(p.y)[at] = v;
    } else {
      static_cast<__nv_bfloat16*>(p.y)[at] = __float2bfloat16(v);
    }
  };
  if (p.cluster == 1) {
#pragma unroll 1
    for (int t = token0; t < p.tokens; t += step) store(t, column_sum(t));
    return;
  }
#if __CUDA_ARCH__ >= 900
  const int rank = blockIdx.x;
  const int each = (width + p.cluster - 1) >> p.cluster_shift;
  // Block t % cluster finishes token t; the others' sums go to its remote[from block][t / cluster][row].
  cluster_wait();  // its barrier stands
#pragma unroll 1
  for (int t = token0; t < p.tokens; t += step) {
    const int owner = t & (p.cluster - 1);
    if (owner == rank) continue;
    const uint32_t at = remote + ((rank * each + (t >> p.cluster_shift)) * rows_per_block + local_row) * 4;
    store_and_count(block_address(at, owner), block_address(barrier, owner), column_sum(t));
  }
  if (rank >= p.tokens) return;
  barrier_wait(barrier, 0);
#pragma unroll 1
  for (int t = token0; t < p.tokens; t += step) {
    if ((t & (p.cluster - 1)) != rank) continue;
    const float mine = column_sum(t);
    float v = 0.0f;
#pragma unroll 1
    for (int from = 0; from < p.cluster; ++from) {
      const uint32_t at = remote + ((from * each + (t >> p.cluster_shift)) * rows_per_block + local_row) * 4;
      v += from == rank ? mine : __uint_as_float(load_word(at));
    }
    store(t, v);
  }
#endif
}

// Block: (32, column_warps, row_warps); grid: (cluster, blocks). `codes`: their tensor map, in boxes of a warp's rows x 128.
template <Format FORMAT, int TOKENS, int ROW_TILES, int DEPTH, Alignment ALIGNMENT, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    w4a16_dense_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap codes) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kBoxes = ALIGNMENT != Alignment::kGeneral;
#else
  constexpr bool kBoxes = false;
#endif
  using Weights = std::conditional_t<kBoxes, BoxedWeights<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>,
                                     CopiedWeights<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>>;
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;
  using Tile = WarpTile<FORMAT, TOKENS, ROW_TILES, DEPTH, ALIGNMENT>;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* const shared = memory;
  const int lane = threadIdx.x, column = __shfl_sync(~0u, threadIdx.y, 0), row_warp = __shfl_sync(~0u, threadIdx.z, 0);
  const int warp = row_warp * p.column_warps + column, warps = p.column_warps * p.row_warps;
  // Nothing before the wait reads memory, unless the weights are constant.
  if constexpr (kBoxes) {
    if (warp == 0 && lane == 0) prefetch_map(&codes);
  }
  if (Tile::kGroups && warp < 2) {
    reinterpret_cast<uint4*>(shared + p.zeros_offset)[warp * 32 + lane] = make_uint4(0, 0, 0, 0);
  }
  const Share share = share_of_k(p, column);
  const int first_stage = share.first - column, block_stages = p.stages_each + (blockIdx.x < p.stages_left ? 1 : 0);
  const bool all_x = p.x_stages[0] >= block_stages;
  UnitCursor<false> cursor(p);
  Weights weights(p, &codes, cursor, shared, share, warp, row_warp, lane);
  ScaledX<FORMAT, TOKENS> scaled_x(p, warp, warps, lane, first_stage, min(p.x_stages[0], block_stages));
  uint8_t* const x = shared + p.x_offset;
  float* const restore = reinterpret_cast<float*>(shared + p.largest_offset);
  float* const totals = reinterpret_cast<float*>(shared + p.sums_offset);
  const int row_pitch = totals_pitch(p.row_warps * Layout::kRows), scale_pitch = p.k / FormatTraits<FORMAT>::kGroup;
  typename Tile::XSource source = Tile::x_source(x + column * TOKENS * kStageXBytes, shared + p.zeros_offset, lane);
  const int x_stride = source.stride * p.column_warps;
  const uint8_t* const first_x = source.at;
  const uint32_t barrier = shared_address(shared) + p.barriers_offset + warps * DEPTH * 8;  // of the cluster's sums
#if __CUDA_ARCH__ >= 900
  if (p.cluster > 1) {
    if (warp == 0 && elect_one()) {
      const int mine = (p.tokens + p.cluster - 1 - static_cast<int>(blockIdx.x)) >> p.cluster_shift;
      barrier_init(barrier, 1);
      barrier_init_fence();
      barrier_expect(barrier, (p.cluster - 1) * mine * p.row_warps * Layout::kRows * 4);
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }
#endif
  if (p.constant_weights) weights.fill(p);
  wait_for_previous_kernel();
  scaled_x.load();
  if (!p.constant_weights) weights.fill(p);
  allow_next_kernel();

  bool first = true;
#pragma unroll 1
  for (; cursor.valid(p); cursor.advance(p)) {
    const int row_group = cursor.row_group;
    int misaligned = 0;  // where this lane's rows of block scales start inside a word
    if (ALIGNMENT == Alignment::kGeneral) {
      const size_t row = static_cast<size_t>(row_group * p.row_warps + row_warp) * Layout::kRows + (lane >> 2);
      misaligned = static_cast<int>((row * scale_pitch) & 3);
    }
    Tile tile;
    tile.clear_totals();
#pragma unroll 1
    for (int begin = 0; begin < block_stages; begin += p.x_stages[0]) {
      const int stages = min(p.x_stages[0], block_stages - begin);
      if (first || !all_x) {
        if (!first) {
          __syncthreads();  // the last x is still in use
          scaled_x.again(p, first_stage + begin, stages);
        }
        scaled_x.finish(p, x, restore, first_stage + begin, stages);
        __syncthreads();  // x is whole
        first = false;
      }
      source.at = first_x;
#pragma unroll 1
      for (int s = column; s < stages; s += p.column_warps) {
        weights.acquire(p);
        tile.clear();
        tile.consume(weights.codes(), weights.scales() + (lane >> 2) * Layout::kScalePitch, source.at, lane, misaligned,
                     scale_pitch - (first_stage + begin + s) * FormatTraits<FORMAT>::kStageScales);
        tile.add_stage(restore + s * TOKENS, lane);
        source.at += x_stride;
        weights.release(p);
      }
    }
    if (row_group != static_cast<int>(blockIdx.y)) __syncthreads();  // the last unit's sums are still being read
    tile.put_totals(totals + column * TOKENS * row_pitch + row_warp * Layout::kRows, row_pitch, lane);
    __syncthreads();
    store_dense<Layout::kRows>(p, row_group, totals, shared_address(shared) + p.remote_offset, barrier, TOKENS, column,
                               row_warp, lane);
  }
  copy_wait<0>();
}

}  // namespace requant
