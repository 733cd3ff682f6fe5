// Weights on their way from memory: one ring of stages per warp, filled by cp.async and never drained between units.
#pragma once
#include "w4a16_types.cuh"

namespace requant {

template <Format FORMAT, int ROW_TILES, int DEPTH, Alignment ALIGNMENT>
struct Ring {
  static constexpr int kRows = kTileRows * ROW_TILES;
  static constexpr int kScalePitch =
      FormatTraits<FORMAT>::kStageScales + (ALIGNMENT == Alignment::kGeneral ? 4 : 0);
  static constexpr int kCodes = kRows * kLine * kStageLines;  // [line][row][128]
  static constexpr int kSlotBytes = (kCodes + kRows * kScalePitch + 127) / 128 * 128;  // the swizzle counts on 128
  static constexpr int kBytes = DEPTH * kSlotBytes;
};

// One piece of work: a group of rows of one weight, and the tokens that go through it.
struct Unit {
  int expert, row_group;
  int first_slot, tokens;  // grouped: positions in the slot list
  int first_row;           // of x: the first token's
};

// The row of x that the first slot of a routing entry reads: without the slot list, which would be one more wait.
__device__ __forceinline__ int x_row(const Params& p, const int4& entry) {
  return p.slots_per_x == 1 ? entry.w : quotient(entry.w, p.slots_per_x);
}

// Walks the units of one block: every `stride`-th of tiles x row groups.
template <bool GROUPED>
struct UnitCursor {
  int tile, row_group, tiles, stride_tiles, stride_groups;

  __device__ __forceinline__ explicit UnitCursor(const Params& p) {
    const int index = blockIdx.y, stride = gridDim.y;
    if (GROUPED) {
      tiles = *p.tile_count;
      tile = index / p.row_groups;
      row_group = index - tile * p.row_groups;
      stride_tiles = stride / p.row_groups;
      stride_groups = stride - stride_tiles * p.row_groups;
    } else {
      tiles = 1;
      tile = 0;
      row_group = index;
      stride_tiles = 0;
      stride_groups = stride;
    }
  }
  __device__ __forceinline__ bool valid(const Params& p) const {
    return GROUPED ? tile < tiles : row_group < p.row_groups;
  }
  __device__ __forceinline__ void advance(const Params& p) {
    row_group += stride_groups;
    if (GROUPED) {
      tile += stride_tiles;
      if (row_group >= p.row_groups) {
        row_group -= p.row_groups;
        ++tile;
      }
    }
  }
  __device__ __forceinline__ Unit unit(const Params& p) const {
    if (!GROUPED) return {0, row_group, 0, p.tokens, 0};
    const int4 entry = p.tiles[tile];
    return {entry.x, row_group, entry.y, entry.z, x_row(p, entry)};
  }
};

// This warp's share of K: stages first, first + column_warps, ...
struct Share {
  int first, mine, most;  // `most`: the longest share in the block
};

__device__ __forceinline__ Share share_of_k(const Params& p, int column) {
  const int rank = p.cluster > 1 ? blockIdx.x : 0, extra = rank < p.stages_left ? 1 : 0;
  const int left = p.columns_left + extra;
  return {rank * p.stages_each + min(rank, p.stages_left) + column, p.columns_each + (column < left ? 1 : 0),
          p.columns_each + (left > 0 ? 1 : 0)};
}

// A warp's endless supply of stages: unit after unit, in ring order.
template <Format FORMAT, int ROW_TILES, int DEPTH, Alignment ALIGNMENT, bool GROUPED>
class WeightStream {
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;
  using Traits = FormatTraits<FORMAT>;
  static constexpr int kAligned = ALIGNMENT == Alignment::kScale16 ? 16 : ALIGNMENT == Alignment::kScale8 ? 8 : 4;
  static constexpr int kScaleVector =  // bytes per copy of scales
      kAligned < Traits::kStageScales ? kAligned : Traits::kStageScales;
  static constexpr int kScaleCopies = Traits::kStageScales / kScaleVector;         // per row
  static constexpr int kScaleRows = 32 / kScaleCopies;                             // rows per warp-wide copy

 public:
  __device__ WeightStream(const Params& p, const UnitCursor<GROUPED>& cursor, uint32_t ring, const Share& share,
                          int row_warp, int lane)
      : cursor_(cursor), ring_(ring), fill_(ring), mine_(share.mine), first_(share.first), row_warp_(row_warp),
        lane_(lane), more_(share.mine > 0 && cursor.valid(p)) {
    if (more_) open(p);
  }

  // Start the copy of the next stage (nothing if the work is at its end) and close its commit group.
  __device__ __forceinline__ void fetch(const Params& p) {
    if (more_) {
      copy_codes(p);
      copy_scales(p);
      codes_ += p.column_warps * kLine * kStageLines;
      scales_ += p.column_warps * Traits::kStageScales;
      k_left_ -= p.column_warps * kStageK;
      if (--left_ == 0) {
        cursor_.advance(p);
        more_ = cursor_.valid(p);
        if (more_) open(p);
      }
    }
    copy_commit();
    fill_ = fill_ + Layout::kSlotBytes == ring_ + Layout::kBytes ? ring_ : fill_ + Layout::kSlotBytes;
  }

