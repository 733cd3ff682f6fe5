// The grouped product for few tokens per expert, as one stream of weights per multiprocessor.
//
// The work is a list of 16-row tiles, expert after expert. Each block, one to a multiprocessor, takes an equal run of it
// and cuts it where the expert (the *entry* of the routing) changes. Within such a segment the stages of all its tiles
// stand in one line, [tile][stage], and each warp takes an equal run of that line: it may begin and end inside a tile.
// So all warps finish together to within one stage, whatever N, K and the number of experts, and between the two block
// barriers of a segment no warp waits for another; x is prepared once per segment and not once per few rows.
//
// A tile that one warp sees whole goes straight from its registers to y. The pieces of a shared tile lie in shared memory
// until the segment's end, and the warp that had its last stage sums them in the order of K: the cut depends on the
// problem and the launch only, so two runs give the same bits.
#pragma once
#include "w4a16_stream_copies.cuh"
#include "w4a16_sums.cuh"
#include "w4a16_tile.cuh"

namespace requant {

// Where a segment's sums go: y, or the pieces of a shared tile. Loaded values are not looked at before they are needed:
// a segment would begin with a wait for them.
struct Outputs {
  const Params& p;
  float expert_scale;
  int numbers[2];  // of this lane's slots, -1: none

  __device__ __forceinline__ Outputs(const Params& params, const Segment& s, int token0, int token1) : p(params) {
    expert_scale = p.global_scales != nullptr ? p.global_scales[s.expert] : 1.0f;
    const int tokens[2] = {token0, token1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      numbers[i] = tokens[i] == 0 ? s.first_number : -1;
      if (tokens[i] > 0 && tokens[i] < s.tokens) numbers[i] = p.slots[s.first_slot + tokens[i]];
    }
  }

  __device__ __forceinline__ void store(int which, int row, float v) const {
    const int number = numbers[which];
    if (number < 0 || row >= p.rows) return;
    float scale = p.global_scale * expert_scale;
    if (!(scale > 0.0f)) scale = __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
    v *= scale;
    if (p.slot_weights != nullptr) v *= p.slot_weights[number];
    const size_t at = static_cast<size_t>(number) * p.rows + row;
    if (p.output_is_float) {
      static_cast<float*>(p.y)[at] = v;
    } else {
      static_cast<__nv_bfloat16*>(p.y)[at] = __float2bfloat16(v);
    }
  }
};

// The tile's sums of this warp, true to scale: to `piece` [token][row] in shared memory, or to y from row `row` on.
template <class Tile, class X, int TOKENS, int ROW_TILES>
__device__ __forceinline__ void put_tile(const Tile& tile, const Outputs& out, float* piece, int row,
                                         const uint32_t* largest, int lane) {
  constexpr int kRows = kTileRows * ROW_TILES;
  const int g = lane >> 2, p = lane & 3;
  const auto put = [&](int which, int token, int at, float v) {
    if (piece != nullptr) {
      piece[token * kRows + at] = v;
    } else {
      out.store(which, row + at, v);
    }
  };
  if constexpr (Tile::kGroups) {  // lane p takes the sum of row g + p / 2 * 8 and token p % 2 over the four lanes
    const int token = p & 1;
    const float restore = X::restore(largest[token]);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = tile.sums[r][0][0][i];
        v[i] += __shfl_xor_sync(~0u, v[i], 1);
        v[i] += __shfl_xor_sync(~0u, v[i], 2);
      }
      put(0, token, r * kTileRows + g + (p >> 1) * 8, (p < 2 ? (p == 0 ? v[0] : v[1]) : (p == 2 ? v[2] : v[3])) * restore);
    }
  } else {
    if (2 * p >= TOKENS) return;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float restore = X::restore(largest[2 * p + t]);
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const int r = i / 2, h = i % 2;
        float v = tile.sums[r][0][0][2 * h + t];
        if (Tile::kMode != ScaleMode::kScaleAfter && Tile::kChains == 2) v += tile.sums[r][0][1][2 * h + t];
        put(t, 2 * p + t, r * kTileRows + g + 8 * h, v * restore);
      }
    }
  }
}

