// Expert routing: slots sorted by expert once per layer, for every grouped GEMM of it.
#pragma once
#include "w4a16_types.cuh"

namespace requant {

// Tokens of one expert that share a pass over its weights: as many as the stream takes, unless experts get so many each
// that wide passes pay.
inline int routing_tile_tokens(int slots, int experts) {
  return slots <= 2 * static_cast<int64_t>(experts) ? kStreamTokens : kGroupedTileTokens;
}

inline int routing_tiles(int slots, int experts) {
  const int by_count = experts + slots / routing_tile_tokens(slots, experts);
  return slots < by_count ? slots : by_count;
}

__host__ __device__ constexpr int padded_ints(int count) { return (count + 3) / 4 * 4; }

// One block sorts slots by expert, stably, so the result never depends on timing. Layout of `routing` (ints):
//   [0] tiles, [1] slots with a valid expert, [2..3] 0
//   tiles: int4 {expert, first position in the slot list, tokens, first slot}, at most min(slots, experts + slots / tile_tokens)
//   slot list: slot numbers by expert; those with an expert id out of range come last
//   row list: for each entry of the slot list its token, slot / slots_per_token
__global__ void __launch_bounds__(1024) route_kernel(const int* __restrict__ expert_ids, int slots, int slots_per_token,
                                                     int experts, int tile_tokens, int max_tiles,
                                                     int* __restrict__ routing) {
  extern __shared__ int shared_ints[];
  // Each array starts on its own 16 bytes: the widest access, and what racecheck takes as one place.
  int* ids = shared_ints;                                  // [slots]
  int* counts = ids + padded_ints(slots);                  // [experts + 1], then first positions
  int* tiles_before = counts + padded_ints(experts + 1);   // [experts + 1]
  for (int s = threadIdx.x; s < slots; s += blockDim.x) {
    const int id = expert_ids[s];
    ids[s] = id >= 0 && id < experts ? id : experts;  // bucket `experts` holds the invalid ones
  }
  __syncthreads();
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
    int n = 0;
    for (int s = 0; s < slots; ++s) n += ids[s] == e;
    counts[e] = n;
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // exclusive prefix sums of slots and of tiles, 32 experts at a time
    int slot_base = 0, tile_base = 0;
    for (int base = 0; base <= experts; base += 32) {
      const int e = base + threadIdx.x, n = e <= experts ? counts[e] : 0;
      const int t = e < experts ? (n + tile_tokens - 1) / tile_tokens : 0;
      int n_sum = n, t_sum = t;
      for (int step = 1; step < 32; step *= 2) {
        const int n_up = __shfl_up_sync(~0u, n_sum, step), t_up = __shfl_up_sync(~0u, t_sum, step);
        if (static_cast<int>(threadIdx.x) >= step) {
          n_sum += n_up;
          t_sum += t_up;
        }
      }
      if (e <= experts) {
        counts[e] = slot_base + n_sum - n;
        tiles_before[e] = tile_base + t_sum - t;
      }
      slot_base += __shfl_sync(~0u, n_sum, 31);
      tile_base += __shfl_sync(~0u, t_sum, 31);
    }
  }
  __syncthreads();
  int4* tiles = reinterpret_cast<int4*>(routing + kRoutingHeader);
  int* list = routing + kRoutingHeader + 4 * max_tiles;
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
    const int begin = counts[e], end = e < experts ? counts[e + 1] : slots;
    if (begin == end) continue;
    int at = begin;
    for (int s = 0; s < slots; ++s) {
      if (ids[s] != e) continue;
      list[at] = s;
      list[slots + at++] = s / slots_per_token;
    }
    if (e == experts) continue;
    for (int first = begin, tile = tiles_before[e]; first < end; first += tile_tokens, ++tile) {
      tiles[tile] = make_int4(e, first, min(end - first, tile_tokens), list[first]);
    }
  }
  if (threadIdx.x == 0) {
    routing[0] = tiles_before[experts];
    routing[1] = counts[experts];
    routing[2] = routing[3] = 0;
  }
}

}  // namespace requant
