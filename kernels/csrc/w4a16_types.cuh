// What the files of the W4A16 kernel share: sizes, formats, the launch's parameters.
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
constexpr int kDenseTokens = 8;                  // dense layers up to this width: w4a16_dense.cuh
constexpr int kBf16Tokens = 32;                  // from this width on, BF16 operands
constexpr int kGroupedTileTokens = 16;           // tokens of one expert that share a pass over its weights
constexpr int kStreamTokens = 4;                 // the same for a stream (w4a16_stream.cuh)
constexpr uint32_t kHalfTargetExponent = 127 + 14;  // biased exponent given to the largest x of a chunk

// a / b for 0 <= a < 2^23, b > 0: a few instructions where an integer division takes twenty.
__device__ __forceinline__ int quotient(int a, int b) {
  const int q = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b))), left = a - q * b;
  return q + (left >= b ? 1 : 0) - (left < 0 ? 1 : 0);
}

enum class Format { kNvfp4, kMxfp4 };
enum class ScaleMode { kGroupColumns, kScaleFirst, kScaleAfter, kBf16 };

enum class Gating { kNone, kHalves, kInterleaved };  // gate rows 0 .. N/2-1 and up rows N/2 .., or in turns

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
  int max_tiles;               // how many entries `tiles` has room for
  int slot_count;              // all slots; those without an expert stand last in `slots`
  const int4* tiles;           // {expert, first position in `slots`, tokens, first slot}
  const int* slots;            // slot numbers (rows of y), sorted by expert
  const int* x_rows;           // the row of x that each of them reads
  int slots_per_x;             // slots that share a row of x
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
  int remote_offset;                 // dense, up to 8 tokens: sums from the other blocks of the cluster
  int all_rows;                      // streams: of all experts
  int stream_scales_offset;          // streams: the ring of block scales
  int barriers_offset;               // one barrier per stage, [warp][stage]; dense: behind them the cluster's
  int constant_weights;              // they may be fetched before the previous kernel has finished
  // w4a16_split.cuh only
  int settled;                 // routing and weights are older than the kernel before this one, and may be read while it runs
  Gating gating;               // then y is [slots][rows / 2]
  const __nv_bfloat16* bias;   // [experts][rows]; null: none
  float limit, alpha;          // of the gate; limit 0: none
};

// What earlier kernels wrote (routing, x, weights of slots) is read by ordinary loads after griddepcontrol.wait, which makes
// it visible to those, and never by ld.global.nc: it is not constant for the life of a kernel that starts before its
// predecessor has ended, and the compiler may move such a load over the wait. `early`, i.e. before the wait, past L1 too, which
// may hold what stood there before. (After the wait L1 serves: past it all warps of all blocks queue at the same L2 lines.)
template <class T>
__device__ __forceinline__ T load_fresh(bool early, const T* at) {
  return early ? __ldcg(at) : *at;
}

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

}  // namespace requant
