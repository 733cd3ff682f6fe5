// How dense layers with few tokens (w4a16_dense.cuh) get their weights: a ring of stages per warp, filled by the copy engine
// where there is one (SM90 on), else by w4a16_ring.cuh. Both leave chunk c of row r's line at c ^ (r & 7).
//
// Why the copy engine: five 16-byte copies per lane and stage take the load/store unit about 450 cycles for eight warps, four
// times that before the first stage of a launch can be used, and x queues among them. A box of 16 rows x 128 bytes is one
// instruction of one lane.
#pragma once
#include "hopper.cuh"
#include "w4a16_ring.cuh"

namespace requant {

template <Format FORMAT, int ROW_TILES, int DEPTH, Alignment ALIGNMENT>
class CopiedWeights {
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;

 public:
  __device__ __forceinline__ CopiedWeights(const Params& p, const CUtensorMap*, const UnitCursor<false>& cursor, uint8_t* shared,
                                           const Share& share, int warp, int row_warp, int lane)
      : stream_(p, cursor, shared_address(shared) + warp * Layout::kBytes, share, row_warp, lane),
        ring_(shared + warp * Layout::kBytes), drain_(ring_) {}

  __device__ __forceinline__ void fill(const Params& p) {
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; ++i) stream_.fetch(p);
  }

  // The next stage has landed for all lanes; until `release`, it lies at codes() and scales().
  __device__ __forceinline__ void acquire(const Params& p) {
    copy_wait<DEPTH - 2>();
    __syncwarp();
    stream_.fetch(p);
  }
  __device__ __forceinline__ const uint8_t* codes() const { return drain_; }
  __device__ __forceinline__ const uint8_t* scales() const { return drain_ + Layout::kCodes; }
  __device__ __forceinline__ void release(const Params&) {
    drain_ = drain_ + Layout::kSlotBytes == ring_ + Layout::kBytes ? ring_ : drain_ + Layout::kSlotBytes;
  }

 private:
  WeightStream<FORMAT, ROW_TILES, DEPTH, ALIGNMENT, false> stream_;
  uint8_t* const ring_;
  uint8_t* drain_;
};

// Shared memory: codes [warp][stage][row][128], then block scales [warp][stage][row], then a barrier per stage. Block scales
// come by cp.async: their rows are too short for boxes.
template <Format FORMAT, int ROW_TILES, int DEPTH, Alignment ALIGNMENT>
class BoxedWeights {
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;
  using Traits = FormatTraits<FORMAT>;
  static constexpr int kAligned = ALIGNMENT == Alignment::kScale16 ? 16 : ALIGNMENT == Alignment::kScale8 ? 8 : 4;
  static constexpr int kVector = kAligned < Traits::kStageScales ? kAligned : Traits::kStageScales;  // bytes per copy
  static constexpr int kCopies = Traits::kStageScales / kVector;                                     // per row
  static constexpr int kRowsAtOnce = 32 / kCopies;
  static constexpr int kScales = Layout::kRows * Traits::kStageScales;

