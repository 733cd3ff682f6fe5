// How the stream of w4a16_stream.cuh divides its work, and how its weights reach shared memory.
//
// Weights come by the bulk copy engine: one lane starts the copy of a stage, a box of 16 or 32 rows x 128 bytes that lands
// in the order of w4a16_ring.cuh, and a barrier in shared memory counts its bytes. Block scales are fetched for four stages
// at a time, since a request costs the L2 the same for 16 bytes as for 64.
#pragma once
#include "hopper.cuh"
#include "w4a16_ring.cuh"

namespace requant {

struct TensorMaps {
  CUtensorMap codes, scales;  // two-dimensional: bytes of a row, all rows of all experts
};

constexpr int kScaleStages = 4;   // stages whose block scales are fetched together

// Rows of block scales in shared memory. kScale16: a box of the copy engine, whose swizzle puts 16-byte chunk c of row r at
// c ^ (r / 2 & 3) (NVFP4; MXFP4's 32 bytes stay as they are). Else: whole 16-byte pieces around the wanted bytes, copied
// by cp.async, because a tensor map's rows must be multiples of 16 bytes.
template <Format FORMAT, int ROW_TILES, Alignment ALIGNMENT>
struct ScaleBox {
  static constexpr bool kMapped = ALIGNMENT == Alignment::kScale16;
  static constexpr int kWanted = kScaleStages * FormatTraits<FORMAT>::kStageScales;  // bytes per row
  static constexpr int kPitch = kMapped ? kWanted : kWanted + 16;
  static constexpr int kRows = kTileRows * ROW_TILES;
  static constexpr int kBytes = kRows * kPitch;
  static constexpr bool kSwizzled = kMapped && kPitch == 64;
  static constexpr int kPieces = kPitch / 16;                          // per row
  static constexpr int kCopies = (kRows * kPieces + 31) / 32;          // of a lane
};

// A run of one entry's tiles.
struct Segment {
  int expert, first_slot, tokens, first_number;  // first_number: the first slot's
  int tile, tiles;                               // first, how many
};

// Walks the segments of one block.
struct SegmentCursor {
  int entry, tile, left;  // next entry, its next tile, tiles of this block still to come

  __device__ __forceinline__ SegmentCursor(const Params& p, int entries) {
    const int total = entries * p.row_groups;
    const int blocks = gridDim.y, block = blockIdx.y;
    const int each = quotient(total, blocks), more = total - each * blocks;
    // Where blocks of one entry each would have no more than a tile more to do, that is better than a second segment.
    const int blocks_each = entries > 0 ? quotient(blocks, entries) : 0;
    entry = left = 0;
    if (blocks_each > 0) {
      const int tiles_each = quotient(p.row_groups, blocks_each), tiles_more = p.row_groups - tiles_each * blocks_each;
      if (tiles_each + (tiles_more > 0) <= each + (more > 0) + 1) {
        entry = quotient(block, blocks_each);
        const int place = block - entry * blocks_each;
        tile = tiles_each * place + min(place, tiles_more);
        left = entry < entries ? tiles_each + (place < tiles_more) : 0;
        return;
      }
    }
    const int begin = each * block + min(block, more);
    left = each + (block < more);
    entry = quotient(begin, p.row_groups);
    tile = begin - entry * p.row_groups;
  }
  __device__ __forceinline__ bool valid() const { return left > 0; }
  // early: it may be before the kernel before has ended.
  __device__ __forceinline__ Segment next(const Params& p, bool early = false) {
    return next(p, load_fresh(early && p.settled, p.tiles + entry));
  }
  __device__ __forceinline__ Segment next(const Params& p, const int4& of) {
    const Segment s = {of.x, of.y, of.z, of.w, tile, min(left, p.row_groups - tile)};
    left -= s.tiles;
    tile = 0;
    ++entry;
    return s;
  }
};

// Warp `warp` takes stages run_begin(.., warp) up to run_begin(.., warp + 1) of a segment.
template <int WARPS>
__device__ __forceinline__ int run_begin(const Params& p, const Segment& s, int warp) {
  return static_cast<int>(static_cast<uint32_t>(s.tiles * p.stages_each * warp) / static_cast<uint32_t>(WARPS));
}

// A warp's place in its rings: DEPTH stages of codes, and as many boxes of scales (a box holds one stage or more).
template <int DEPTH>
struct RunPlace {
  int slot = 0, box = DEPTH - 1;
  uint32_t parity = 0;

