// W4A16: y[M,N] = global_scale * x[M,K] @ dequant(codes, block_scales)^T for few tokens (M <= 64), dense and grouped.
//
// What it replaces: kernels that repack the checkpoint first. Here the checkpoint's own row-major bytes are read,
// codes [N, K/2] (low nibble = even k) and block scales [N, K/group], so what is timed and validated is what is stored.
//
// Shape of the computation. With few tokens the weights are nearly all the bytes, so the kernel is a pipe from memory to
// the tensor cores:
//   * Weights sit in the M slot of mma.m16n8k16 and tokens in its n = 8 slot: a 16-row tile costs one MMA per 16 k.
//   * A *stage* is 16 rows x 256 k: one full 128-byte line of codes per row, and its block scales. Every warp runs its own
//     ring of stages, filled by cp.async, with no block-wide barrier: one __syncwarp per stage.
//   * A block has column_warps x row_warps warps. The column warps deal the k stages among themselves round robin, the row
//     warps take 16 rows each; a cluster of blocks may split K once more. All sums meet in a fixed order (warp 0, 1, ...,
//     block 0, 1, ...), so two runs give the same bits.
//   * Blocks are persistent: they walk a list of units (rows of one expert, or of the only weight), and a warp's ring runs
//     on into its next unit while the current one is being reduced.
//
// K is a free permutation inside a dot product. A lane's fragment is whatever k it likes as long as x agrees, so lane
// p = lane % 4 takes k = 64p .. 64p+63 of a line (16-byte reads, its block scales are neighbours), and x is stored to
// match. Inside a 128-byte line the 16-byte chunk c of row r lies at c ^ (r & 7): no read has a bank conflict.
//
// x is BF16 with a wide range, and the MMA is F16: per (column warp, chunk of K, token) x is scaled by a power of two that
// puts its largest element in [2^14, 2^15). Elements down to 2^-28 of the largest keep all their bits; smaller ones lose
// at most 2^-39 of it. Sums are FP32. Infinities and NaNs pass through.
//
// Four ways for block scales to meet the codes, chosen at compile time:
//   * kGroupColumns, M <= 2: column 2p + t of B holds token t in the rows of lane p only, zero elsewhere, so after the
//     MMAs of one group of k, lane p's own accumulators are the dot products of its own group; one FFMA scales them.
//   * kScaleFirst, NVFP4: the decoded halves are multiplied by the scale before the MMA. Exact: a product has at most 6
//     significant bits and is a multiple of 2^-24.
//   * kBf16, NVFP4, M >= 32: kScaleFirst in BF16. Decoding takes 6 more instructions per 8 codes, which the MMAs of so many
//     tokens hide, and x is used as it is, with no scaling, no barrier for it and no limit to its range.
//   * kScaleAfter, MXFP4: E8M0 does not fit a half. A lane takes word p of each group of 32, so one MMA pair covers one
//     group of 32 k, and its result is scaled in FP32.
#pragma once
#include "fp4_decode.cuh"
#include "ptx.cuh"

namespace requant {

constexpr int kLine = 128;                       // bytes of codes in one full memory line
constexpr int kLineK = 2 * kLine;                // k that one line holds
constexpr int kStageLines = 1;                   // lines per row and stage (2 measured no faster, and K = 2880 wastes more)
constexpr int kStageK = kStageLines * kLineK;    // k per stage
constexpr int kTileRows = 16;                    // rows of an MMA tile
constexpr int kPiece = 16;                       // bytes of x (8 tokens' worth of k) that move together
constexpr int kLineXBytes = kLineK * 2;          // bytes of x per token and line
constexpr int kStageXBytes = kStageK * 2;        // bytes of x per token and stage
constexpr int kMaxWidth = 64;                    // tokens of the widest kernel
constexpr int kBf16Tokens = 32;                  // from this width on, BF16 operands
constexpr int kGroupedTileTokens = 16;           // tokens of one expert that share a pass over its weights
constexpr uint32_t kHalfTargetExponent = 127 + 14;  // biased exponent given to the largest x of a chunk

enum class Format { kNvfp4, kMxfp4 };
enum class ScaleMode { kGroupColumns, kScaleFirst, kScaleAfter, kBf16 };

// How rows of block scales are aligned in memory, i.e. what K allows.
enum class Alignment {
  kScale16,  // block scale rows are multiples of 16 bytes
  kScale8,   // ... of 8 bytes
  kScale4,   // ... of 4 bytes
  kGeneral,  // any K that is a multiple of 16: scale rows start at any byte, code rows at multiples of 8
};

struct Params {
  const uint8_t* codes;
  const uint8_t* block_scales;
  const __nv_bfloat16* x;
  void* y;
  const float* global_scales;  // per expert (grouped) or one (dense); null: 1
  float global_scale;          // multiplies the above
  int tokens, rows, k;         // M (dense), N, K
  int output_is_float;
  // grouped only
  const int* tile_count;       // how many entries `tiles` has, and how many slots have an expert
  int slot_count;              // all slots; those without an expert stand last in `slots`
  const int4* tiles;           // {expert, first position in `slots`, tokens, 0}
  const int* slots;            // slot numbers (rows of y), sorted by expert
  const int* x_rows;           // the row of x that each of them reads
  const float* slot_weights;   // multiplies the output of a slot; null: 1
  const uint8_t* scales_end;   // end of block_scales
  // How the work is divided; quotients are taken on the host, a division costs a block a tenth of a microsecond.
  int row_groups;                    // units per weight
  int column_warps, row_warps;
  int cluster, cluster_shift;        // blocks that split K, a power of two
  int stages_each, stages_left;      // K stages per block of a cluster, and how many blocks take one more
  int columns_each, columns_left;    // stages_each over the column warps, likewise
  int x_stages[3];                   // stages of x per column warp that fit; dense: [0]; grouped: for 2, 8, 16 tokens
  int x_offset, x_bytes;             // x in shared memory; grouped: two buffers of x_bytes
  int sums_offset, largest_offset;   // bytes from the start of shared memory
  int zeros_offset;                  // a kilobyte of zeros
  int constant_weights;              // they may be fetched before the previous kernel has finished
};

constexpr int kRoutingHeader = 4;  // ints: tiles, routed slots, 0, 0

template <Format FORMAT>
struct FormatTraits {
  static constexpr int kGroup = FORMAT == Format::kNvfp4 ? 16 : 32;
  static constexpr int kStageScales = kStageK / kGroup;  // bytes of block scales per row and stage
};

template <Format FORMAT, int TOKENS>
__host__ __device__ constexpr ScaleMode scale_mode() {
  if (TOKENS <= 2) return ScaleMode::kGroupColumns;
  if (FORMAT == Format::kMxfp4) return ScaleMode::kScaleAfter;
  return TOKENS >= kBf16Tokens ? ScaleMode::kBf16 : ScaleMode::kScaleFirst;
}

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
};

