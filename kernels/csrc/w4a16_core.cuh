// W4A16: y[M,N] = global_scale * x[M,K] @ dequant(codes, block_scales)^T for few tokens (M <= 64), dense and grouped; dense
// layers up to 8 tokens have a kernel of the same shape in w4a16_dense.cuh.
//
// What it replaces: kernels that repack the checkpoint first. Here the checkpoint's own row-major bytes are read,
// codes [N, K/2] (low nibble = even k) and block scales [N, K/group], so what is timed and validated is what is stored.
//
// Shape of the computation. With few tokens the weights are nearly all the bytes, so the kernel is a pipe from memory to
// the tensor cores:
//   * Weights sit in the M slot of mma.m16n8k16 and tokens in its n = 8 slot: a 16-row tile costs one MMA per 16 k.
//   * A *stage* is 16 rows x 256 k: one full 128-byte line of codes per row, and its block scales. Every warp runs its own
//     ring of stages, filled by cp.async, with no block-wide barrier: one __syncwarp per stage.
//   * A block has column_warps x row_warps warps. The column warps deal the k stages among themselves round robin, the row
//     warps take 16 rows each; a cluster of blocks may split K once more. All sums meet in a fixed order (warp 0, 1, ...,
//     block 0, 1, ...), so two runs give the same bits.
//   * Blocks are persistent: they walk a list of units (rows of one expert, or of the only weight), and a warp's ring runs
//     on into its next unit while the current one is being reduced.
//
// K is a free permutation inside a dot product. A lane's fragment is whatever k it likes as long as x agrees, so lane
// p = lane % 4 takes k = 64p .. 64p+63 of a line (16-byte reads, its block scales are neighbours), and x is stored to
// match. Inside a 128-byte line the 16-byte chunk c of row r lies at c ^ (r & 7): no read has a bank conflict.
//
// x is BF16 with a wide range, and the MMA is F16: per (column warp, chunk of K, token) x is scaled by a power of two that
// puts its largest element in [2^14, 2^15). Elements down to 2^-28 of the largest keep all their bits; smaller ones lose
// at most 2^-39 of it. Sums are FP32. Infinities and NaNs pass through.
//
// Four ways for block scales to meet the codes, chosen at compile time:
//   * kGroupColumns, M <= 2: column 2p + t of B holds token t in the rows of lane p only, zero elsewhere, so after the
//     MMAs of one group of k, lane p's own accumulators are the dot products of its own group; one FFMA scales them.
//   * kScaleFirst, NVFP4: the decoded halves are multiplied by the scale before the MMA. Exact: a product has at most 6
//     significant bits and is a multiple of 2^-24.
//   * kBf16, NVFP4, M >= 32: kScaleFirst in BF16. Decoding takes 6 more instructions per 8 codes, which the MMAs of so many
//     tokens hide, and x is used as it is, with no scaling, no barrier for it and no limit to its range.
//   * kScaleAfter, MXFP4: E8M0 does not fit a half. A lane takes word p of each group of 32, so one MMA pair covers one
//     group of 32 k, and its result is scaled in FP32.
//
// Files: w4a16_types.cuh (sizes, parameters), w4a16_ring.cuh (copies of weights), w4a16_x.cuh (activations),
// fp4_decode.cuh and w4a16_tile.cuh (decode and MMA), w4a16_sums.cuh (reduction); here, how they make a kernel.
#pragma once
#include "w4a16_sums.cuh"
#include "w4a16_tile.cuh"

