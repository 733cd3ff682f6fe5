// W4A16 for 8 to 64 tokens on SM90: wgmma with weights from registers and x from shared memory. Dense only.
//
// Why beside w4a16_core.cuh: from 16 tokens on, mma.sync issues too slowly and every warp reads all of x from shared
// memory for every 16 rows. wgmma takes 64 rows at once and reads x itself.
//
// Shape of the computation.
//   * A *tile* is 64 rows: one warpgroup, 16 rows per warp. A *stage* is a tile x 256 k: one 128-byte line of codes per row.
//   * A block has row_groups x k_groups warpgroups, which consume; a warp for each of them, which fetches its codes (bulk
//     tensor copies) and block scales (cp.async) into a ring; and a warp for each k group, which fetches x into another
//     ring and puts it into the tensor cores' order. Consumers free a stage of codes when they have decoded it and a
//     stage of x when the tensor cores have read it.
//   * k_groups warpgroups of a block and `cluster` blocks split K. Each of these participants finishes the sums of a part
//     of the tokens: the others send theirs to its shared memory, and it adds them in the order of the participants. So
//     two runs give the same bits.
//
// K is a free permutation inside a dot product. Of 128 k, lane p = lane % 4 of the MMA's A operand takes the 16-byte piece
// p of each of its rows, k = 32p .. 32p+31, and word w of it (8 codes) in the w-th pair of k steps. In x, a row of B's
// tile in shared memory is 8 k of one token, two for each p; so its word p is x[32p + 8w + 2j], [.. + 1] for the j-th byte of
// word w: 4 x 4 words change places, and that is a renaming of registers for a lane that reads the pieces (p, w) of one
// token and writes the pieces (w, j): one pass over x in shared memory. For 64 tokens one warp does not keep up with it. There x
// stays as it is, lane p gathers byte p of every word, and needs the block scales of all k: 145 instructions per 64 k, not 102.
//
// Block scales meet the codes in BF16, exactly (E2M1 has 2 significant bits, E4M3 4, BF16 8). E4M3 bits moved to BF16's
// places read as scale * 2^-120, subnormals included, and two multiplications lift them to scale * 2^110 while codes
// stand at value * 2^-126. NaN and negative scales do not survive that move; a warp that sees one takes the conversion
// instruction instead. E8M0 is a shift, with its two exceptions put right.
#pragma once
#include "w4a16_wgmma_fetch.cuh"
#include "w4a16_wgmma_tile.cuh"

