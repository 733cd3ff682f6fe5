// The grouped product for few tokens per expert where K suits it: whole tiles in memory order, K split among the warps.
//
// The 16 rows of a tile are one run of memory, codes and block scales alike, so two bulk copies of plain bytes bring it:
// no tensor map, no row that begins inside a memory line, no stage that K does not fill, and no alignment of the rows of
// block scales (180 bytes at K = 2880) but that of the tile. The tiles of a block stand in one ring. Of each tile, warp w
// takes k = 192 w .. 192 w + 191, so its x never changes while the expert stays: it lies in registers, scaled by the warp's
// own power of two, and no block barrier is needed for it. One more warp fills the ring, sums the warps' parts in the order
// of K, and stores y: the order never depends on timing, so two runs give the same bits.
//
// Block scales meet the sums as in kGroupColumns (w4a16_core.cuh): a lane's columns of B hold x in the rows of the lanes that
// share its group of 16 k, and zeros elsewhere, so its accumulators are the dot products of that group and one FFMA scales
// them. Up to two tokens each lane has groups of its own; three or four leave two lanes to a group. Nothing is scaled in
// half precision, so MXFP4 runs alike.
//
// Bank conflicts: rows are 8 or 24 words apart modulo 32, and a lane reads the 8 bytes of a group at once: a half-warp, four
// rows and p = 0..3, is free of conflicts since three groups of a lane follow one another (3 p modulo 4 are all four). With
// two lanes to a group a lane reads 4 bytes at a time, and rows g and g + 4 meet.
#pragma once
#include <type_traits>

#include "w4a16_split_tile.cuh"
#include "w4a16_stream.cuh"

namespace requant {

__device__ __forceinline__ uint32_t split_word(uint2 words, int w) { return w == 0 ? words.x : words.y; }
__device__ __forceinline__ uint32_t split_word(uint32_t word, int) { return word; }

// The tiles of one segment in one warp.
template <Format FORMAT, int WARPS, int DEPTH, int SPAN>
__device__ __forceinline__ void split_consume(const Params& p, const Segment& segment, uint8_t* shared, uint32_t full,
                                              int warp, int lane, int& slot, uint32_t& parity) {
  using Tile = SplitTile<FORMAT, WARPS>;
  using Lane = SplitLane<SPAN>;
  using Words = typename std::conditional<SPAN == 1, uint2, uint32_t>::type;
  const Lane of(lane);
  SplitX<SPAN> x;
  x.template load<Tile>(p, segment, warp, of);
  const SplitScales<FORMAT, SPAN> scales(of.p);
  const uint8_t* const codes = shared + of.g * Tile::kRowBytes + warp * Tile::kSliceBytes + of.word() * 4;
  const uint8_t* const scale_rows = shared + DEPTH * Tile::kCodes + of.g * Tile::kRowScales + warp * Tile::kSliceScales;
  float4* const to = reinterpret_cast<float4*>(shared + DEPTH * (Tile::kCodes + Tile::kScales)) + warp * 32 + lane;
#pragma unroll 1
  for (int tile = 0; tile < segment.tiles; ++tile) {
    barrier_wait(full + slot * 8, parity);
    Words low_words[Lane::kGroups], high_words[Lane::kGroups];
#pragma unroll
    for (int j = 0; j < Lane::kGroups; ++j) {
      const uint8_t* const at = codes + slot * Tile::kCodes + j * 8;
      low_words[j] = *reinterpret_cast<const Words*>(at);
      high_words[j] = *reinterpret_cast<const Words*>(at + 8 * Tile::kRowBytes);
    }
    float of_low[Lane::kGroups], of_high[Lane::kGroups];
    const uint8_t* const rows = scale_rows + slot * Tile::kScales;
    scales.read(rows, rows + 8 * Tile::kRowScales, of_low, of_high);
    float sums[4];
#pragma unroll
    for (int j = 0; j < Lane::kGroups; ++j) {
      float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < Lane::kWords; ++w) {
        uint32_t low[4], high[4];  // rows g and g + 8
        decode_e2m1(split_word(low_words[j], w), low);
        decode_e2m1(split_word(high_words[j], w), high);
        const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
        const uint4 b = x.at[j][w];
        mma_f16(dot, a0, b.x, b.y, dot);
        mma_f16(dot, a1, b.z, b.w, dot);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = i < 2 ? of_low[j] : of_high[j];
        sums[i] = j == 0 ? scale * dot[i] : sums[i] + scale * dot[i];
      }
    }
    to[slot * WARPS * 32] =
        make_float4(sums[0] * x.restore[0], sums[1] * x.restore[1], sums[2] * x.restore[0], sums[3] * x.restore[1]);
    named_arrive(slot + 1, (WARPS + 1) * 32);  // the slot has been read, the sums are there
    if (++slot == DEPTH) {
      slot = 0;
      parity ^= 1;
    }
  }
}

