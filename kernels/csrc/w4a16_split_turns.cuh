// w4a16_split.cuh with EXTRA, where one warp is too few to fill the ring, sum, and make outputs: with a gated activation it takes
// longer for a tile than the memory does. Here one warp fills the ring and FINISHERS take turns with tiles. Sums, roundings and
// bits are the same.
//
// Twenty warps leave each as many registers as seventeen do (96): five to a quarter of a multiprocessor. Products without all
// this are faster with sixteen warps of 128 registers, so they stay with w4a16_split.cuh.
//
// Only kAhead tiles of a block are on their way at a time, whatever the ring holds. Memory serves all that it is asked for at
// once: with more none comes early, and the last of a launch come together, to be multiplied when nothing is left to read.
#pragma once
#include "w4a16_split.cuh"

namespace requant {

// A segment's tiles in the warps that sum the others' parts, in the order of K, and make outputs of them: FINISHERS warps take
// turns, as one alone is slower than memory. turn: how many tiles the segment's first is from one of this warp's.
template <class Tile, int WARPS, int FINISHERS, int DEPTH>
__device__ __forceinline__ void split_finish(const Params& p, Segment segment, const uint8_t* memory, uint32_t empty, int lane,
                                             int& slot, int& turn) {
  const float4* const parts = reinterpret_cast<const float4*>(memory + DEPTH * (Tile::kCodes + Tile::kScales)) + lane;
  const int q = lane & 3;
  const bool few = segment.tokens <= 2;
  segment.tile += turn;
  segment.tiles -= turn;
  if (segment.tiles <= 0) {
    turn = -segment.tiles;
    return;
  }
  SplitOutputs<true> out(p, segment, few ? q & 1 : 2 * (q & 1), few ? -1 : 2 * (q & 1) + 1, lane);
  int left = segment.tiles;
#pragma unroll 1
  for (; left > 0; left -= FINISHERS) {
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
    barrier_arrive(empty + slot * 8);  // every lane has read them: the warps may fill that slot again
    // Lane q keeps row g + q / 2 * 8 and, of its two columns, both or (few) token q % 2; the rest goes to its neighbours.
    const float a = add_lane(v[0], v[2], q & 2, 2), b = add_lane(v[1], v[3], q & 2, 2);
    if (few) {
      out.store(p, 0, add_lane(a, b, q & 1, 1));
    } else {
      out.store(p, 0, a);
      out.store(p, 1, b);
    }
    out.row += (FINISHERS - 1) * out.step;
    out.next_tile(p);
    slot += FINISHERS;
    if (slot >= DEPTH) slot -= DEPTH;
  }
  turn = -left;
}

// The warp that fills the ring. full, empty: barriers of slots whose tiles have come, and whose sums have been read.
//
// A slot is filled again when all that was read of it has been: its tile by the WARPS, who arrive at a named barrier of the slot
// that this warp waits at, and its sums by the one that finished it, each lane of which arrives at `empty`. Then this warp starts
// the copies, and the WARPS write sums there again only when they have waited for those at `full`.
template <int WARPS, int DEPTH, int AHEAD, class Supply>
__device__ __forceinline__ void split_fill(const Params& p, Supply& supply, uint32_t full, uint32_t empty) {
  int number = 0, slot = 0;         // tiles asked for, and the next one's slot
  int landed = 0, landed_slot = 0;  // tiles that are known to have come, and the next one's slot
  uint32_t parity = 0, landed_parity = 0;
  const auto wait_read = [](int of) { named_wait(of + 1 + DEPTH, (WARPS + 1) * 32); };
#pragma unroll 1
  while (supply.valid()) {
    if (number >= DEPTH) {
      wait_read(slot);
      barrier_wait(empty + slot * 8, parity ^ 1);
    }
    if (number - landed >= AHEAD) {
      barrier_wait(full + landed_slot * 8, landed_parity);
      ++landed;
      if (++landed_slot == DEPTH) {
        landed_slot = 0;
        landed_parity ^= 1;
      }
    }
    supply.fetch(p, slot);
    ++number;
    if (++slot == DEPTH) {
      slot = 0;
      parity ^= 1;
    }
  }
  if (number < DEPTH) slot = 0;
#pragma unroll 1
  for (int i = min(number, DEPTH); i > 0; --i) {  // no barrier is left half full
    wait_read(slot);
    if (++slot == DEPTH) slot = 0;
  }
}

// Rows are a multiple of 16. Block: (32, 1, WARPS + FINISHERS + 1); grid: (1, blocks).
template <Format FORMAT, int STEPS, int WARPS, int FINISHERS, int DEPTH>
__global__ void __launch_bounds__((WARPS + FINISHERS + 1) * 32, 1)
    w4a16_split_turns_kernel(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
#if __CUDA_ARCH__ >= 900
  using Tile = SplitTile<FORMAT, STEPS, WARPS>;
  constexpr int kAhead = 2;
  static_assert(FINISHERS <= DEPTH && 2 * DEPTH < 16);  // named barriers
  extern __shared__ __align__(1024) uint8_t memory[];
  const int lane = threadIdx.x, warp = __shfl_sync(~0u, threadIdx.z, 0);
  const uint32_t full = shared_address(memory) + DEPTH * Tile::kSlotBytes, empty = full + DEPTH * 8;
  if (warp == 0 && elect_one()) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      barrier_init(full + i * 8, 32);
      barrier_init(empty + i * 8, 32);
    }
    barrier_init_fence();
  }
  const bool fills = warp == WARPS + FINISHERS;
  if (!Tile::kWhole && fills && lane < 2) prefetch_map(lane == 0 ? &maps.codes : &maps.scales);
  __syncthreads();
  const auto wait = [] {
    wait_for_previous_kernel();
    allow_next_kernel();
  };
  SegmentCursor cursor(p, p.max_tiles);  // as if no two slots shared an expert: while the kernel before still runs
  if (fills && lane * 8 <= p.max_tiles) prefetch_to_l2(p.tile_count + lane * 32);
  const bool settled = p.settled;
  if (!settled) wait();
  const int entries = load_fresh(settled, p.tile_count);
  const int4 guess = load_fresh(settled, p.tiles + min(lane, p.max_tiles - 1));  // with the count, not after it
  if (entries != p.max_tiles) cursor = SegmentCursor(p, entries);
  if (settled && (!fills || !cursor.valid())) wait();
  if (cursor.valid()) {
    Segment segment;
    if (cursor.entry < 32) {
      const int from = cursor.entry;
      segment = cursor.next(p, make_int4(__shfl_sync(~0u, guess.x, from), __shfl_sync(~0u, guess.y, from),
                                         __shfl_sync(~0u, guess.z, from), __shfl_sync(~0u, guess.w, from)));
    } else {
      segment = cursor.next(p, true);
    }
    if (fills) {
      SplitSupply<FORMAT, STEPS, WARPS, DEPTH, true, true> supply(p, cursor, segment, shared_address(memory), full, maps);
      split_fill<WARPS, DEPTH, kAhead>(p, supply, full, empty);
      if (settled) wait();
    } else {
      int turn = warp - WARPS, slot = warp < WARPS ? 0 : turn;
      uint32_t parity = 0;
#pragma unroll 1
      for (;;) {
        if (warp >= WARPS) {
          split_finish<Tile, WARPS, FINISHERS, DEPTH>(p, segment, memory, empty, lane, slot, turn);
        } else if (segment.tokens <= 2) {
          split_consume<FORMAT, STEPS, WARPS, DEPTH, 1, true, true>(p, segment, memory, full, warp, lane, slot, parity);
        } else {
          split_consume<FORMAT, STEPS, WARPS, DEPTH, 2, true, true>(p, segment, memory, full, warp, lane, slot, parity);
        }
        if (!cursor.valid()) break;
        segment = cursor.next(p, true);
      }
    }
  }
  poison_unrouted(p);
#endif
}

}  // namespace requant