 private:
  __device__ __forceinline__ void open(const Params& p) {
    const Unit unit = cursor_.unit(p);
    const int row = (unit.row_group * p.row_warps + row_warp_) * Layout::kRows;
    rows_left_ = p.rows - row;
    left_ = mine_;
    k_left_ = p.k - first_ * kStageK;
    const size_t base = static_cast<size_t>(unit.expert) * p.rows + row;
    const int code_pitch = p.k / 2, scale_pitch = p.k / Traits::kGroup;
    codes_ = p.codes + base * code_pitch + (lane_ >> 3) * code_pitch + first_ * (kLine * kStageLines) + (lane_ & 7) * 16;
    scales_ = p.block_scales + base * scale_pitch + first_ * Traits::kStageScales;
    if (ALIGNMENT != Alignment::kGeneral) {
      scales_ += (lane_ / kScaleCopies) * scale_pitch + lane_ % kScaleCopies * kScaleVector;
    }
  }

  // All rows and all k of the stage exist; uniform in the warp.
  __device__ __forceinline__ bool whole() const { return rows_left_ >= Layout::kRows && k_left_ >= kStageK; }

  // 8 lanes take a row's line, 4 rows at a time.
  __device__ __forceinline__ void copy_codes(const Params& p) {
    const int chunk = lane_ & 7, row = lane_ >> 3, pitch = p.k / 2;
    const uint32_t to = fill_ + row * kLine;
    if (ALIGNMENT == Alignment::kGeneral && pitch % 16 != 0) {
#pragma unroll 1
      for (int i = 0; i < Layout::kRows * kStageLines; i += 4) {
        const int line = i / Layout::kRows, r = i % Layout::kRows;
        const int left = k_left_ / 2 - line * kLine - chunk * 16;  // bytes of the row from this chunk on
        const uint32_t at = to + i * kLine + ((chunk ^ ((row + r) & 7)) << 4);
        const uint8_t* from = codes_ + r * pitch + line * kLine;
        const bool inside = row + r < rows_left_;
        copy_async<8>(at, inside && left > 0 ? from : p.codes, inside && left > 0 ? 8 : 0);
        copy_async<8>(at + 8, inside && left > 8 ? from + 8 : p.codes, inside && left > 8 ? 8 : 0);
      }
      return;
    }
    const uint32_t even = to + ((chunk ^ row) << 4), odd = even ^ 64;  // rows r and r + 4 differ in bit 2 of the swizzle
    if (whole()) {
      const uint8_t* from = codes_;
#pragma unroll
      for (int r = 0; r < Layout::kRows; r += 4) {
#pragma unroll
        for (int line = 0; line < kStageLines; ++line) {
          copy_async<16>((r & 4 ? odd : even) + (line * Layout::kRows + r) * kLine, from + line * kLine);
        }
        from += 4 * pitch;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < Layout::kRows * kStageLines; i += 4) {
        const int line = i / Layout::kRows, r = i % Layout::kRows;
        const bool inside = row + r < rows_left_ && k_left_ > line * kLineK + chunk * 32;
        copy_async<16>((r & 4 ? odd : even) + i * kLine, inside ? codes_ + r * pitch + line * kLine : p.codes,
                       inside ? 16 : 0);
      }
    }
  }

  __device__ __forceinline__ void copy_scales(const Params& p) {
    const int pitch = p.k / Traits::kGroup;
    const uint32_t to = fill_ + Layout::kCodes;
    if constexpr (ALIGNMENT == Alignment::kGeneral) {
      // Whole words around the wanted bytes; the reader shifts them into place. Never past the tensor's end.
      constexpr int kWords = Layout::kScalePitch / 4;
#pragma unroll 1
      for (int i = lane_; i < Layout::kRows * kWords; i += 32) {
        const int row = i / kWords, word = i - row * kWords;
        const uintptr_t start = reinterpret_cast<uintptr_t>(scales_) + static_cast<uint32_t>(row * pitch);
        const uint8_t* from = reinterpret_cast<const uint8_t*>(start & ~uintptr_t{3}) + word * 4;
        const bool inside = row < rows_left_ && from < p.scales_end;
        copy_async<4>(to + i * 4, inside ? from : p.block_scales,
                      inside ? min(static_cast<int>(p.scales_end - from), 4) : 0);
      }
    } else {
      const int row = lane_ / kScaleCopies, at = lane_ % kScaleCopies * kScaleVector;
      const uint32_t target = to + row * Layout::kScalePitch + at;
#pragma unroll
      for (int r = 0; r < Layout::kRows; r += kScaleRows) {
        if (kScaleRows > Layout::kRows && row >= Layout::kRows) break;
        const uint8_t* from = scales_ + r * pitch;
        if (whole()) {
          copy_async<kScaleVector>(target + r * Layout::kScalePitch, from);
        } else {
          const bool inside = row + r < rows_left_ && k_left_ > at * Traits::kGroup;
          copy_async<kScaleVector>(target + r * Layout::kScalePitch, inside ? from : p.block_scales,
                                   inside ? kScaleVector : 0);
        }
      }
    }
  }

  UnitCursor<GROUPED> cursor_;
  const uint32_t ring_;
  uint32_t fill_;  // slot that the next copy fills
  const int mine_, first_, row_warp_, lane_;
  bool more_;
  int left_ = 0, rows_left_ = 0, k_left_ = 0;  // stages of this unit; rows and k from the next stage on
  const uint8_t* codes_ = nullptr;   // this lane's next piece
  const uint8_t* scales_ = nullptr;
};

}  // namespace requant