// The warp that fills the ring and finishes tiles.
template <Format FORMAT, int WARPS, int DEPTH>
class SplitSupply {
  using Tile = SplitTile<FORMAT, WARPS>;

 public:
  __device__ __forceinline__ SplitSupply(const Params& p, const SegmentCursor& cursor, const Segment& first, uint32_t shared,
                                         uint32_t full)
      : cursor_(cursor), shared_(shared), full_(full) {
    open(p, first);
  }

  // Start the copies of the next tile into `slot`; nothing if the work is at its end.
  __device__ __forceinline__ void fetch(const Params& p, int slot) {
    if (left_ == 0) return;
    const int rows = min(p.rows - row_, kTileRows);  // none past the expert's last: it may be the tensor's
    const uint32_t barrier = full_ + slot * 8;
    if (elect_one()) {
      barrier_expect(barrier, rows * (Tile::kRowBytes + Tile::kRowScales));
      copy_run(shared_ + slot * Tile::kCodes, codes_, rows * Tile::kRowBytes, barrier);
      copy_run(shared_ + DEPTH * Tile::kCodes + slot * Tile::kScales, scales_, rows * Tile::kRowScales, barrier);
    }
    codes_ += Tile::kCodes;
    scales_ += Tile::kScales;
    row_ += kTileRows;
    if (--left_ == 0 && cursor_.valid()) open(p, cursor_.next(p));
  }

 private:
  __device__ __forceinline__ void open(const Params& p, const Segment& s) {
    left_ = s.tiles;
    row_ = s.tile * kTileRows;
    const size_t row = static_cast<size_t>(s.expert) * p.rows + row_;
    codes_ = p.codes + row * Tile::kRowBytes;
    scales_ = p.block_scales + row * Tile::kRowScales;
  }

  SegmentCursor cursor_;
  const uint32_t shared_, full_;
  int left_ = 0, row_ = 0;  // tiles of this segment still to fetch; the next one's first row in its expert
  const uint8_t *codes_ = nullptr, *scales_ = nullptr;
};

// Where a lane of that warp puts a segment's sums: one row each time, of up to two tokens.
struct SplitOutputs {
  int64_t row_zero[2];  // the token's first output; -1: no such token
  float scale, weight[2];

  __device__ __forceinline__ SplitOutputs(const Params& p, const Segment& s, int token0, int token1) {
    scale = p.global_scale * (p.global_scales != nullptr ? __ldg(p.global_scales + s.expert) : 1.0f);
    if (!(scale > 0.0f)) scale = __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
    const int tokens[2] = {token0, token1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool present = tokens[i] >= 0 && tokens[i] < s.tokens;
      const int number = !present ? -1 : tokens[i] == 0 ? s.first_number : __ldg(p.slots + s.first_slot + tokens[i]);
      row_zero[i] = present ? static_cast<int64_t>(number) * p.rows : -1;
      weight[i] = present && p.slot_weights != nullptr ? __ldg(p.slot_weights + number) : 1.0f;
    }
  }