// This warp's run of one segment. pieces: [warp][head, tail][token][row].
template <Format FORMAT, int TOKENS, int ROW_TILES, int WARPS, int DEPTH, Alignment ALIGNMENT>
__device__ __forceinline__ void run_stages(const Params& p, const TensorMaps& maps, const Segment& segment,
                                           RunStream<FORMAT, ROW_TILES, WARPS, DEPTH, ALIGNMENT>& stream, const uint8_t* shared,
                                           float* pieces, const uint8_t* x, const uint32_t* largest, int warp, int lane,
                                           RunPlace<DEPTH>& at) {
  using Tile = WarpTile<FORMAT, TOKENS, ROW_TILES, DEPTH, ALIGNMENT>;
  using X = Activations<scale_mode<FORMAT, TOKENS>(), false>;
  using Box = ScaleBox<FORMAT, ROW_TILES, ALIGNMENT>;
  constexpr int kRows = kTileRows * ROW_TILES, kPieceFloats = TOKENS * kRows, kCodes = kRows * kLine;
  constexpr int kStageScales = FormatTraits<FORMAT>::kStageScales;
  const int begin = run_begin<WARPS>(p, segment, warp), count = run_begin<WARPS>(p, segment, warp + 1) - begin;
  if (count == 0) return;
  const int tile_number = quotient(begin, p.stages_each);
  int stage = begin - tile_number * p.stages_each, row = (segment.tile + tile_number) * kRows;
  const Outputs out(p, segment, Tile::kGroups ? lane & 1 : 2 * (lane & 3), Tile::kGroups ? -1 : 2 * (lane & 3) + 1);
  float* const head = pieces + warp * 2 * kPieceFloats;
  float* piece = stage != 0 ? head : nullptr;  // of the tile at hand, if another warp began it
  const int g = lane >> 2, pitch = p.k / FormatTraits<FORMAT>::kGroup;
  const uint8_t* const codes = shared + warp * DEPTH * kCodes;
  const uint8_t* scales = shared + p.stream_scales_offset + warp * DEPTH * Box::kBytes + g * Box::kPitch;
  if (!Box::kMapped) scales += g * pitch & 15;  // where in its first piece a row starts; row g + 8 does alike
  const uint32_t barriers = shared_address(shared) + p.barriers_offset + warp * DEPTH * 8;
  typename Tile::XSource source = Tile::x_source(x, shared + p.zeros_offset, lane);
  const uint8_t* const x_begin = source.at;
  source.at += stage * source.stride;
  Tile tile;
  tile.clear();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (!Box::kMapped) copy_wait<DEPTH - 2>();
    barrier_wait(barriers + at.slot * 8, at.parity);
    __syncwarp();  // the stage has landed for all lanes, and all lanes are done with the slot that is filled next
    stream.fetch(p, maps);
    if (i == 0 || stage % kScaleStages == 0) at.next_box();
    const int chunk = stage % kScaleStages;
    const int scale_at = at.box * Box::kBytes + (Box::kSwizzled ? chunk ^ (g >> 1 & 3) : chunk) * kStageScales;
    tile.template consume<Box::kPitch>(codes + at.slot * kCodes, scales + scale_at, source.at, lane, 0,
                                       Box::kMapped ? kStageScales : pitch - stage * kStageScales);
    source.at += source.stride;
    at.next_slot();
    if (++stage == p.stages_each) {
      put_tile<Tile, X, TOKENS, ROW_TILES>(tile, out, piece, row, largest, lane);
      tile.clear();
      stage = 0;
      row += kRows;
      piece = nullptr;
      source.at = x_begin;
    }
  }
  if (stage != 0) {  // the rest is another warp's
    put_tile<Tile, X, TOKENS, ROW_TILES>(tile, out, piece != nullptr ? head : head + kPieceFloats, 0, largest, lane);
  }
}

// After the segment's barrier: sum the pieces of the tile that began in another warp's run and ended in this one's.
template <int TOKENS, int ROW_TILES, int WARPS>
__device__ __forceinline__ void join_pieces(const Params& p, const Segment& segment, const float* pieces, int warp, int lane) {
  constexpr int kRows = kTileRows * ROW_TILES, kPieceFloats = TOKENS * kRows;
  const int begin = run_begin<WARPS>(p, segment, warp), end = run_begin<WARPS>(p, segment, warp + 1);
  const int tile = quotient(begin, p.stages_each), tile_begin = tile * p.stages_each;
  if (begin == tile_begin || end < tile_begin + p.stages_each) return;
  int from = warp - 1;
  while (run_begin<WARPS>(p, segment, from) > tile_begin) --from;
#pragma unroll 1
  for (int i = lane; i < kPieceFloats; i += 32) {
    const Outputs out(p, segment, i / kRows, -1);
    float v = pieces[(2 * from + 1) * kPieceFloats + i];
    for (int w = from + 1; w <= warp; ++w) {
      if (run_begin<WARPS>(p, segment, w) < run_begin<WARPS>(p, segment, w + 1)) v += pieces[2 * w * kPieceFloats + i];
    }
    out.store(0, (segment.tile + tile) * kRows + i % kRows, v);
  }
}

