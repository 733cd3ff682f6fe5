// The grouped product for few tokens per expert where K suits it: whole tiles in memory order, K split among the warps.
//
// The 16 rows of a tile are one run of memory, codes and block scales alike, so two bulk copies of plain bytes bring it:
// no tensor map, no row that begins inside a memory line, no stage that K does not fill, and no alignment of the rows of
// block scales (180 bytes at K = 2880) but that of the tile. The tiles of a block stand in one ring. Of each tile, warp w
// takes k = 64 STEPS w .. 64 STEPS (w + 1), so its x never changes while the expert stays: it lies in registers, scaled by
// the warp's own power of two, and no block barrier is needed for it. One more warp fills the ring, sums the warps' parts
// in the order of K, and stores y: the order never depends on timing, so two runs give the same bits.
//
// Block scales meet the sums as in kGroupColumns (w4a16_core.cuh): column 2p + t of B holds token t in the rows of lane p
// only, so lane p's accumulators are the dot products of its own group of 16 k, and one FFMA scales them. Four tokens are
// two such products of the same decoded weights. Nothing is scaled in half precision, so MXFP4 runs alike.
//
// Bank conflicts: a lane reads 8 bytes, one group of 16 k. Rows are 8 or 24 words apart modulo 32, so a half-warp (four
// rows, p = 0..3) is free of conflicts if the lanes' groups differ modulo 4: group_of. A lane's groups are neighbours, so
// that its block scales are. When it has read them, the lane puts its sums in the place of its own codes.
#pragma once
#include "w4a16_split_tile.cuh"
#include "w4a16_stream.cuh"

namespace requant {

// The tiles of one segment in one warp.
template <Format FORMAT, int STEPS, int WARPS, int DEPTH, int PAIRS>
__device__ __forceinline__ void split_consume(const Params& p, const Segment& segment, uint8_t* shared, uint32_t full,
                                              uint32_t done, int warp, int lane, int& slot, uint32_t& parity) {
  using Tile = SplitTile<FORMAT, STEPS, WARPS>;
  const int g = lane >> 2, q = lane & 3;
  SplitX<PAIRS, STEPS> x;
  x.template load<Tile>(p, segment, warp, lane);
  const SplitScales<FORMAT> scales(q);
  const uint8_t* const codes = shared + g * Tile::kRowBytes + warp * Tile::kSliceBytes + q * STEPS * 8;
  const uint8_t* const scale_rows = shared + DEPTH * Tile::kCodes + g * Tile::kRowScales + warp * Tile::kSliceScales;
  uint8_t* const to = shared + warp * Tile::kSliceBytes + Tile::sums_at(lane);
#pragma unroll 1
  for (int tile = 0; tile < segment.tiles; ++tile) {
    barrier_wait(full + slot * 8, parity);
    const uint8_t* const at = codes + slot * Tile::kCodes;
    float sums[PAIRS][4];
    uint2 low_words[STEPS], high_words[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      low_words[j] = *reinterpret_cast<const uint2*>(at + j * 8);
      high_words[j] = *reinterpret_cast<const uint2*>(at + 8 * Tile::kRowBytes + j * 8);
    }
    float of_low[STEPS], of_high[STEPS];
    const uint8_t* const rows = scale_rows + slot * Tile::kScales;
    scales.read(rows, rows + 8 * Tile::kRowScales, of_low, of_high);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      float dot[PAIRS][4];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        uint32_t low[4], high[4];  // rows g and g + 8
        decode_e2m1(w == 0 ? low_words[j].x : low_words[j].y, low);
        decode_e2m1(w == 0 ? high_words[j].x : high_words[j].y, high);
        const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
        const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int u = 0; u < PAIRS; ++u) {
          const uint4 b = x.at[u][j][w];
          if (w == 0) {
            mma_f16(dot[u], a0, b.x, b.y, zero);
          } else {
            mma_f16(dot[u], a0, b.x, b.y, dot[u]);
          }
          mma_f16(dot[u], a1, b.z, b.w, dot[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < PAIRS; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float scale = i < 2 ? of_low[j] : of_high[j];
          sums[u][i] = j == 0 ? scale * dot[u][i] : sums[u][i] + scale * dot[u][i];
        }
      }
    }
    float4 part;
    if constexpr (PAIRS == 1) {
      part = make_float4(sums[0][0] * x.restore[0][0], sums[0][1] * x.restore[0][1], sums[0][2] * x.restore[0][0],
                         sums[0][3] * x.restore[0][1]);
    } else {  // even lanes take the first two tokens, odd ones the others
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float first = sums[0][i] * x.restore[0][i & 1], second = sums[1][i] * x.restore[1][i & 1];
        const float given = __shfl_xor_sync(~0u, q & 1 ? first : second, 1);
        v[i] = (q & 1 ? second : first) + given;
      }
      part = make_float4(v[0], v[1], v[2], v[3]);
    }
    *reinterpret_cast<float4*>(to + slot * Tile::kCodes) = part;
    __syncwarp();  // all lanes have read their codes and stored their sums
    if (elect_one()) barrier_arrive(done + slot * 8);
    if (++slot == DEPTH) {
      slot = 0;
      parity ^= 1;
    }
  }
}