  __device__ __forceinline__ void store(const Params& p, int which, int row, float v) const {
    if (row_zero[which] < 0 || row >= p.rows) return;
    v = v * scale * weight[which];
    if (p.output_is_float) {
      static_cast<float*>(p.y)[row_zero[which] + row] = v;
    } else {
      static_cast<__nv_bfloat16*>(p.y)[row_zero[which] + row] = __float2bfloat16(v);
    }
  }
};

// Block: (32, 1, WARPS + 1); grid: (1, blocks).
template <Format FORMAT, int WARPS, int DEPTH>
__global__ void __launch_bounds__((WARPS + 1) * 32, 1)
    w4a16_split_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  using Tile = SplitTile<FORMAT, WARPS>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int lane = threadIdx.x, warp = __shfl_sync(~0u, threadIdx.z, 0);
  const uint32_t full = shared_address(memory) + DEPTH * Tile::kSlotBytes;
  if (warp == 0 && elect_one()) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) barrier_init(full + i * 8, 1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  const int entries = __ldg(p.tile_count);
  const int4 guess = __ldg(p.tiles + min(lane, p.max_tiles - 1));  // with the count, not after it
  SegmentCursor cursor(p, entries);
  if (cursor.valid()) {
    Segment segment;
    if (cursor.entry < 32) {
      const int from = cursor.entry;
      segment = cursor.next(p, make_int4(__shfl_sync(~0u, guess.x, from), __shfl_sync(~0u, guess.y, from),
                                         __shfl_sync(~0u, guess.z, from), __shfl_sync(~0u, guess.w, from)));
    } else {
      segment = cursor.next(p);
    }
    int slot = 0;
    uint32_t parity = 0;
    if (warp < WARPS) {
#pragma unroll 1
      for (;;) {
        if (segment.tokens <= 2) {
          split_consume<FORMAT, WARPS, DEPTH, 1>(p, segment, memory, full, warp, lane, slot, parity);
        } else {
          split_consume<FORMAT, WARPS, DEPTH, 2>(p, segment, memory, full, warp, lane, slot, parity);
        }
        if (!cursor.valid()) break;
        segment = cursor.next(p);
      }
    } else {
      const int g = lane >> 2, q = lane & 3;
      SplitSupply<FORMAT, WARPS, DEPTH> supply(p, cursor, segment, shared_address(memory), full);
#pragma unroll 1
      for (int i = 0; i < DEPTH; ++i) supply.fetch(p, i);
      const float4* const parts = reinterpret_cast<const float4*>(memory + DEPTH * (Tile::kCodes + Tile::kScales)) + lane;
#pragma unroll 1
      for (;;) {
        const bool few = segment.tokens <= 2;
        const SplitOutputs out(p, segment, few ? q & 1 : 2 * (q & 1), few ? -1 : 2 * (q & 1) + 1);
        int row = segment.tile * kTileRows + g + (q >> 1) * 8;
#pragma unroll 1
        for (int tile = 0; tile < segment.tiles; ++tile, row += kTileRows) {
          named_wait(slot + 1, (WARPS + 1) * 32);
          float4 part[WARPS];
#pragma unroll
          for (int w = 0; w < WARPS; ++w) part[w] = parts[(slot * WARPS + w) * 32];
          float v[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
#pragma unroll
          for (int w = 1; w < WARPS; ++w) {
            v[0] += part[w].x;
            v[1] += part[w].y;
            v[2] += part[w].z;
            v[3] += part[w].w;
          }
          __syncwarp();  // all lanes have read them: the warps may fill that slot again
          supply.fetch(p, slot);
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] += __shfl_xor_sync(~0u, v[i], 2);
          if (few) {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] += __shfl_xor_sync(~0u, v[i], 1);
            out.store(p, 0, row, q < 2 ? (q == 0 ? v[0] : v[1]) : (q == 2 ? v[2] : v[3]));
          } else {
            out.store(p, 0, row, q < 2 ? v[0] : v[2]);
            out.store(p, 1, row, q < 2 ? v[1] : v[3]);
          }
          if (++slot == DEPTH) slot = 0;
        }
        if (!cursor.valid()) break;
        segment = cursor.next(p);
      }
    }
  }
  poison_unrouted(p);
#endif
}

}  // namespace requant