 public:
  __device__ __forceinline__ BoxedWeights(const Params& p, const CUtensorMap* map, const UnitCursor<false>& cursor,
                                          uint8_t* shared, const Share& share, int warp, int row_warp, int lane)
      : cursor_(cursor), map_(map), share_(share), row_warp_(row_warp) {
    const int warps = p.column_warps * p.row_warps;
    const uint32_t base = shared_address(shared);
    scale_row_ = lane / kCopies;
    scale_at_ = lane % kCopies * kVector;
    // Kept in registers: what follows the wait for the previous kernel should find them ready.
    codes_ = opaque(base + warp * DEPTH * Layout::kCodes);
    scales_ = opaque(base + warps * DEPTH * Layout::kCodes + warp * DEPTH * kScales);
    barriers_ = opaque(base + p.barriers_offset + warp * DEPTH * 8);
    fill_scales_ = opaque(scales_ + scale_row_ * Traits::kStageScales + scale_at_);
    scale_pitch_ = opaque(p.k / Traits::kGroup);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) barrier_init(barriers_ + 8 * i, 1);
      barrier_init_fence();
    }
    __syncwarp();
    left_ = 0;
    if (share.mine > 0 && cursor_.valid(p)) open(p);
  }

  __device__ __forceinline__ void fill(const Params& p) {
#pragma unroll 1
    for (int i = 0; i < DEPTH; ++i) fetch(p, i);
  }

  // Where the whole share is in the ring: stage `slot` of it, once it has landed.
  __device__ __forceinline__ void land(int slot) {
    if (slot == 0) copy_wait<0>();
    barrier_wait(barriers_ + 8 * slot, 0);
    __syncwarp();
  }
  __device__ __forceinline__ const uint8_t* codes(int slot) const { return at(codes_ + slot * Layout::kCodes); }
  __device__ __forceinline__ const uint8_t* scales(int slot) const { return at(scales_ + slot * kScales); }

  __device__ __forceinline__ void acquire(const Params&) {
    barrier_wait(barriers_ + 8 * slot_, parity_);
    copy_wait<DEPTH - 1>();
    __syncwarp();  // all lanes' copies of block scales
  }
  __device__ __forceinline__ const uint8_t* codes() const { return at(codes_ + slot_ * Layout::kCodes); }
  __device__ __forceinline__ const uint8_t* scales() const { return at(scales_ + slot_ * kScales); }
  __device__ __forceinline__ void release(const Params& p) {
    __syncwarp();  // all lanes have read it
    fetch(p, slot_);
    if (++slot_ == DEPTH) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void fetch(const Params& p, int slot) {
    if (left_ > 0) {
      if (elect_one()) {
        barrier_expect(barriers_ + 8 * slot, Layout::kCodes);
        copy_box(codes_ + slot * Layout::kCodes, map_, barriers_ + 8 * slot, stage_ * kLine, row_);
      }
      const int at = stage_ * Traits::kStageScales;
      const bool k_inside = at + scale_at_ < scale_pitch_;
#pragma unroll
      for (int r = 0; r < Layout::kRows; r += kRowsAtOnce) {
        if (kRowsAtOnce > Layout::kRows && scale_row_ >= Layout::kRows) break;
        // What lies outside arrives as zeros, from anywhere.
        copy_async<kVector>(fill_scales_ + slot * kScales + r * Traits::kStageScales, from_ + (at + r * scale_pitch_),
                            k_inside && row_ + scale_row_ + r < p.rows ? kVector : 0);
      }
      stage_ += p.column_warps;
      if (--left_ == 0) {
        cursor_.advance(p);
        if (cursor_.valid(p)) open(p);
      }
    }
    copy_commit();
  }

  __device__ __forceinline__ void open(const Params& p) {
    row_ = (cursor_.row_group * p.row_warps + row_warp_) * Layout::kRows;
    left_ = share_.mine;
    stage_ = share_.first;
    from_ = opaque(p.block_scales + static_cast<size_t>(row_ + scale_row_) * scale_pitch_ + scale_at_);
  }

  static __device__ __forceinline__ const uint8_t* at(uint32_t address) {
    return static_cast<const uint8_t*>(__cvta_shared_to_generic(address));
  }

  UnitCursor<false> cursor_;
  const CUtensorMap* const map_;
  const Share share_;
  const int row_warp_;
  int scale_row_, scale_at_, scale_pitch_;           // this lane's place in the copies of block scales; bytes per row
  uint32_t codes_, scales_, barriers_, fill_scales_;  // in shared memory; the last: where this lane puts its block scales
  int slot_ = 0, left_, row_ = 0, stage_ = 0;  // stages of this unit that have not been sent for, the next one
  uint32_t parity_ = 0;
  const uint8_t* from_ = nullptr;  // this lane's block scales at k = 0
};

}  // namespace requant