// Walks the units of one block: every `stride`-th of tiles x row groups.
template <bool GROUPED>
struct UnitCursor {
  int tile, row_group, tiles, stride_tiles, stride_groups;

  __device__ __forceinline__ explicit UnitCursor(const Params& p) {
    const int index = blockIdx.y, stride = gridDim.y;
    if (GROUPED) {
      tiles = __ldg(p.tile_count);
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
    if (!GROUPED) return {0, row_group, 0, p.tokens};
    const int4 entry = __ldg(p.tiles + tile);
    return {entry.x, row_group, entry.y, entry.z};
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

// The x of one chunk of K for one column warp, shared by that column's row warps: copied, then scaled to halves in place.
//
// A lane's piece is 8 consecutive k of one token. Lanes are dealt so that both the copy and the MMA's reads are free of
// bank conflicts; in shared memory a piece lies at [line][step 0..7][token][p].
template <ScaleMode MODE, bool SINGLE>
struct Activations {
  static constexpr int kHalves = SINGLE ? 1 : 2;  // pieces of a lane per stage and token pair
  static constexpr int kStepK = MODE == ScaleMode::kScaleAfter ? 32 : 8;   // k from one step to the next
  static constexpr int kLaneK = MODE == ScaleMode::kScaleAfter ? 8 : 64;   // k from one lane p to the next
  static constexpr int kHalfK = 4 * kStepK;

  int p, token, step;  // of this lane, in the first pair
  // This warp's items: pairs pair, pair + pair_step, ... and of each the stages stage, stage + stage_step, ...
  int pairs, pair, pair_step, stage, stage_step;

  __device__ __forceinline__ Activations(const Params& params, int width, int lane, int row_warp)
      : p(lane & 3), token(SINGLE ? 0 : (lane >> 2) & 1), step(SINGLE ? lane >> 2 : lane >> 3), pairs((width + 1) / 2) {
    if (pairs >= params.row_warps) {
      pair = row_warp;
      pair_step = params.row_warps;
      stage = 0;
      stage_step = 1;
    } else {  // several warps to a pair; `pairs` is a power of two
      const int shift = __ffs(pairs) - 1;
      pair = row_warp & (pairs - 1);
      pair_step = pairs;
      stage = row_warp >> shift;
      stage_step = params.row_warps >> shift;
      if (stage >= stage_step) stage = 1 << 20;  // one warp too many for an even deal
    }
  }

  __device__ __forceinline__ uint32_t offset(int of_pair, int width) const {
    return (step * width + 2 * of_pair + token) * 64 + p * kPiece;
  }

  template <bool GROUPED>
  __device__ __forceinline__ void copy(const Params& params, const Unit& unit, uint32_t x_shared, int width,
                                       int first_stage, int stages) const {
#pragma unroll 1
    for (int u = pair; u < pairs; u += pair_step) {
      const int t = 2 * u + token;
      const bool present = t < unit.tokens;
      int row = present ? t : 0;
      if (GROUPED && present) row = __ldg(params.x_rows + unit.first_slot + t);
      int k = (first_stage + stage * params.column_warps) * kStageK + p * kLaneK + step * kStepK;
      const __nv_bfloat16* from = params.x + static_cast<size_t>(row) * params.k + k;
      uint32_t to = x_shared + offset(u, width) + stage * width * kStageXBytes;
      k = present ? k : params.k;
#pragma unroll 1
      for (int s = stage; s < stages; s += stage_step) {
#pragma unroll
        for (int i = 0; i < kHalves * kStageLines; ++i) {
          const int line = i / kHalves, half = i % kHalves, ahead = line * kLineK + half * kHalfK;
          const bool inside = k + ahead < params.k;
          copy_async_cached(to + (line * 8 + half * 4) * width * 64, inside ? from + ahead : params.x, inside ? 16 : 0);
        }
        k += stage_step * params.column_warps * kStageK;
        from += stage_step * params.column_warps * kStageK;
        to += stage_step * width * kStageXBytes;
      }
    }
  }

  // Raise largest[token] to the largest |x| (as bf16 bits) among this warp's pieces.
  __device__ __forceinline__ void find_largest(const uint8_t* x_shared, uint32_t* largest, int width, int stages,
                                               int lane) const {
#pragma unroll 1
    for (int u = pair; u < pairs; u += pair_step) {
      const uint8_t* at = x_shared + offset(u, width);
      uint32_t most = 0;
#pragma unroll 2
      for (int s = stage; s < stages; s += stage_step) {
#pragma unroll
        for (int i = 0; i < kHalves * kStageLines; ++i) {
          const uint4 v = *reinterpret_cast<const uint4*>(at + (s * kStageLines * 8 + i * (8 / kHalves)) * width * 64);
          const uint32_t a = __vmaxu2(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu);
          const uint32_t b = __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu);
          most = __vmaxu2(most, __vmaxu2(a, b));
        }
      }
      most = max(most & 0xFFFFu, most >> 16);
      const uint32_t of_first = __reduce_max_sync(~0u, token ? 0u : most);
      const uint32_t of_second = SINGLE ? 0u : __reduce_max_sync(~0u, token ? most : 0u);
      if (lane == 0 || (!SINGLE && lane == 4)) atomicMax(largest + 2 * u + token, token ? of_second : of_first);
    }
  }

  // The power of two (as a biased exponent) that brings a token's largest |x| to [2^14, 2^15).
  __device__ static __forceinline__ int shift_for(uint32_t largest) {
    // 253: the inverse 2^-126 must still be a normal float.
    return max(min(127 + static_cast<int>(kHalfTargetExponent) - static_cast<int>(largest >> 7), 253), 1);
  }

  // What undoes that power of two and kCodeFactor.
  __device__ static __forceinline__ float restore(uint32_t largest) {
    if (MODE == ScaleMode::kBf16) return kBf16CodeFactor;
    return __uint_as_float(static_cast<uint32_t>(254 - shift_for(largest)) << 23) * kCodeFactor;
  }

  // bf16 -> half * 2^n in place, each lane on the pieces that it copied.
  __device__ __forceinline__ void convert(uint8_t* x_shared, const uint32_t* largest, int width, int stages) const {
#pragma unroll 1
    for (int u = pair; u < pairs; u += pair_step) {
      uint8_t* at = x_shared + offset(u, width);
      const float factor = __uint_as_float(static_cast<uint32_t>(shift_for(largest[2 * u + token])) << 23);
#pragma unroll 2
      for (int s = stage; s < stages; s += stage_step) {
#pragma unroll
        for (int i = 0; i < kHalves * kStageLines; ++i) {
          uint4* piece = reinterpret_cast<uint4*>(at + (s * kStageLines * 8 + i * (8 / kHalves)) * width * 64);
          *piece = to_halves(*piece, factor);
        }
      }
    }
  }

  // Elements 0..7 -> pairs (0,4) (1,5) (2,6) (3,7), the order of decode_e2m1.
  __device__ static __forceinline__ uint4 to_halves(uint4 v, float factor) {
    const auto pair = [factor](uint32_t low, uint32_t high, bool upper) {
      const float a = __uint_as_float(upper ? low & 0xFFFF0000u : low << 16) * factor;
      const float b = __uint_as_float(upper ? high & 0xFFFF0000u : high << 16) * factor;
      const __half2 h = __floats2half2_rn(a, b);
      return *reinterpret_cast<const uint32_t*>(&h);
    };
    return make_uint4(pair(v.x, v.z, false), pair(v.x, v.z, true), pair(v.y, v.w, false), pair(v.y, v.w, true));
  }
};

// The FP32 sums of one warp: ROW_TILES x 16 rows by TOKENS, and the arithmetic of one stage.
template <Format FORMAT, int TOKENS, int ROW_TILES, int DEPTH, Alignment ALIGNMENT>
struct WarpTile {
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;
  static constexpr ScaleMode kMode = scale_mode<FORMAT, TOKENS>();
  static constexpr int kColumns = (TOKENS + 7) / 8;                   // n = 8 tiles
  static constexpr int kChains = kColumns * ROW_TILES <= 2 ? 2 : 1;   // independent accumulators hide MMA latency
  static constexpr bool kGroups = kMode == ScaleMode::kGroupColumns;
  static constexpr int kWordsPerGroup = FormatTraits<FORMAT>::kGroup / 8;
  static constexpr int kUnrollLines = 1;  // unrolling costs registers and instruction cache

  float sums[ROW_TILES][kGroups ? 1 : kColumns][kGroups ? 1 : kChains][4];

  __device__ __forceinline__ void clear() {
    float* all = &sums[0][0][0][0];
#pragma unroll
    for (unsigned i = 0; i < sizeof(sums) / sizeof(float); ++i) all[i] = 0.0f;
  }

  // Bytes at..at+3 of a row's block scales of this stage, zero past the row's end (general alignment only).
  __device__ static __forceinline__ uint32_t scale_word(const uint8_t* row, int at, int misaligned, int valid) {
    if constexpr (ALIGNMENT == Alignment::kGeneral) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(row + at);
      uint32_t word = __funnelshift_r(words[0], words[1], misaligned * 8);
      const int left = valid - at;
      if (left < 4) word = left <= 0 ? 0u : word & ((1u << (8 * left)) - 1u);
      return word;
    } else {
      return *reinterpret_cast<const uint32_t*>(row + at);
    }
  }

  // Where a lane reads x: its token's pieces; with group columns, zeros unless column g is the lane's own.
  struct XSource {
    const uint8_t* at;
    int stride;  // to the next stage
  };
  __device__ static __forceinline__ XSource x_source(const uint8_t* x, const uint8_t* zeros, int lane) {
    const int g = lane >> 2, p = lane & 3, token = g % (kGroups ? TOKENS : TOKENS < 8 ? TOKENS : 8);
    if (kGroups && g / 2 != p) return {zeros, 0};
    return {x + token * 64 + p * kPiece, TOKENS * kStageXBytes};
  }

  // `x` is the lane's XSource at this stage.
  __device__ __forceinline__ void consume(const uint8_t* slot, const uint8_t* x, int lane, int misaligned, int valid) {
    const int g = lane >> 2, p = lane & 3;
    constexpr int kLineScales = FormatTraits<FORMAT>::kStageScales / kStageLines;
#pragma unroll kUnrollLines
    for (int line = 0; line < kStageLines; ++line) {
      const uint8_t* codes = slot + (line * Layout::kRows + g) * kLine;
      const uint8_t* scales = slot + Layout::kCodes + g * Layout::kScalePitch + line * kLineScales;
      if constexpr (kMode == ScaleMode::kScaleAfter) {
        consume_by_group(codes, scales, x, g, p, misaligned, valid - line * kLineScales);
      } else {
        consume_by_lane(codes, scales, x, g, p, misaligned, valid - line * kLineScales);
      }
      x += kGroups && g / 2 != p ? 0 : TOKENS * kLineXBytes;
    }
  }

 private:
  // kGroupColumns and kScaleFirst: lane p owns k = 64p .. 64p+63 of the line.
  __device__ __forceinline__ void consume_by_lane(const uint8_t* codes, const uint8_t* scales, const uint8_t* x, int g,
                                                  int p, int misaligned, int valid) {
    uint32_t scale[ROW_TILES][2];  // this lane's block scales, rows g and g + 8
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint8_t* row = scales + (r * 16 + h * 8) * Layout::kScalePitch;
        if constexpr (FORMAT == Format::kNvfp4) {
          scale[r][h] = scale_word(row, p * 4, misaligned, valid);
        } else {
          scale[r][h] = scale_word(row, p / 2 * 4, misaligned, valid) >> (p % 2 * 16);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint4 line[ROW_TILES][2];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int chunk = (2 * p + j) ^ g;
          line[r][h] = *reinterpret_cast<const uint4*>(codes + (r * 16 + h * 8) * kLine + chunk * 16);
        }
      }
      float dot[ROW_TILES][4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint4 b[kColumns];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          b[n] = *reinterpret_cast<const uint4*>(x + ((j * 4 + w) * TOKENS + n * 8) * 64);
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          uint32_t low[4], high[4];  // rows g and g + 8
          if constexpr (kMode == ScaleMode::kBf16) {
            decode_e2m1_bf16(word_of(line[r][0], w), low);
            decode_e2m1_bf16(word_of(line[r][1], w), high);
          } else {
            decode_e2m1(word_of(line[r][0], w), low);
            decode_e2m1(word_of(line[r][1], w), high);
          }
          if constexpr (kGroups) {
            const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
            if (w % kWordsPerGroup == 0) {
              mma_f16(dot[r], a0, b[0].x, b[0].y, zero);
            } else {
              mma_f16(dot[r], a0, b[0].x, b[0].y, dot[r]);
            }
            mma_f16(dot[r], a1, b[0].z, b[0].w, dot[r]);
            if (w % kWordsPerGroup == kWordsPerGroup - 1) {
              const int group = j * (4 / kWordsPerGroup) + w / kWordsPerGroup;
              const float of_low = group_scale(scale[r][0], group), of_high = group_scale(scale[r][1], group);
              sums[r][0][0][0] += of_low * dot[r][0];
              sums[r][0][0][2] += of_high * dot[r][2];
              if (TOKENS == 2) {
                sums[r][0][0][1] += of_low * dot[r][1];
                sums[r][0][0][3] += of_high * dot[r][3];
              }
            }
          } else if constexpr (kMode == ScaleMode::kBf16) {
            const __nv_bfloat162 two_low = decode_e4m3x2_bf16(j == 0 ? scale[r][0] : scale[r][0] >> 16);
            const __nv_bfloat162 two_high = decode_e4m3x2_bf16(j == 0 ? scale[r][1] : scale[r][1] >> 16);
            const __nv_bfloat162 of_low = w < 2 ? __low2bfloat162(two_low) : __high2bfloat162(two_low);
            const __nv_bfloat162 of_high = w < 2 ? __low2bfloat162(two_high) : __high2bfloat162(two_high);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              low[i] = multiply_bf162(low[i], of_low);
              high[i] = multiply_bf162(high[i], of_high);
            }
            const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
            for (int n = 0; n < kColumns; ++n) mma_bf16(sums[r][n][0], a0, b[n].x, b[n].y, sums[r][n][0]);
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
              mma_bf16(sums[r][n][kChains - 1], a1, b[n].z, b[n].w, sums[r][n][kChains - 1]);
            }
          } else {
            const __half2 of_low = group_scale_half2(scale[r][0], j, w), of_high = group_scale_half2(scale[r][1], j, w);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              low[i] = multiply_half2(low[i], of_low);
              high[i] = multiply_half2(high[i], of_high);
            }
            const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
            for (int n = 0; n < kColumns; ++n) mma_f16(sums[r][n][0], a0, b[n].x, b[n].y, sums[r][n][0]);
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
              mma_f16(sums[r][n][kChains - 1], a1, b[n].z, b[n].w, sums[r][n][kChains - 1]);
            }
          }
        }
      }
    }
  }

  // kScaleAfter: in group c of 32 k, lane p owns k = 32c + 8p .. 32c + 8p+7.
  __device__ __forceinline__ void consume_by_group(const uint8_t* codes, const uint8_t* scales, const uint8_t* x, int g,
                                                   int p, int misaligned, int valid) {
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      uint32_t scale[ROW_TILES][2];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          scale[r][h] =
              scale_word(scales + (r * 16 + h * 8) * Layout::kScalePitch, quarter * 4, misaligned, valid);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = quarter * 4 + i;
        uint4 b[kColumns];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          b[n] = *reinterpret_cast<const uint4*>(x + (c * TOKENS + n * 8) * 64);
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          uint32_t low[4], high[4];
          const uint8_t* at = codes + r * 16 * kLine + ((c ^ g) * 16) + p * 4;
          decode_e2m1(*reinterpret_cast<const uint32_t*>(at), low);
          decode_e2m1(*reinterpret_cast<const uint32_t*>(at + 8 * kLine), high);
          const float of_low = decode_e8m0((scale[r][0] >> (8 * i)) & 0xFFu);
          const float of_high = decode_e8m0((scale[r][1] >> (8 * i)) & 0xFFu);
          const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            float dot[4];
            mma_f16(dot, a0, b[n].x, b[n].y, zero);
            mma_f16(dot, a1, b[n].z, b[n].w, dot);
            sums[r][n][0][0] += of_low * dot[0];
            sums[r][n][0][1] += of_low * dot[1];
            sums[r][n][0][2] += of_high * dot[2];
            sums[r][n][0][3] += of_high * dot[3];
          }
        }
      }
    }
  }

  __device__ static __forceinline__ uint32_t word_of(const uint4& v, int w) {
    return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
  }

  __device__ static __forceinline__ float group_scale(uint32_t word, int group) {
    if constexpr (FORMAT == Format::kNvfp4) {
      const __half2 two = decode_e4m3x2(group < 2 ? word : word >> 16);
      return group % 2 ? __high2float(two) : __low2float(two);
    } else {
      return decode_e8m0((word >> (8 * group)) & 0xFFu);
    }
  }

  __device__ static __forceinline__ __half2 group_scale_half2(uint32_t word, int j, int w) {
    const __half2 two = decode_e4m3x2(j == 0 ? word : word >> 16);
    return w < 2 ? __low2half2(two) : __high2half2(two);
  }

 public:
  // Put the sums, true to scale, into totals[token][row]; `add` to what is there for a later chunk of K.
  __device__ __forceinline__ void flush(float* totals, int pitch, const uint32_t* largest, int lane, bool add) {
    using X = Activations<kMode, TOKENS == 1>;
    const int g = lane >> 2, p = lane & 3;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      if constexpr (kGroups) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = i % 2, row = r * 16 + g + i / 2 * 8;
          if (token >= TOKENS) continue;
          float v = sums[r][0][0][i];
          v += __shfl_xor_sync(~0u, v, 1);
          v += __shfl_xor_sync(~0u, v, 2);
          if (p == 0) put(totals + token * pitch + row, v * X::restore(largest[token]), add);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          if (TOKENS < 8 && 2 * p >= TOKENS) continue;
          const float restore[2] = {X::restore(largest[n * 8 + 2 * p]), X::restore(largest[n * 8 + 2 * p + 1])};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = n * 8 + 2 * p + i % 2, row = r * 16 + g + i / 2 * 8;
            float v = sums[r][n][0][i];
            if (kMode != ScaleMode::kScaleAfter && kChains == 2) v += sums[r][n][1][i];
            put(totals + token * pitch + row, v * restore[i % 2], add);
          }
        }
      }
    }
  }

 private:
  __device__ static __forceinline__ void put(float* at, float v, bool add) { *at = add ? *at + v : v; }
};

