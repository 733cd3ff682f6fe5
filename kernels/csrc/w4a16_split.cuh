// The grouped product for few tokens per expert where K suits it: whole tiles, K split among the warps.
//
// The 16 rows of a tile are one run of memory, codes and block scales alike. Where reading them as they lie is free of bank
// conflicts (K = 2880), two bulk copies of plain bytes bring a tile: no row that begins inside a memory line, no stage that K
// does not fill, and no alignment of the rows of block scales (180 bytes) but that of the tile. Else (K = 2048 and 4096)
// boxes of the copy engine, wider than the row, bring it padded. The tiles of a block stand in one ring. Of each tile, a warp
// takes 192 or 256 k, always the same, so its x never changes while the expert stays: it lies in registers, scaled by the
// warp's own power of two, and no block barrier is needed for it. One more warp fills the ring, sums the warps' parts in the
// order of K, and stores y: the order never depends on timing, so two runs give the same bits.
//
// Block scales meet the sums as in kGroupColumns (w4a16_core.cuh): a lane's columns of B hold x in the rows of the lanes that
// share its group of 16 k, and zeros elsewhere, so its accumulators are the dot products of that group and one FFMA scales
// them. Up to two tokens each lane has groups of its own; three or four leave two lanes to a group. Nothing is scaled in
// half precision, so MXFP4 runs alike.
//
// Bank conflicts: rows are 8 or 24 words apart modulo 32, and a lane reads the 8 bytes of a group at once: a half-warp, four
// rows and p = 0..3, is free of conflicts where the four lanes' groups differ modulo 4: three groups of a lane follow one
// another (3 p modulo 4 are all four), of four each lane begins with another (SplitLane::flip). With two lanes to a group a
// lane reads 4 bytes at a time, and rows g and g + 4 meet.
//
// Beside the product (EXTRA): a bias and a gated activation on the sums, so that gate_up of a layer needs no kernel after it;
// and a start before the kernel before has ended (`settled`), which reads routing and first tiles and waits with x.
#pragma once
#include <type_traits>

#include "w4a16_split_outputs.cuh"
#include "w4a16_split_tile.cuh"
#include "w4a16_stream.cuh"

namespace requant {

__device__ __forceinline__ uint32_t split_word(uint2 words, int w) { return w == 0 ? words.x : words.y; }
__device__ __forceinline__ uint32_t split_word(uint32_t word, int) { return word; }
__device__ __forceinline__ void load_words(uint32_t from, uint32_t& to) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_words(uint32_t from, uint2& to) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to.x), "=r"(to.y) : "r"(from) : "memory");
}

// The tiles of one segment in one warp. FREES: another warp than the one that sums waits until the slot has been read.
template <Format FORMAT, int STEPS, int WARPS, int DEPTH, int SPAN, bool EXTRA, bool FREES = false>
__device__ __forceinline__ void split_consume(const Params& p, const Segment& segment, uint8_t* shared, uint32_t full,
                                              int warp, int lane, int& slot, uint32_t& parity) {
  using Tile = SplitTile<FORMAT, STEPS, WARPS>;
  using Lane = SplitLane<STEPS, SPAN>;
  using Words = typename std::conditional<SPAN == 1, uint2, uint32_t>::type;
  const Lane of(lane);
  SplitX<STEPS, SPAN> x;
  x.template load<Tile>(p, segment, warp, of, EXTRA && p.settled);
  const SplitScales<FORMAT, STEPS, SPAN> scales(of);
  const uint32_t codes = shared_address(shared) + of.g * Tile::kPitch + Tile::slice(warp) + of.word(0) * 4;
  const uint8_t* const scale_rows = shared + DEPTH * Tile::kCodes + of.g * Tile::kScalePitch + warp * Tile::kSliceScales;
  float4* const to = reinterpret_cast<float4*>(shared + DEPTH * (Tile::kCodes + Tile::kScales)) + warp * 32 + lane;
#pragma unroll 1
  for (int tile = 0; tile < segment.tiles; ++tile) {
    barrier_wait(full + slot * 8, parity);
    Words low_words[Lane::kGroups], high_words[Lane::kGroups];
#pragma unroll
    for (int j = 0; j < Lane::kGroups; ++j) {
      // A flip of the group's number is one of its address: four groups begin at a multiple of 32 bytes.
      const uint32_t first = codes + slot * Tile::kCodes;
      const uint32_t at = STEPS == 3 ? first + j * 8 : (first + j / 4 * 32) ^ j % 4 * 8;
      load_words(at, low_words[j]);
      load_words(at + 8 * Tile::kPitch, high_words[j]);
    }
    float of_low[Lane::kGroups], of_high[Lane::kGroups];
    const uint8_t* const rows = scale_rows + slot * Tile::kScales;
    scales.read(rows, rows + 8 * Tile::kScalePitch, of_low, of_high);
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
    if (FREES) named_arrive(slot + 1 + DEPTH, (WARPS + 1) * 32);
    if (++slot == DEPTH) {
      slot = 0;
      parity ^= 1;
    }
  }
}