// Two or four tokens wide, as each segment needs. Block: (32, 1, WARPS); grid: (1, blocks).
template <Format FORMAT, int ROW_TILES, int WARPS, int DEPTH, Alignment ALIGNMENT>
__global__ void __launch_bounds__(WARPS * 32, 1)
    w4a16_stream_kernel(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
#if __CUDA_ARCH__ >= 900
  constexpr int kFew = 2, kMany = kStreamTokens;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int lane = threadIdx.x, warp = __shfl_sync(~0u, threadIdx.z, 0);
  float* const pieces = reinterpret_cast<float*>(memory + p.sums_offset);
  uint32_t* const both_largest = reinterpret_cast<uint32_t*>(memory + p.largest_offset);  // [2][kStreamTokens]
  if (warp < 2) reinterpret_cast<uint4*>(memory + p.zeros_offset)[warp * 32 + lane] = make_uint4(0, 0, 0, 0);
  if (warp == 2 && lane < 2 * kStreamTokens) both_largest[lane] = 0;
  if (lane < DEPTH) {
    barrier_init(shared_address(memory) + p.barriers_offset + (warp * DEPTH + lane) * 8, 1);
    barrier_init_fence();
  }
  if (warp == 0 && lane < 2) prefetch_map(lane == 0 ? &maps.codes : &maps.scales);
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  const int entries = *p.tile_count;
  const int4 guess = p.tiles[min(lane, p.max_tiles - 1)];  // with the count, not after it
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
    RunStream<FORMAT, ROW_TILES, WARPS, DEPTH, ALIGNMENT> stream(p, cursor, segment, shared_address(memory), warp, lane);
    RunPlace<DEPTH> place;
    using FewX = Activations<scale_mode<FORMAT, kFew>(), false>;
    using ManyX = Activations<scale_mode<FORMAT, kMany>(), false>;
    const FewX few(p, kFew, lane, warp);
    const ManyX many(p, kMany, lane, warp);
    const auto is_few = [](const Segment& s) { return s.tokens <= kFew; };
    const auto send_for_x = [&](const Segment& s, uint8_t* to) {
      const Unit unit = {s.expert, 0, s.first_slot, s.tokens, x_row(p, make_int4(0, 0, 0, s.first_number))};
      if (is_few(s)) {
        few.template copy<true>(p, unit, shared_address(to), kFew, 0, p.stages_each);
      } else {
        many.template copy<true>(p, unit, shared_address(to), kMany, 0, p.stages_each);
      }
    };
    const auto find_largest = [&](const Segment& s, const uint8_t* x, uint32_t* largest) {
      if (is_few(s)) {
        few.find_largest(x, largest, kFew, p.stages_each, lane);
      } else {
        many.find_largest(x, largest, kMany, p.stages_each, lane);
      }
    };
    const auto join = [&](const Segment& s) {
      if (is_few(s)) {
        join_pieces<kFew, ROW_TILES, WARPS>(p, s, pieces, warp, lane);
      } else {
        join_pieces<kMany, ROW_TILES, WARPS>(p, s, pieces, warp, lane);
      }
    };
    uint8_t* x = memory + p.x_offset;
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; ++i) {
      stream.fetch(p, maps);
      if (i == 0) {
        send_for_x(segment, x);
        copy_commit();
      }
    }
    copy_wait<ScaleBox<FORMAT, ROW_TILES, ALIGNMENT>::kMapped ? 0 : DEPTH - 2>();  // x; of the stages, all but the last
    find_largest(segment, x, both_largest);
    Segment before = {};
    for (int turn = 0;; turn ^= 1) {
      uint32_t* const largest = both_largest + turn * kStreamTokens;
      __syncthreads();  // the largest are whole; the last segment's pieces too, and its x has been read
      if (before.tiles > 0) join(before);
      if (warp == 0 && lane < kStreamTokens) both_largest[(turn ^ 1) * kStreamTokens + lane] = 0;
      if (is_few(segment)) {
        few.convert(x, largest, kFew, p.stages_each);
      } else {
        many.convert(x, largest, kMany, p.stages_each);
      }
      __syncthreads();  // x is whole, the pieces have been read
      const bool more = cursor.valid();
      Segment next = segment;
      if (more) next = cursor.next(p);
      const bool both_few = is_few(segment) && is_few(next);  // then there is room for both
      uint8_t* const x_next = both_few && x == memory + p.x_offset ? x + p.x_bytes : memory + p.x_offset;
      if (more && both_few) {
        send_for_x(next, x_next);
        copy_commit();
      }
      if (is_few(segment)) {
        run_stages<FORMAT, kFew, ROW_TILES, WARPS, DEPTH, ALIGNMENT>(p, maps, segment, stream, memory, pieces, x, largest, warp, lane,
                                                          place);
      } else {
        run_stages<FORMAT, kMany, ROW_TILES, WARPS, DEPTH, ALIGNMENT>(p, maps, segment, stream, memory, pieces, x, largest, warp, lane,
                                                           place);
      }
      before = segment;
      if (!more) break;
      if (!both_few) {
        __syncthreads();  // nobody reads x any more
        send_for_x(next, x_next);
        copy_commit();
      }
      copy_wait<0>();
      find_largest(next, x_next, both_largest + (turn ^ 1) * kStreamTokens);
      segment = next;
      x = x_next;
    }
    __syncthreads();
    join(before);
  }
  poison_unrouted(p);
#endif
}

}  // namespace requant