  __device__ __forceinline__ void next_box() { box = box + 1 == DEPTH ? 0 : box + 1; }
  __device__ __forceinline__ void next_slot() {
    if (++slot == DEPTH) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// A warp's supply of stages, run after run.
template <Format FORMAT, int ROW_TILES, int WARPS, int DEPTH, Alignment ALIGNMENT>
class RunStream {
  using Traits = FormatTraits<FORMAT>;
  using Box = ScaleBox<FORMAT, ROW_TILES, ALIGNMENT>;
  static constexpr int kRows = kTileRows * ROW_TILES, kCodes = kRows * kLine;

 public:
  __device__ __forceinline__ RunStream(const Params& p, const SegmentCursor& cursor, const Segment& first,
                                       uint32_t shared, int warp, int lane)
      : cursor_(cursor), codes_ring_(shared + warp * DEPTH * kCodes),
        scales_ring_(shared + p.stream_scales_offset + warp * DEPTH * Box::kBytes),
        barriers_(shared + p.barriers_offset + warp * DEPTH * 8), warp_(warp), lane_(lane) {
    open(p, first);
    open_next(p);
  }

  // Start the copies of the next stage; nothing if the work is at its end.
  __device__ __forceinline__ void fetch(const Params& p, const TensorMaps& maps) {
    if (left_ > 0) {
      const bool new_box = first_ || stage_ % kScaleStages == 0;
      if (new_box) at_.next_box();
      if (elect_one()) {
        const uint32_t barrier = barriers_ + at_.slot * 8;
        const bool box = Box::kMapped && new_box;
        barrier_expect(barrier, kCodes + (box ? Box::kBytes : 0));
        copy_box(codes_ring_ + at_.slot * kCodes, &maps.codes, barrier, stage_ * kLine, row_);
        if (box) {
          copy_box(scales_ring_ + at_.box * Box::kBytes, &maps.scales, barrier, stage_ / kScaleStages * Box::kWanted, row_);
        }
      }
      if (!Box::kMapped && new_box) copy_scales(p);
      first_ = false;
      at_.next_slot();
      ++stage_;
      if (--left_ == 0) {
        open_next(p);
      } else if (stage_ == p.stages_each) {
        stage_ = 0;
        row_ += kRows;
      }
    }
    if (!Box::kMapped) copy_commit();
  }

 private:
  // On to the next run that has stages.
  __device__ __forceinline__ void open_next(const Params& p) {
#pragma unroll 1
    while (left_ == 0 && cursor_.valid()) open(p, cursor_.next(p));
  }

  __device__ __forceinline__ void open(const Params& p, const Segment& s) {
    const int begin = run_begin<WARPS>(p, s, warp_);
    left_ = run_begin<WARPS>(p, s, warp_ + 1) - begin;
    const int tile = quotient(begin, p.stages_each);
    stage_ = begin - tile * p.stages_each;
    row_ = s.expert * p.rows + (s.tile + tile) * kRows;
    first_ = true;
  }

  // Whole pieces around the wanted bytes of each row, never past the tensor's end. A tile's first row starts a piece.
  __device__ __forceinline__ void copy_scales(const Params& p) {
    const int pitch = p.k / Traits::kGroup;
    const uint8_t* const from = p.block_scales + static_cast<size_t>(row_) * pitch + stage_ / kScaleStages * Box::kWanted;
    const uint32_t to = scales_ring_ + at_.box * Box::kBytes + lane_ * 16;
    const bool last = row_ + kRows >= p.all_rows;
#pragma unroll
    for (int i = 0; i < Box::kCopies; ++i) {
      const int piece = lane_ + i * 32;
      if (kRows * Box::kPieces % 32 != 0 && piece >= kRows * Box::kPieces) break;
      const uint8_t* const source = from + (piece / Box::kPieces * pitch & ~15) + piece % Box::kPieces * 16;
      if (!last) {
        copy_async<16>(to + i * 512, source);
      } else {
        const int64_t left = p.scales_end - source;
        copy_async<16>(to + i * 512, left > 0 ? source : p.block_scales, left < 16 ? max(static_cast<int>(left), 0) : 16);
      }
    }
  }

  SegmentCursor cursor_;
  const uint32_t codes_ring_, scales_ring_, barriers_;
  const int warp_, lane_;
  RunPlace<DEPTH> at_;
  int left_ = 0;              // stages of this run still to fetch
  int stage_ = 0, row_ = 0;   // of the next stage: its k, its first row among all experts' rows
  bool first_ = true;         // of its run
};

}  // namespace requant