namespace requant {

// All blocks of the cluster, or of this block where it is alone.
__device__ __forceinline__ void meet(const WgmmaParams& p) {
  if (p.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

// Block: row_groups x k_groups warpgroups, a warp for each that fetches its weights, and one for each k group that fetches
// its x; grid: (cluster, tiles of row_groups * 64 rows).
template <Format FORMAT, int TOKENS>
__global__ void __launch_bounds__(kWgMaxThreads<TOKENS>, 1) w4a16_wgmma_kernel(const __grid_constant__ WgmmaParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t tiles[];
  uint8_t* const shared = tiles;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = blockIdx.x;
  const int groups = p.row_groups * p.k_groups;
  const WgBarriers barriers{shared_address(shared) + p.barriers_offset};
  const bool consumes = warp < groups * 4, fetches_x = warp >= groups * 5;
  const int x_warp = (warp - groups * 5) % kXWarps<TOKENS>;
  const int group = consumes ? warp / 4 : fetches_x ? (warp - groups * 5) / kXWarps<TOKENS> * p.row_groups : warp - groups * 4;
  const int k_group = (group >= p.row_groups) + (group >= 2 * p.row_groups) + (group >= 3 * p.row_groups);
  const int row_group = group - k_group * p.row_groups, me = rank * p.k_groups + k_group;
  if (!consumes && lane == 0 && !(fetches_x && x_warp > 0)) {  // each its own barriers
    prefetch_map(fetches_x ? &p.x_map : &p.codes_map);
    if (fetches_x) {
#pragma unroll 1
      for (int slot = 0; slot < p.x_depth; ++slot) {
        barrier_init(barriers.x(0, k_group, slot), 1);
        barrier_init(barriers.x(1, k_group, slot), 4 * p.row_groups);
        barrier_init(barriers.x(2, k_group, slot), kXWarps<TOKENS>);
      }
    } else {
#pragma unroll 1
      for (int slot = 0; slot < p.depth; ++slot) {
        barrier_init(barriers.weights(0, group, slot), 33);  // 32 lanes' block scales, and the codes
        barrier_init(barriers.weights(1, group, slot), kWgThreads);
      }
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (p.cluster > 1) cluster_arrive();  // this block runs
  float sums[TOKENS / 2];
  if (!consumes) {
    if (fetches_x || !p.constant_weights) {
      wait_for_previous_kernel();  // nothing has been read so far
      allow_next_kernel();         // not before the wait: what starts then may count on all that came before this kernel
    }
    const int first = wg_first_stage(p, me), stages = wg_stages(p, me);
    if (fetches_x) {
      fetch_x<TOKENS>(p, shared_address(shared), barriers, k_group, x_warp, first, stages, lane);
    } else {
      const int row = (blockIdx.y * p.row_groups + row_group) * kWgRows;
      if (p.scale_copy == 16) {
        fetch_weights<FORMAT, 16>(p, shared_address(shared), barriers, group, row, first, stages, lane);
      } else if (p.scale_copy == 8) {
        fetch_weights<FORMAT, 8>(p, shared_address(shared), barriers, group, row, first, stages, lane);
      } else {
        fetch_weights<FORMAT, 4>(p, shared_address(shared), barriers, group, row, first, stages, lane);
      }
      if (p.constant_weights) wait_for_previous_kernel();
    }
    __syncwarp();
  } else {
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
    if constexpr (kSorted<TOKENS>) {
      consume_sorted<FORMAT, TOKENS>(p, shared, barriers, group, k_group, wg_stages(p, me), warp % 4, lane, sums);
    } else {
      consume_gathered<FORMAT, TOKENS>(p, shared, barriers, group, k_group, wg_stages(p, me), warp % 4, lane, sums);
    }
  }

  // Sums meet: [warpgroup][participant][token][row], at the participant that finishes the token.
  const int participants = p.cluster * p.k_groups, each = 1 << p.tokens_shift;
  constexpr int kPitch = kSumsPitch * 4;
  if (p.cluster > 1) cluster_wait();  // the other blocks run
  if (p.sums_share) meet(p);          // all rings have drained
  if (consumes) {
    const uint32_t to = shared_address(shared) + p.sums_offset + (warp % 4 * 16 + (lane >> 2)) * 4;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n) {
      const int token = n * 8 + (lane & 3) * 2, owner = token >> p.tokens_shift;
      const int slot = (owner & (p.k_groups - 1)) * p.row_groups + row_group;
      const uint32_t at = block_address(to + ((slot * participants + me) * each + (token & (each - 1))) * kPitch,
                                        owner >> p.k_shift);
      store_to_cluster(at, sums[4 * n]);
      store_to_cluster(at + kPitch, sums[4 * n + 1]);
      store_to_cluster(at + 32, sums[4 * n + 2]);
      store_to_cluster(at + kPitch + 32, sums[4 * n + 3]);
    }
  }
  meet(p);
  if (!consumes) return;
  float scale = p.global_scale;
  if (p.global_scales != nullptr) scale *= *p.global_scales;
  if (!(scale > 0.0f)) scale = __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
  constexpr float kFactor = FORMAT == Format::kNvfp4 ? kBf16CodeFactor : 1.0f;
  const int row = (blockIdx.y * p.row_groups + row_group) * kWgRows + lane * 2;  // a lane stores two rows of a token
  const uint8_t* const mine = shared + p.sums_offset + group * participants * each * kPitch + lane * 8;
  const int tokens = min(each, p.tokens - me * each);
#pragma unroll 1  // runs once: fewer instructions to fetch beat fewer to run
  for (int i = warp % 4; i < tokens; i += 4) {
    float2 v = *reinterpret_cast<const float2*>(mine + i * kPitch);
#pragma unroll 1
    for (int from = 1; from < participants; ++from) {
      const float2 term = *reinterpret_cast<const float2*>(mine + (from * each + i) * kPitch);
      v.x += term.x;
      v.y += term.y;
    }
    v.x = v.x * kFactor * scale;
    v.y = v.y * kFactor * scale;
    const size_t to = static_cast<size_t>(me * each + i) * p.rows + row;
    const bool pair = row + 1 < p.rows && p.rows % 2 == 0;
    if (p.output_is_float) {
      float* y = static_cast<float*>(p.y) + to;
      if (row < p.rows) y[0] = v.x;
      if (row + 1 < p.rows) y[1] = v.y;
    } else {
      __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + to;
      if (pair) {
        *reinterpret_cast<__nv_bfloat162*>(y) = __floats2bfloat162_rn(v.x, v.y);
      } else {
        if (row < p.rows) y[0] = __float2bfloat16(v.x);
        if (row + 1 < p.rows) y[1] = __float2bfloat16(v.y);
      }
    }
  }
#endif
}

}  // namespace requant