// What fills the ring. ONCE: the L2 need not keep the weights.
template <Format FORMAT, int STEPS, int WARPS, int DEPTH, bool EXTRA, bool ONCE = false>
class SplitSupply {
  using Tile = SplitTile<FORMAT, STEPS, WARPS>;
  static constexpr int kRuns = EXTRA ? 2 : 1, kRunRows = kTileRows / kRuns;  // the rows of a tile in memory

 public:
  __device__ __forceinline__ SplitSupply(const Params& p, const SegmentCursor& cursor, const Segment& first, uint32_t shared,
                                         uint32_t full, const TensorMaps& maps)
      : cursor_(cursor), maps_(maps), shared_(shared), full_(full),
        apart_(p.gating == Gating::kHalves ? p.rows / 2 : kRunRows), step_(p.gating == Gating::kHalves ? kRunRows : kTileRows) {
    open(p, first);
  }

  __device__ __forceinline__ bool valid() const { return left_ > 0; }

  // Start the copies of the next tile into `slot`; nothing if the work is at its end. All lanes arrive at its barrier, since
  // all have read the sums of the tile before.
  __device__ __forceinline__ void fetch(const Params& p, int slot) {
    if (left_ == 0) return;
    const uint32_t barrier = full_ + slot * 8;
    if (elect_one()) {
      const int rows = EXTRA ? kTileRows : min(p.rows - row_, kTileRows);  // none past the expert's last: it may be the tensor's
      barrier_expect(barrier, Tile::kWhole ? rows * (Tile::kRowBytes + Tile::kRowScales) : Tile::kCodes + Tile::kScales);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const uint32_t codes = shared_ + slot * Tile::kCodes + run * kRunRows * Tile::kPitch;
        const uint32_t scales = shared_ + DEPTH * Tile::kCodes + slot * Tile::kScales + run * kRunRows * Tile::kScalePitch;
        const int ahead = run * (EXTRA ? apart_ : 0);
        if constexpr (Tile::kWhole) {
          const auto copy = ONCE ? copy_stream : copy_run;
          copy(codes, codes_ + static_cast<size_t>(ahead) * Tile::kRowBytes, rows / kRuns * Tile::kRowBytes, barrier);
          copy(scales, scales_ + static_cast<size_t>(ahead) * Tile::kRowScales, rows / kRuns * Tile::kRowScales, barrier);
        } else {  // what a box holds beyond the tensor are zeros; beyond the expert, the next one's rows
          const int from = first_row_ + row_ + ahead;
          copy_box(codes, &maps_.codes, barrier, 0, from);
          if (Tile::kParts == 2) copy_box(codes + kTileRows * Tile::kPitch, &maps_.codes, barrier, Tile::kRowUnits, from);
          copy_box(scales, &maps_.scales, barrier, 0, from);
        }
      }
    } else {
      barrier_arrive(barrier);
    }
    const int step = EXTRA ? step_ : kTileRows;
    row_ += step;
    if (Tile::kWhole) {
      codes_ += step * Tile::kRowBytes;
      scales_ += step * Tile::kRowScales;
    }
    if (--left_ == 0 && cursor_.valid()) open(p, cursor_.next(p, EXTRA));
  }

 private:
  __device__ __forceinline__ void open(const Params& p, const Segment& s) {
    left_ = s.tiles;
    row_ = s.tile * (EXTRA ? step_ : kTileRows);
    first_row_ = s.expert * p.rows;
    const size_t row = static_cast<size_t>(first_row_) + row_;
    codes_ = p.codes + row * Tile::kRowBytes;
    scales_ = p.block_scales + row * Tile::kRowScales;
  }

  SegmentCursor cursor_;
  const TensorMaps& maps_;
  const uint32_t shared_, full_;
  const int apart_, step_;                // EXTRA: rows from run to run of a tile, and from tile to tile
  int left_ = 0, row_ = 0;                // tiles of this segment still to fetch; the next one's first row in its expert
  int first_row_ = 0;                     // of that expert among the rows of all
  const uint8_t *codes_ = nullptr, *scales_ = nullptr;  // of the tile, where no box is made
};

