// The wgmma kernel's warps that fetch: codes and block scales into one ring, x into another.
#pragma once
#include "ptx.cuh"
#include "w4a16_wgmma_types.cuh"

namespace requant {

// The warp that fetches the codes and block scales of one warpgroup. COPY: bytes per copy of block scales.
template <Format FORMAT, int COPY>
__device__ __forceinline__ void fetch_weights(const WgmmaParams& p, uint32_t shared, const WgBarriers& barriers, int group,
                                              int row, int first_stage, int stages, int lane) {
  constexpr int kRow = WgScales<FORMAT>::kRow, kWidth = COPY < kRow ? COPY : kRow;
  constexpr int kPerRow = kRow / kWidth, kRowsAtOnce = 32 / kPerRow, kCopies = kWgRows / kRowsAtOnce;
  const int pitch = p.k / FormatTraits<FORMAT>::kGroup, lane_row = row + lane / kPerRow;
  int column = first_stage * kRow + lane % kPerRow * kWidth;
  const uint8_t* from = p.block_scales + static_cast<size_t>(lane_row) * pitch + column;
  const uint32_t codes = shared + p.codes_offset + group * p.depth * kWgTileBytes;
  const uint32_t scales = shared + p.scales_offset + group * p.depth * WgScales<FORMAT>::kTile + lane * kWidth;
  RingPlace at;
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    const uint32_t full = barriers.weights(0, group, at.slot);
    barrier_wait(barriers.weights(1, group, at.slot), at.parity ^ 1);
    if (lane == 0) {
      barrier_expect(full, kWgTileBytes);
      copy_box(codes + at.slot * kWgTileBytes, &p.codes_map, full, (first_stage + i) * kLine, row);
    }
    __syncwarp();
    const uint32_t to = scales + at.slot * WgScales<FORMAT>::kTile;
    const int rows_left = column < pitch ? p.rows - lane_row : 0;
#pragma unroll
    for (int r = 0; r < kCopies; ++r) {  // nothing is read where there is no such row or k
      copy_async<kWidth>(to + r * 32 * kWidth, from + r * kRowsAtOnce * pitch, r * kRowsAtOnce < rows_left ? kWidth : 0);
    }
    barrier_arrive_after_copies(full);
    from += kRow;
    column += kRow;
    at.next(p.depth);
  }
}

// 128 k of x, two blocks of 64 k at `at`, into the order of the MMAs: see the head of w4a16_wgmma.cuh. Token n and token n ^ 5
// share a quarter of a warp: neither their reads nor their writes meet in a bank.
template <int TOKENS>
__device__ __forceinline__ void sort_x(uint32_t at, int x_warp, int lane) {
  constexpr int kBox = TOKENS * kBlockK * 2;
  const int w = lane & 3, in_eight = lane >> 3 ^ (lane & 4 ? 5 : 0);
  at += in_eight * kLine;
  const uint32_t near = at + ((w ^ in_eight) << 4), far = at + ((4 + w ^ in_eight) << 4);
  const uint32_t even = at + ((2 * w ^ in_eight) << 4), odd = at + ((2 * w + 1 ^ in_eight) << 4);
#pragma unroll 2
  for (int n = x_warp * 8 * kLine; n < TOKENS * kLine; n += kXWarps<TOKENS> * 8 * kLine) {
    const uint4 p0 = load_piece(near + n), p1 = load_piece(far + n);
    const uint4 p2 = load_piece(near + n + kBox), p3 = load_piece(far + n + kBox);
    __syncwarp();
    store_piece(even + n, make_uint4(p0.x, p1.x, p2.x, p3.x));
    store_piece(odd + n, make_uint4(p0.y, p1.y, p2.y, p3.y));
    store_piece(even + n + kBox, make_uint4(p0.z, p1.z, p2.z, p3.z));
    store_piece(odd + n + kBox, make_uint4(p0.w, p1.w, p2.w, p3.w));
  }
}

// A warp that fetches the x of one k group, in boxes of kXBlocks swizzled rows of 64 k for every token, and sorts it. Of
// several, x_warp 0 fetches, and they share the tokens.
template <int TOKENS>
__device__ __forceinline__ void fetch_x(const WgmmaParams& p, uint32_t shared, const WgBarriers& barriers, int k_group,
                                        int x_warp, int first_stage, int stages, int lane) {
  constexpr int kBox = TOKENS * kBlockK * 2, kStage = kXBlocks<TOKENS> * kBox;
  const int count = stages * (kStageBlocks / kXBlocks<TOKENS>);
  const uint32_t to = shared + k_group * p.x_depth * kStage;
  RingPlace filled, at;
  int block = first_stage * kStageBlocks, left = count;
  const auto fill = [&] {
    if (left > 0 && x_warp == 0 && lane == 0) {
      const uint32_t full = barriers.x(0, k_group, filled.slot);
      barrier_wait(barriers.x(1, k_group, filled.slot), filled.parity ^ 1);
      barrier_expect(full, kStage);
      copy_box(to + filled.slot * kStage, &p.x_map, full, 0, 0, block);
    }
    --left;
    block += kXBlocks<TOKENS>;
    filled.next(p.x_depth);
    __syncwarp();
  };
  const int ahead = kSorted<TOKENS> ? p.x_depth - 1 : count;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) fill();
  if constexpr (kSorted<TOKENS>) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      barrier_wait(barriers.x(0, k_group, at.slot), at.parity);
#pragma unroll 1
      for (int b = 0; b < kXBlocks<TOKENS>; b += 2) sort_x<TOKENS>(to + at.slot * kStage + b * kBox, x_warp, lane);
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.x(2, k_group, at.slot));
      at.next(p.x_depth);
      fill();  // the slot that the consumers leave next
    }
  }
}

}  // namespace requant