// The warp that fills the ring and finishes tiles.
template <Format FORMAT, int STEPS, int WARPS, int DEPTH>
class SplitSupply {
  using Tile = SplitTile<FORMAT, STEPS, WARPS>;

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

// Block: (32, 1, WARPS + 1); grid: (1, blocks).
template <Format FORMAT, int STEPS, int WARPS, int DEPTH>
__global__ void __launch_bounds__((WARPS + 1) * 32, 1)
    w4a16_split_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  using Tile = SplitTile<FORMAT, STEPS, WARPS>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int lane = threadIdx.x, warp = __shfl_sync(~0u, threadIdx.z, 0);
  const uint32_t full = shared_address(memory) + DEPTH * Tile::kSlotBytes, done = full + DEPTH * 8;
  if (warp == 0 && elect_one()) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(done + i * 8, WARPS);
    }
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
          split_consume<FORMAT, STEPS, WARPS, DEPTH, 1>(p, segment, memory, full, done, warp, lane, slot, parity);
        } else {
          split_consume<FORMAT, STEPS, WARPS, DEPTH, 2>(p, segment, memory, full, done, warp, lane, slot, parity);
        }
        if (!cursor.valid()) break;
        segment = cursor.next(p);
      }
    } else {
      const int g = lane >> 2, q = lane & 3;
      SplitSupply<FORMAT, STEPS, WARPS, DEPTH> supply(p, cursor, segment, shared_address(memory), full);
#pragma unroll 1
      for (int i = 0; i < DEPTH; ++i) supply.fetch(p, i);
      const uint8_t* const parts = memory + Tile::sums_at(lane);
#pragma unroll 1
      for (;;) {
        const bool few = segment.tokens <= 2;
        const Outputs out(p, segment, few ? q & 1 : 2 * (q & 1), few ? -1 : 2 * (q & 1) + 1);
        int row = segment.tile * kTileRows + g + (q >> 1) * 8;
#pragma unroll 1
        for (int tile = 0; tile < segment.tiles; ++tile, row += kTileRows) {
          barrier_wait(done + slot * 8, parity);
          float4 part[WARPS];
#pragma unroll
          for (int w = 0; w < WARPS; ++w) {
            part[w] = *reinterpret_cast<const float4*>(parts + slot * Tile::kCodes + w * Tile::kSliceBytes);
          }
          float v[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
#pragma unroll
          for (int w = 1; w < WARPS; ++w) {
            v[0] += part[w].x;
            v[1] += part[w].y;
            v[2] += part[w].z;
            v[3] += part[w].w;
          }
          async_proxy_fence();  // the copies that come overwrite what the warps stored
          __syncwarp();
          supply.fetch(p, slot);
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] += __shfl_xor_sync(~0u, v[i], 2);
          if (few) {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] += __shfl_xor_sync(~0u, v[i], 1);
            out.store(0, row, q < 2 ? (q == 0 ? v[0] : v[1]) : (q == 2 ? v[2] : v[3]));
          } else {
            out.store(0, row, q < 2 ? v[0] : v[2]);
            out.store(1, row, q < 2 ? v[1] : v[3]);
          }
          if (++slot == DEPTH) {
            slot = 0;
            parity ^= 1;
          }
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