// The first value or the second, this lane's and that of the lane `apart` away, which keeps the other.
__device__ __forceinline__ float add_lane(float first, float second, bool keeps_second, int apart) {
  return (keeps_second ? second : first) + __shfl_xor_sync(~0u, keeps_second ? first : second, apart);
}

// EXTRA: with a bias, a gated activation, or a start before the kernel before has ended; rows are a multiple of 16.
// Block: (32, 1, WARPS + 1); grid: (1, blocks).
template <Format FORMAT, int STEPS, int WARPS, int DEPTH, bool EXTRA>
__global__ void __launch_bounds__((WARPS + 1) * 32, WARPS <= 8 ? 2 : 1)
    w4a16_split_kernel(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
#if __CUDA_ARCH__ >= 900
  using Tile = SplitTile<FORMAT, STEPS, WARPS>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int lane = threadIdx.x, warp = __shfl_sync(~0u, threadIdx.z, 0);
  const uint32_t full = shared_address(memory) + DEPTH * Tile::kSlotBytes;
  if (warp == 0 && elect_one()) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) barrier_init(full + i * 8, 32);
    barrier_init_fence();
  }
  if (!Tile::kWhole && warp == WARPS && lane < 2) prefetch_map(lane == 0 ? &maps.codes : &maps.scales);
  __syncthreads();
  const auto wait = [] {
    wait_for_previous_kernel();
    allow_next_kernel();
  };
  SegmentCursor cursor(p, p.max_tiles);  // as if no two slots shared an expert: while the kernel before still runs
  if (warp == WARPS && lane * 8 <= p.max_tiles) prefetch_to_l2(p.tile_count + lane * 32);
  const bool settled = EXTRA && p.settled;
  if (!settled) wait();
  const int entries = load_fresh(settled, p.tile_count);
  const int4 guess = load_fresh(settled, p.tiles + min(lane, p.max_tiles - 1));  // with the count, not after it
  if (entries != p.max_tiles) cursor = SegmentCursor(p, entries);
  if (settled && (warp < WARPS || !cursor.valid())) wait();
  if (cursor.valid()) {
    Segment segment;
    if (cursor.entry < 32) {
      const int from = cursor.entry;
      segment = cursor.next(p, make_int4(__shfl_sync(~0u, guess.x, from), __shfl_sync(~0u, guess.y, from),
                                         __shfl_sync(~0u, guess.z, from), __shfl_sync(~0u, guess.w, from)));
    } else {
      segment = cursor.next(p, EXTRA);
    }
    int slot = 0;
    uint32_t parity = 0;
    if (warp < WARPS) {
#pragma unroll 1
      for (;;) {
        if (segment.tokens <= 2) {
          split_consume<FORMAT, STEPS, WARPS, DEPTH, 1, EXTRA>(p, segment, memory, full, warp, lane, slot, parity);
        } else {
          split_consume<FORMAT, STEPS, WARPS, DEPTH, 2, EXTRA>(p, segment, memory, full, warp, lane, slot, parity);
        }
        if (!cursor.valid()) break;
        segment = cursor.next(p, EXTRA);
      }
    } else {
      const int q = lane & 3;
      SplitSupply<FORMAT, STEPS, WARPS, DEPTH, EXTRA> supply(p, cursor, segment, shared_address(memory), full, maps);
#pragma unroll 1
      for (int i = 0; i < DEPTH; ++i) supply.fetch(p, i);
      if (settled) wait();
      const float4* const parts = reinterpret_cast<const float4*>(memory + DEPTH * (Tile::kCodes + Tile::kScales)) + lane;
#pragma unroll 1
      for (;;) {
        const bool few = segment.tokens <= 2;
        SplitOutputs<EXTRA> out(p, segment, few ? q & 1 : 2 * (q & 1), few ? -1 : 2 * (q & 1) + 1, lane);
#pragma unroll 1
        for (int tile = 0; tile < segment.tiles; ++tile) {
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
          // Lane q keeps row g + q / 2 * 8 and, of its two columns, both or (few) token q % 2; the rest goes to its neighbours.
          const float a = add_lane(v[0], v[2], q & 2, 2), b = add_lane(v[1], v[3], q & 2, 2);
          if (few) {
            out.store(p, 0, add_lane(a, b, q & 1, 1));
          } else {
            out.store(p, 0, a);
            out.store(p, 1, b);
          }
          out.next_tile(p);
          if (++slot == DEPTH) slot = 0;
        }
        if (!cursor.valid()) break;
        segment = cursor.next(p, EXTRA);
      }
    }
  }
  poison_unrouted(p);
#endif
}

}  // namespace requant