namespace requant {

// The warp's place in the block.
struct Place {
  int lane, column, row_warp, warp;
};

// One unit, for up to TOKENS tokens. Every thread of the block takes part.
template <Format FORMAT, int TOKENS, int ROW_TILES, int DEPTH, Alignment ALIGNMENT, bool GROUPED, class Stream>
__device__ __forceinline__ void run_unit(const Params& p, const Unit& unit, const Unit* next, Stream& stream,
                                         uint8_t* shared, uint32_t& drain, int& turn, const Share& share, const Place& at,
                                         int x_buffer, bool first, int next_width) {
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;
  using X = Activations<scale_mode<FORMAT, TOKENS>(), TOKENS == 1>;
  const int rows_per_block = p.row_warps * Layout::kRows;
  const int x_stages = p.x_stages[!GROUPED || TOKENS == 2 ? 0 : TOKENS == 8 ? 1 : 2];
  uint8_t* x = shared + p.x_offset + x_buffer * p.x_bytes + at.column * x_stages * TOKENS * kStageXBytes;
  // Largest |x| of each token, in this chunk of this column; two sets take turns, the idle one is cleared.
  const int set = p.column_warps * kMaxWidth;
  uint32_t* largest = reinterpret_cast<uint32_t*>(shared + p.largest_offset) + at.column * TOKENS;
  float* totals = reinterpret_cast<float*>(shared + p.sums_offset);
  const int row_pitch = totals_pitch(rows_per_block);
  const X activations(p, TOKENS, at.lane, at.row_warp);

  // Where this lane's rows of block scales start inside a word (general alignment).
  const int scale_pitch = p.k / FormatTraits<FORMAT>::kGroup;
  const size_t my_row = static_cast<size_t>(unit.expert) * p.rows + unit.row_group * rows_per_block + (at.lane >> 2);
  const int misaligned = ALIGNMENT == Alignment::kGeneral ? static_cast<int>((my_row * scale_pitch) & 3) : 0;

#pragma unroll 1
  for (int begin = 0; begin == 0 || begin < share.most; begin += x_stages) {
    const int stages = max(min(x_stages, share.mine - begin), 0);
    const bool fill_ring = first && begin == 0;
    if (begin > 0 || (!GROUPED && !first)) __syncthreads();  // the last x, or the sums in its place, are still in use
    if (fill_ring && p.constant_weights) {  // weights are constant: they need not wait for the kernel that makes x
#pragma unroll 1
      for (int i = 0; i < DEPTH - 1; ++i) stream.fetch(p);
      wait_for_previous_kernel();
      allow_next_kernel();
    }
    if (!GROUPED || first || begin > 0) {  // else the unit before has sent for it
      activations.template copy<GROUPED>(p, unit, shared_address(x), TOKENS, share.first + begin * p.column_warps,
                                         stages);
      copy_commit();
    }
    if (fill_ring && !p.constant_weights) {  // x went first: waiting for it must not mean waiting for a stage of weights
#pragma unroll 1
      for (int i = 0; i < DEPTH - 1; ++i) stream.fetch(p);
      copy_wait<DEPTH - 1>();
    } else if (GROUPED && begin == 0 && !first && share.mine >= DEPTH) {
      copy_wait<DEPTH - 1>();  // x was sent for with the first stage of the unit before
    } else {
      copy_wait<0>();
    }
    uint32_t* const now = largest + (turn & 1) * set;
    if constexpr (scale_mode<FORMAT, TOKENS>() != ScaleMode::kBf16) {
      activations.find_largest(x, now, TOKENS, stages, at.lane);
      __syncthreads();  // also: the last unit's sums have been read, the zeros are whole
      if (at.warp == 0) {
        uint32_t* idle = reinterpret_cast<uint32_t*>(shared + p.largest_offset) + ((turn & 1) ^ 1) * set;
        for (int i = at.lane; i < p.column_warps * (GROUPED ? kGroupedTileTokens : TOKENS); i += 32) idle[i] = 0;
      }
      ++turn;
      activations.convert(x, now, TOKENS, stages);
    }
    __syncthreads();  // x is whole; and (BF16) the last unit's sums have been read
    using Tile = WarpTile<FORMAT, TOKENS, ROW_TILES, DEPTH, ALIGNMENT>;
    Tile tile;
    tile.clear();
    typename Tile::XSource source = Tile::x_source(x, shared + p.zeros_offset, at.lane);
    if (next != nullptr && begin == 0) {  // joins the first stage's commit group
      const Activations<scale_mode<FORMAT, 8>(), false> many(p, next_width, at.lane, at.row_warp);
      const Activations<ScaleMode::kGroupColumns, false> few(p, next_width, at.lane, at.row_warp);
      const int stages_fit = p.x_stages[next_width == 2 ? 0 : next_width == 8 ? 1 : 2];
      const uint32_t to = shared_address(shared) + p.x_offset + (x_buffer ^ 1) * p.x_bytes +
                          at.column * stages_fit * next_width * kStageXBytes;
      if (next_width == 2) {
        few.template copy<GROUPED>(p, *next, to, next_width, share.first, min(stages_fit, share.mine));
      } else {
        many.template copy<GROUPED>(p, *next, to, next_width, share.first, min(stages_fit, share.mine));
      }
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      copy_wait<DEPTH - 2>();
      __syncwarp();  // the stage has landed for all lanes, and all lanes are done with the slot that is filled next
      stream.fetch(p);
      const int stage = share.first + (begin + i) * p.column_warps;
      tile.consume(shared + drain, shared + drain + Layout::kCodes + (at.lane >> 2) * Layout::kScalePitch, source.at, at.lane, misaligned,
                   scale_pitch - stage * FormatTraits<FORMAT>::kStageScales);
      source.at += source.stride;
      const uint32_t ring = at.warp * Layout::kBytes;
      drain = drain + Layout::kSlotBytes == ring + Layout::kBytes ? ring : drain + Layout::kSlotBytes;
    }
    if (p.sums_offset == p.x_offset) __syncthreads();  // the sums take the place of x
    tile.flush(totals + at.column * TOKENS * row_pitch + at.row_warp * Layout::kRows, row_pitch, now, at.lane,
               begin > 0);
  }
  if (p.column_warps > 1) {
    __syncthreads();
  } else {
    __syncwarp();  // a warp stores what it summed
  }
  store_outputs<Layout::kRows, GROUPED>(p, unit, totals, reinterpret_cast<float*>(shared), TOKENS,
                                        at.column, at.row_warp, at.lane);
}

// TOKENS = 0: grouped, the width is chosen per unit. Block: (32, column_warps, row_warps); grid: (cluster, blocks).
template <Format FORMAT, int TOKENS, int ROW_TILES, int DEPTH, Alignment ALIGNMENT, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) w4a16_kernel(const __grid_constant__ Params p) {
  constexpr bool kGrouped = TOKENS == 0;
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;
  extern __shared__ __align__(128) uint8_t shared[];
  Place at;
  at.lane = threadIdx.x;
  at.column = __shfl_sync(~0u, threadIdx.y, 0);
  at.row_warp = __shfl_sync(~0u, threadIdx.z, 0);
  at.warp = at.row_warp * p.column_warps + at.column;
  if (at.warp < 2) reinterpret_cast<uint4*>(shared + p.zeros_offset)[at.warp * 32 + at.lane] = make_uint4(0, 0, 0, 0);
  uint32_t* const largest = reinterpret_cast<uint32_t*>(shared + p.largest_offset);
  for (int i = at.warp * 32 + at.lane; i < 2 * p.column_warps * kMaxWidth; i += blockDim.y * blockDim.z * 32) largest[i] = 0;
  __syncthreads();  // before anyone raises them
  if (kGrouped || !p.constant_weights) {  // nothing has been read so far
    wait_for_previous_kernel();
    allow_next_kernel();
  }
  UnitCursor<kGrouped> cursor(p);
  const Share share = share_of_k(p, at.column);
  WeightStream<FORMAT, ROW_TILES, DEPTH, ALIGNMENT, kGrouped> stream(
      p, cursor, shared_address(shared) + at.warp * Layout::kBytes, share, at.row_warp, at.lane);
  uint32_t drain = at.warp * Layout::kBytes;
  int turn = 0;
  if constexpr (kGrouped) {
    const auto width_of = [](const Unit& u) { return u.tokens <= 2 ? 2 : u.tokens <= 8 ? 8 : 16; };
    bool first = true, more = cursor.valid(p);
    Unit unit = more ? cursor.unit(p) : Unit{};
    for (int x_buffer = 0; more; x_buffer ^= 1) {
      cursor.advance(p);
      more = cursor.valid(p);
      Unit next = more ? cursor.unit(p) : unit;
      const Unit* ahead = more ? &next : nullptr;
      const int width = width_of(unit), next_width = width_of(next);
      if (width == 2) {
        run_unit<FORMAT, 2, ROW_TILES, DEPTH, ALIGNMENT, true>(p, unit, ahead, stream, shared, drain, turn, share, at, x_buffer,
                                                               first, next_width);
      } else if (width == 8) {
        run_unit<FORMAT, 8, ROW_TILES, DEPTH, ALIGNMENT, true>(p, unit, ahead, stream, shared, drain, turn, share, at, x_buffer,
                                                               first, next_width);
      } else {
        run_unit<FORMAT, 16, ROW_TILES, DEPTH, ALIGNMENT, true>(p, unit, ahead, stream, shared, drain, turn, share, at,
                                                                x_buffer, first, next_width);
      }
      unit = next;
      first = false;
    }
    poison_unrouted(p);
  } else {
    for (bool first = true; cursor.valid(p); cursor.advance(p)) {
      const Unit unit = cursor.unit(p);
      // A later unit sends for its own x: dense blocks rarely have one.
      run_unit<FORMAT, TOKENS, ROW_TILES, DEPTH, ALIGNMENT, false>(p, unit, nullptr, stream, shared, drain, turn, share, at, 0,
                                                                   first, 0);
      first = false;
    }
  }
  copy_wait<0>();
}

}  // namespace requant