// A row of totals is padded so that the four lanes that hold different tokens of one row write to different banks.
__host__ __device__ constexpr int totals_pitch(int rows_per_block) { return rows_per_block + 4; }

// Sum totals[column][token][row] over column warps, then over the cluster, in that order, and store y.
// A warp takes its own 16 or 32 rows and every column_warps-th token, so that no index needs a division.
template <int ROWS_PER_WARP, bool GROUPED>
__device__ __forceinline__ void store_outputs(const Params& p, const Unit& unit, float* totals, float* remote, int width,
                                              int column, int row_warp, int lane) {
  constexpr int kTokensAtOnce = 32 / ROWS_PER_WARP;
  const int rows_per_block = p.row_warps * ROWS_PER_WARP, row_pitch = totals_pitch(rows_per_block);
  const int pitch = width * row_pitch;
  const int local_row = row_warp * ROWS_PER_WARP + lane % ROWS_PER_WARP;
  const int row = unit.row_group * rows_per_block + local_row;
  const int token0 = column * kTokensAtOnce + lane / ROWS_PER_WARP, step = p.column_warps * kTokensAtOnce;
  const auto column_sum = [&](int token) {
    const float* at = totals + token * row_pitch + local_row;
    float v = at[0];
#pragma unroll 4
    for (int c = 1; c < p.column_warps; ++c) v += at[c * pitch];
    return v;
  };
  float scale = p.global_scale;
  if (p.global_scales != nullptr) scale *= __ldg(p.global_scales + unit.expert);
  if (!(scale > 0.0f)) scale = __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
  const auto store = [&](int token, float v) {
    if (row >= p.rows) return;
    v *= scale;
    const int slot = GROUPED ? __ldg(p.slots + unit.first_slot + token) : token;
    if (GROUPED && p.slot_weights != nullptr) v *= __ldg(p.slot_weights + slot);
    const size_t at = static_cast<size_t>(slot) * p.rows + row;
    if (p.output_is_float) {
      static_cast<float*>(p.y)[at] = v;
    } else {
      static_cast<__nv_bfloat16*>(p.y)[at] = __float2bfloat16(v);
    }
  };
  if (p.cluster == 1) {
#pragma unroll 2
    for (int t = token0; t < unit.tokens; t += step) store(t, column_sum(t));
    return;
  }
  // Block t % cluster finishes token t. Everyone's sums for it go to remote[from block][t / cluster][row], which lies
  // over the ring: the first barrier says that all rings have drained.
  const int each = (width + p.cluster - 1) >> p.cluster_shift;
  cluster_arrive();
  cluster_wait();
  const uint32_t mine = shared_address(remote + blockIdx.x * each * row_pitch + local_row);
#pragma unroll 4
  for (int t = token0; t < unit.tokens; t += step) {
    store_to_block(mine + (t >> p.cluster_shift) * row_pitch * 4, t & (p.cluster - 1), column_sum(t));
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll 2
  for (int t = token0 * p.cluster + blockIdx.x; t < unit.tokens; t += step * p.cluster) {
    const float* at = remote + (t >> p.cluster_shift) * row_pitch + local_row;
    float v = at[0];
#pragma unroll 8
    for (int rank = 1; rank < p.cluster; ++rank) v += at[rank * each * row_pitch];
    store(t, v);
  }
}

// The warp's place in the block.
struct Place {
  int lane, column, row_warp, warp;
};

// One unit, for up to TOKENS tokens. Every thread of the block takes part.
template <Format FORMAT, int TOKENS, int ROW_TILES, int DEPTH, Alignment ALIGNMENT, bool GROUPED, class Stream>
__device__ __forceinline__ void run_unit(const Params& p, const Unit& unit, const Unit* next, Stream& stream,
                                         uint8_t* shared, uint32_t& drain, int& turn, const Share& share, const Place& at,
                                         int x_buffer, bool first, int next_width) {
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;
  using X = Activations<scale_mode<FORMAT, TOKENS>(), TOKENS == 1>;
  const int rows_per_block = p.row_warps * Layout::kRows;
  const int x_stages = p.x_stages[!GROUPED || TOKENS == 2 ? 0 : TOKENS == 8 ? 1 : 2];
  uint8_t* x = shared + p.x_offset + x_buffer * p.x_bytes + at.column * x_stages * TOKENS * kStageXBytes;
  // Largest |x| of each token, in this chunk of this column; two sets take turns, the idle one is cleared.
  const int set = p.column_warps * kMaxWidth;
  uint32_t* largest = reinterpret_cast<uint32_t*>(shared + p.largest_offset) + at.column * TOKENS;
  float* totals = reinterpret_cast<float*>(shared + p.sums_offset);
  const int row_pitch = totals_pitch(rows_per_block);
  const X activations(p, TOKENS, at.lane, at.row_warp);

  // Where this lane's rows of block scales start inside a word (general alignment).
  const int scale_pitch = p.k / FormatTraits<FORMAT>::kGroup;
  const size_t my_row = static_cast<size_t>(unit.expert) * p.rows + unit.row_group * rows_per_block + (at.lane >> 2);
  const int misaligned = ALIGNMENT == Alignment::kGeneral ? static_cast<int>((my_row * scale_pitch) & 3) : 0;

#pragma unroll 1
  for (int begin = 0; begin == 0 || begin < share.most; begin += x_stages) {
    const int stages = max(min(x_stages, share.mine - begin), 0);
    const bool fill_ring = first && begin == 0;
    if (begin > 0 || (!GROUPED && !first)) __syncthreads();  // the last x, or the sums in its place, are still in use
    if (fill_ring && p.constant_weights) {  // weights are constant: they need not wait for the kernel that makes x
#pragma unroll 1
      for (int i = 0; i < DEPTH - 1; ++i) stream.fetch(p);
      wait_for_previous_kernel();
      allow_next_kernel();
    }
    if (!GROUPED || first || begin > 0) {  // else the unit before has sent for it
      activations.template copy<GROUPED>(p, unit, shared_address(x), TOKENS, share.first + begin * p.column_warps,
                                         stages);
      copy_commit();
    }
    if (fill_ring && !p.constant_weights) {  // x went first: waiting for it must not mean waiting for a stage of weights
#pragma unroll 1
      for (int i = 0; i < DEPTH - 1; ++i) stream.fetch(p);
      copy_wait<DEPTH - 1>();
    } else if (GROUPED && begin == 0 && !first && share.mine >= DEPTH) {
      copy_wait<DEPTH - 1>();  // x was sent for with the first stage of the unit before
    } else {
      copy_wait<0>();
    }
    uint32_t* const now = largest + (turn & 1) * set;
    if constexpr (scale_mode<FORMAT, TOKENS>() != ScaleMode::kBf16) {
      activations.find_largest(x, now, TOKENS, stages, at.lane);
      __syncthreads();  // also: the last unit's sums have been read, the zeros are whole
      if (at.warp == 0) {
        uint32_t* idle = reinterpret_cast<uint32_t*>(shared + p.largest_offset) + ((turn & 1) ^ 1) * set;
        for (int i = at.lane; i < p.column_warps * (GROUPED ? kGroupedTileTokens : TOKENS); i += 32) idle[i] = 0;
      }
      ++turn;
      activations.convert(x, now, TOKENS, stages);
    }
    __syncthreads();  // x is whole; and (BF16) the last unit's sums have been read
    using Tile = WarpTile<FORMAT, TOKENS, ROW_TILES, DEPTH, ALIGNMENT>;
    Tile tile;
    tile.clear();
    typename Tile::XSource source = Tile::x_source(x, shared + p.zeros_offset, at.lane);
    if (next != nullptr && begin == 0) {  // joins the first stage's commit group
      const Activations<scale_mode<FORMAT, 8>(), false> many(p, next_width, at.lane, at.row_warp);
      const Activations<ScaleMode::kGroupColumns, false> few(p, next_width, at.lane, at.row_warp);
      const int stages_fit = p.x_stages[next_width == 2 ? 0 : next_width == 8 ? 1 : 2];
      const uint32_t to = shared_address(shared) + p.x_offset + (x_buffer ^ 1) * p.x_bytes +
                          at.column * stages_fit * next_width * kStageXBytes;
      if (next_width == 2) {
        few.template copy<GROUPED>(p, *next, to, next_width, share.first, min(stages_fit, share.mine));
      } else {
        many.template copy<GROUPED>(p, *next, to, next_width, share.first, min(stages_fit, share.mine));
      }
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      copy_wait<DEPTH - 2>();
      __syncwarp();  // the stage has landed for all lanes, and all lanes are done with the slot that is filled next
      stream.fetch(p);
      const int stage = share.first + (begin + i) * p.column_warps;
      tile.consume(shared + drain, source.at, at.lane, misaligned,
                   scale_pitch - stage * FormatTraits<FORMAT>::kStageScales);
      source.at += source.stride;
      const uint32_t ring = at.warp * Layout::kBytes;
      drain = drain + Layout::kSlotBytes == ring + Layout::kBytes ? ring : drain + Layout::kSlotBytes;
    }
    if (p.sums_offset == p.x_offset) __syncthreads();  // the sums take the place of x
    tile.flush(totals + at.column * TOKENS * row_pitch + at.row_warp * Layout::kRows, row_pitch, now, at.lane,
               begin > 0);
  }
  if (p.column_warps > 1) {
    __syncthreads();
  } else {
    __syncwarp();  // a warp stores what it summed
  }
  store_outputs<Layout::kRows, GROUPED>(p, unit, totals, reinterpret_cast<float*>(shared), TOKENS,
                                        at.column, at.row_warp, at.lane);
}

// Outputs of slots whose expert does not exist are NaN: visible, where an old buffer's numbers would not be.
__device__ __forceinline__ void poison_unrouted(const Params& p) {
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * 32 + threadIdx.x, threads = blockDim.y * blockDim.z * 32;
  for (int i = __ldg(p.tile_count + 1) + blockIdx.y; i < p.slot_count; i += gridDim.y) {
    const size_t base = static_cast<size_t>(__ldg(p.slots + i)) * p.rows;
    for (int row = thread; row < p.rows; row += threads) {
      if (p.output_is_float) {
        static_cast<float*>(p.y)[base + row] = __uint_as_float(0x7FC00000u);
      } else {
        static_cast<uint16_t*>(p.y)[base + row] = 0x7FC0;
      }
    }
  }
}

// TOKENS = 0: grouped, the width is chosen per unit. Block: (32, column_warps, row_warps); grid: (cluster, blocks).
template <Format FORMAT, int TOKENS, int ROW_TILES, int DEPTH, Alignment ALIGNMENT, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) w4a16_kernel(const __grid_constant__ Params p) {
  constexpr bool kGrouped = TOKENS == 0;
  using Layout = Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>;
  extern __shared__ __align__(128) uint8_t shared[];
  Place at;
  at.lane = threadIdx.x;
  at.column = __shfl_sync(~0u, threadIdx.y, 0);
  at.row_warp = __shfl_sync(~0u, threadIdx.z, 0);
  at.warp = at.row_warp * p.column_warps + at.column;
  if (at.warp < 2) reinterpret_cast<uint4*>(shared + p.zeros_offset)[at.warp * 32 + at.lane] = make_uint4(0, 0, 0, 0);
  uint32_t* const largest = reinterpret_cast<uint32_t*>(shared + p.largest_offset);
  for (int i = at.warp * 32 + at.lane; i < 2 * p.column_warps * kMaxWidth; i += blockDim.y * blockDim.z * 32) largest[i] = 0;
  __syncthreads();  // before anyone raises them
  if (kGrouped || !p.constant_weights) {  // nothing has been read so far
    wait_for_previous_kernel();
    allow_next_kernel();
  }
  UnitCursor<kGrouped> cursor(p);
  const Share share = share_of_k(p, at.column);
  WeightStream<FORMAT, ROW_TILES, DEPTH, ALIGNMENT, kGrouped> stream(
      p, cursor, shared_address(shared) + at.warp * Layout::kBytes, share, at.row_warp, at.lane);
  uint32_t drain = at.warp * Layout::kBytes;
  int turn = 0;
  if constexpr (kGrouped) {
    const auto width_of = [](const Unit& u) { return u.tokens <= 2 ? 2 : u.tokens <= 8 ? 8 : 16; };
    bool first = true, more = cursor.valid(p);
    Unit unit = more ? cursor.unit(p) : Unit{};
    for (int x_buffer = 0; more; x_buffer ^= 1) {
      cursor.advance(p);
      more = cursor.valid(p);
      Unit next = more ? cursor.unit(p) : unit;
      const Unit* ahead = more ? &next : nullptr;
      const int width = width_of(unit), next_width = width_of(next);
      if (width == 2) {
        run_unit<FORMAT, 2, ROW_TILES, DEPTH, ALIGNMENT, true>(p, unit, ahead, stream, shared, drain, turn, share, at, x_buffer,
                                                               first, next_width);
      } else if (width == 8) {
        run_unit<FORMAT, 8, ROW_TILES, DEPTH, ALIGNMENT, true>(p, unit, ahead, stream, shared, drain, turn, share, at, x_buffer,
                                                               first, next_width);
      } else {
        run_unit<FORMAT, 16, ROW_TILES, DEPTH, ALIGNMENT, true>(p, unit, ahead, stream, shared, drain, turn, share, at,
                                                                x_buffer, first, next_width);
      }
      unit = next;
      first = false;
    }
    poison_unrouted(p);
  } else {
    for (bool first = true; cursor.valid(p); cursor.advance(p)) {
      const Unit unit = cursor.unit(p);
      // A later unit sends for its own x: dense blocks rarely have one.
      run_unit<FORMAT, TOKENS, ROW_TILES, DEPTH, ALIGNMENT, false>(p, unit, nullptr, stream, shared, drain, turn, share, at, 0,
                                                                   first, 0);
      first = false;
    }
  }
  copy_wait<0>();
}

}  // namespace requant
