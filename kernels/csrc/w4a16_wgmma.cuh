// W4A16 for 8 to 64 tokens on SM90: wgmma with weights from registers and x from shared memory. Dense only.
//
// Why beside w4a16_core.cuh: from 16 tokens on, mma.sync issues too slowly and every warp reads all of x from shared
// memory for every 16 rows. wgmma takes 64 rows at once and reads x itself.
//
// Shape of the computation.
//   * A *tile* is 64 rows: one warpgroup, 16 rows per warp. A *stage* is a tile x 256 k: one 128-byte line of codes per row.
//   * A block has row_groups x k_groups warpgroups, which consume, and two warps, which fetch: one the codes (bulk tensor
//     copies) and block scales (cp.async) of every warpgroup into a ring of its own, one the x of every k group. Consumers
//     free a stage of codes when they have decoded it and a stage of x when the tensor cores have read it.
//   * k_groups warpgroups of a block and `cluster` blocks split K. Each of these participants finishes a part of the tile's
//     sums: the others send theirs to its shared memory, and it adds them in the order of the participants. So two runs
//     give the same bits.
//
// x stays as it is. A row of B's tile in shared memory is 8 consecutive k of one token, so lane p = lane % 4 of the MMA's
// A operand needs the codes of k = 2p and 2p + 1 of every 8, which is byte p of every 32-bit word. A lane therefore reads
// all words of its rows (four lanes read the same words: a broadcast) and gathers its bytes with three PRMT per 8 codes.
// That costs a quarter of the decode; permuting x instead would cost a pass over x in every block, and at 64 tokens a
// block reads more bytes of x than of weights.
//
// Block scales meet the codes in BF16, exactly (E2M1 has 2 significant bits, E4M3 4, BF16 8). E4M3 bits moved to BF16's
// places read as scale * 2^-120, subnormals included, and two multiplications lift them to scale * 2^110 while codes
// stand at value * 2^-126. A NaN or a negative scale (E4M3), 0 or NaN (E8M0) do not survive that move; a warp that sees one
// in its stage takes the conversion instruction instead.
#pragma once
#include "fp4_decode.cuh"
#include "hopper.cuh"
#include "ptx.cuh"
#include "w4a16_types.cuh"

namespace requant {

constexpr int kWgRows = 64;                           // rows of a tile
constexpr int kWgThreads = 128;
constexpr int kWgTileBytes = kWgRows * kLine;         // codes of one stage
constexpr int kBlockK = 64;                           // k of one swizzled row of x
constexpr int kStageBlocks = kStageK / kBlockK;
constexpr int kWgMaxGroups = 4;                       // warpgroups per block
constexpr int kWgMaxDepth = 8;
constexpr int kWgMaxThreads = kWgMaxGroups * (kWgThreads + 32) + 32;
constexpr int kRingBarriers = 4 * kWgMaxGroups * kWgMaxDepth;  // full and empty, of weights and of x
constexpr int kSumsPitch = kWgRows + 4;  // floats from token to token: four lanes' tokens fall on different banks

// Blocks of 64 k in one stage of x: fewer for many tokens, so that two stages of several k groups fit.
template <int TOKENS>
constexpr int kXBlocks = TOKENS == 64 ? 2 : 4;

struct WgmmaParams {
  CUtensorMap codes_map, x_map;
  const void *codes, *x;  // what the maps describe
  const uint8_t* block_scales;
  void* y;
  const float* global_scales;
  float global_scale;
  int tokens, rows, k, output_is_float;
  int row_groups, k_groups, cluster;  // k_groups: a power of two
  int stages_each, stages_left;  // K stages per participant, and how many take one more
  int depth, x_depth;            // ring stages of weights and of x
  int scale_copy;                // bytes per copy of block scales: 16, 8, 4
  int k_shift, tokens_shift;     // log2 of k_groups, and of the tokens that a participant finishes
  int sums_share;                // the sums take the place of the rings
  int codes_offset, scales_offset, sums_offset, barriers_offset;  // x lies at 0
  int constant_weights;
#ifdef REQUANT_MARKS
  long long* marks;
#endif
};

#ifdef REQUANT_MARKS
#define REQUANT_MARK(i)                                                                                      \
  do {                                                                                                       \
    if (p.marks != nullptr && lane == 0)                                                                     \
      p.marks[((blockIdx.y * gridDim.x + blockIdx.x) * 24 + threadIdx.x / 32) * 16 + (i)] = clock64();       \
  } while (0)
#else
#define REQUANT_MARK(i)
#endif

template <Format FORMAT>
struct WgScales {
  static constexpr int kRow = FormatTraits<FORMAT>::kStageScales;  // bytes per row and stage
  static constexpr int kTile = kWgRows * kRow;
};

// 8 codes that a lane gathered -> BF16 pairs of two k steps, times the block scales of the first and of the second 16 k:
// the upper or the lower halves of `first` and `second`.
template <Format FORMAT>
__device__ __forceinline__ void decode_scaled(uint32_t codes, uint32_t first, uint32_t second, bool upper,
                                              uint32_t (&pairs)[4]) {
  const auto scale_of = [upper](uint32_t two) {
    const __nv_bfloat162 v = *reinterpret_cast<const __nv_bfloat162*>(&two);
    return upper ? __high2bfloat162(v) : __low2bfloat162(v);
  };
  decode_e2m1_bf16(codes, pairs);
  if constexpr (FORMAT == Format::kMxfp4) {
    const __nv_bfloat162 lift = __float2bfloat162_rn(0x1p126f);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = multiply_bf162(pairs[i], lift);
  }
  pairs[0] = multiply_bf162(pairs[0], scale_of(first));
  pairs[1] = multiply_bf162(pairs[1], scale_of(first));
  pairs[2] = multiply_bf162(pairs[2], scale_of(second));
  pairs[3] = multiply_bf162(pairs[3], scale_of(second));
}

// Four block scales of NVFP4 -> BF16 pairs (0, 2) and (1, 3), times 2^110. Wrong for special_scales.
__device__ __forceinline__ void lift_e4m3(uint32_t bytes, uint32_t (&pairs)[2]) {
  const __nv_bfloat162 lift = __float2bfloat162_rn(0x1p115f);
  pairs[0] = multiply_bf162(multiply_bf162((bytes & 0x007F007Fu) << 4, lift), lift);
  pairs[1] = multiply_bf162(multiply_bf162((bytes >> 4) & 0x07F007F0u, lift), lift);
}

// The same for any bytes.
__device__ __forceinline__ void convert_e4m3(uint32_t bytes, uint32_t (&pairs)[2]) {
  const __nv_bfloat162 low = decode_e4m3x2_bf16(bytes), high = decode_e4m3x2_bf16(bytes >> 16);
  const __nv_bfloat162 even = __lows2bfloat162(low, high), odd = __highs2bfloat162(low, high);
  pairs[0] = *reinterpret_cast<const uint32_t*>(&even);
  pairs[1] = *reinterpret_cast<const uint32_t*>(&odd);
}

// Two block scales of MXFP4 -> one BF16 pair. Wrong for special_scales.
__device__ __forceinline__ uint32_t lift_e8m0x2(uint32_t bytes) {
  return permute_bytes(bytes, 0, 0x4140) << 7;  // bytes 0 and 1 to the bottom of a half each
}

// What the same lacks where a byte is 0 (2^-127) or 255 (NaN, where the shift gives infinity).
__device__ __forceinline__ uint32_t convert_e8m0x2(uint32_t bytes) {
  const uint32_t low = bytes & 0xFFu, high = (bytes >> 8) & 0xFFu;
  return lift_e8m0x2(bytes) | (low == 0 || low == 255 ? 0x0040u : 0u) | (high == 0 || high == 255 ? 0x00400000u : 0u);
}

// A byte of `word` that the plain conversion above gets wrong.
template <Format FORMAT>
__device__ __forceinline__ uint32_t special_scales(uint32_t word) {
  if constexpr (FORMAT == Format::kNvfp4) {
    return (((word & 0x7F7F7F7Fu) + 0x01010101u) | word) & 0x80808080u;
  } else {
    return __vcmpeq4(word, 0u) | __vcmpeq4(word, ~0u);
  }
}

__device__ __forceinline__ int wg_first_stage(const WgmmaParams& p, int participant) {
  return participant * p.stages_each + min(participant, p.stages_left);
}
__device__ __forceinline__ int wg_stages(const WgmmaParams& p, int participant) {
  return p.stages_each + (participant < p.stages_left ? 1 : 0);
}

// A position in a ring: which slot, and the parity of its barriers.
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int depth) {
    if (++slot == depth) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct WgBarriers {
  uint32_t base;
  // kind 0: full, 1: empty; of weights per warpgroup, of x per k group.
  __device__ __forceinline__ uint32_t weights(int kind, int group, int slot) const {
    return base + ((kind * kWgMaxGroups + group) * kWgMaxDepth + slot) * 8;
  }
  __device__ __forceinline__ uint32_t x(int kind, int group, int slot) const {
    return base + (((2 + kind) * kWgMaxGroups + group) * kWgMaxDepth + slot) * 8;
  }
};

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

// The thread that fetches x: boxes of kXBlocks swizzled rows of 64 k for every token.
template <int TOKENS>
__device__ __forceinline__ void fetch_x(const WgmmaParams& p, uint32_t shared, const WgBarriers& barriers, int rank) {
  constexpr int kStage = kXBlocks<TOKENS> * TOKENS * kBlockK * 2, kPerStage = kStageBlocks / kXBlocks<TOKENS>;
  RingPlace at;
  const int most = wg_stages(p, rank * p.k_groups) * kPerStage;
#pragma unroll 1
  for (int i = 0; i < most; ++i) {
#pragma unroll 1
    for (int group = 0; group < p.k_groups; ++group) {
      const int participant = rank * p.k_groups + group;
      if (i >= wg_stages(p, participant) * kPerStage) continue;
      const uint32_t full = barriers.x(0, group, at.slot);
      barrier_wait(barriers.x(1, group, at.slot), at.parity ^ 1);
      barrier_expect(full, kStage);
      copy_box(shared + (group * p.x_depth + at.slot) * kStage, &p.x_map, full, 0, 0,
               wg_first_stage(p, participant) * kStageBlocks + i * kXBlocks<TOKENS>);
    }
    at.next(p.x_depth);
  }
}

// One warpgroup's share of K: decode and multiply.
template <Format FORMAT, int TOKENS>
__device__ __forceinline__ void consume(const WgmmaParams& p, uint8_t* shared, const WgBarriers& barriers, int group,
                                        int k_group, int stages, int warp, int lane, float (&sums)[TOKENS / 2]) {
  constexpr int kRow = WgScales<FORMAT>::kRow, kBox = TOKENS * kBlockK * 2, kXStage = kXBlocks<TOKENS> * kBox;
  const int g = lane >> 2, q = lane & 3;
  const uint32_t select = opaque(q | (q + 4) << 4);  // byte q of two words
  const uint32_t base = shared_address(shared), lane_row = warp * 16 + g;
  const uint32_t codes0 = opaque(base + p.codes_offset + group * p.depth * kWgTileBytes + lane_row * kLine + g * 16);
  const uint32_t scales0 = opaque(base + p.scales_offset + group * p.depth * WgScales<FORMAT>::kTile + lane_row * kRow);
  const uint32_t x0 = base + k_group * p.x_depth * kXStage;
  RingPlace at, x_at;
  uint32_t x_read = 0;  // barrier that frees the stage of x before this one
  uint64_t x = 0;
  stages = opaque(stages);
#pragma unroll 1
  for (; stages > 0; --stages) {
    barrier_wait(barriers.weights(0, group, at.slot), at.parity);
    const uint32_t codes = codes0 + at.slot * kWgTileBytes;
    uint32_t scales = scales0 + at.slot * WgScales<FORMAT>::kTile;
    const uint32_t quarter = scales + q % (kRow / 4) * 4;  // the four lanes of a row share the search
    const bool special = __any_sync(~0u, special_scales<FORMAT>(load_word(quarter)) |
                                             special_scales<FORMAT>(load_word(quarter + 8 * kRow)));
    uint4 low[2], high[2];           // the next 64 k of rows g and g + 8: two pieces of 32 k,
    uint32_t bytes_low, bytes_high;  // and their block scales
    const auto load = [&](uint32_t chunk) {  // piece c of row r lies at c ^ (r & 7)
      const uint32_t first = codes ^ chunk, second = first ^ 16;
      low[0] = load_piece(first);
      high[0] = load_piece(first + 8 * kLine);
      bytes_low = FORMAT == Format::kNvfp4 ? load_word(scales) : load_half(scales);
      bytes_high = FORMAT == Format::kNvfp4 ? load_word(scales + 8 * kRow) : load_half(scales + 8 * kRow);
      low[1] = load_piece(second);
      high[1] = load_piece(second + 8 * kLine);
    };
    load(0);
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < kLine; chunk += 32) {  // 32 bytes of a line: 64 k
      const auto gather = [select](const uint4& v) {
        return permute_bytes(permute_bytes(v.x, v.y, select), permute_bytes(v.z, v.w, select), 0x5410);
      };
      const uint32_t mine_low[2] = {gather(low[0]), gather(low[1])}, mine_high[2] = {gather(high[0]), gather(high[1])};
      uint32_t scale_low[2], scale_high[2];
      if constexpr (FORMAT == Format::kNvfp4) {
        lift_e4m3(bytes_low, scale_low);
        lift_e4m3(bytes_high, scale_high);
        if (special) {
          convert_e4m3(bytes_low, scale_low);
          convert_e4m3(bytes_high, scale_high);
        }
      } else {
        scale_low[0] = scale_low[1] = special ? convert_e8m0x2(bytes_low) : lift_e8m0x2(bytes_low);
        scale_high[0] = scale_high[1] = special ? convert_e8m0x2(bytes_high) : lift_e8m0x2(bytes_high);
      }
      scales += kRow / kStageBlocks;
      if (chunk + 32 < kLine) load(chunk + 32);
      const bool fresh = chunk % (kXBlocks<TOKENS> * 32) == 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t above[4], below[4];
        decode_scaled<FORMAT>(mine_low[j], scale_low[0], scale_low[1], j == 1, above);
        decode_scaled<FORMAT>(mine_high[j], scale_high[0], scale_high[1], j == 1, below);
        if (j == 0 && fresh) {
          barrier_wait(barriers.x(0, k_group, x_at.slot), x_at.parity);
          x = kSwizzledRows | ((x0 + x_at.slot * kXStage) >> 4);
        }
        wgmma_fence();
        const uint32_t first[4] = {above[0], below[0], above[1], below[1]};
        const uint32_t second[4] = {above[2], below[2], above[3], below[3]};
        Wgmma<TOKENS>::run(sums, first, x + j * 4);
        Wgmma<TOKENS>::run(sums, second, x + j * 4 + 2);
        wgmma_commit();
        wgmma_wait<1>();  // frees the registers of the pair before, and the x that it read
        if (j == 0 && fresh) {
          if (x_read != 0 && lane == 0) barrier_arrive(x_read);
          x_read = barriers.x(1, k_group, x_at.slot);
          x_at.next(p.x_depth);
        }
      }
      x += kBox >> 4;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.weights(1, group, at.slot));
    at.next(p.depth);
  }
  wgmma_wait<0>();
}

// All blocks of the cluster, or of this block where it is alone.
__device__ __forceinline__ void meet(const WgmmaParams& p) {
  if (p.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

// Block: row_groups x k_groups warpgroups, a warp per warpgroup that fetches its weights, and one that fetches x; grid:
// (cluster, tiles of row_groups * 64 rows).
template <Format FORMAT, int TOKENS>
__global__ void __launch_bounds__(kWgMaxThreads, 1) w4a16_wgmma_kernel(const __grid_constant__ WgmmaParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t tiles[];
  uint8_t* const shared = tiles;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = blockIdx.x;
  const int groups = p.row_groups * p.k_groups;
  const WgBarriers barriers{shared_address(shared) + p.barriers_offset};
  REQUANT_MARK(0);
  const bool consumes = warp < groups * 4, fetches_x = warp == groups * 5;
  const int group = consumes ? warp / 4 : fetches_x ? 0 : warp - groups * 4;
  const int k_group = (group >= p.row_groups) + (group >= 2 * p.row_groups) + (group >= 3 * p.row_groups);
  const int row_group = group - k_group * p.row_groups, me = rank * p.k_groups + k_group;
  if (!consumes && lane == 0) {  // each its own barriers
    prefetch_map(fetches_x ? &p.x_map : &p.codes_map);
    if (fetches_x) {
#pragma unroll 1
      for (int i = 0; i < p.k_groups; ++i) {
#pragma unroll 1
        for (int slot = 0; slot < p.x_depth; ++slot) {
          barrier_init(barriers.x(0, i, slot), 1);
          barrier_init(barriers.x(1, i, slot), 4 * p.row_groups);
        }
      }
    } else {
#pragma unroll 1
      for (int slot = 0; slot < p.depth; ++slot) {
        barrier_init(barriers.weights(0, group, slot), 33);  // 32 lanes' block scales, and the codes
        barrier_init(barriers.weights(1, group, slot), 4);
      }
    }
    barrier_init_fence();
  }
  __syncthreads();
  REQUANT_MARK(1);
  if (p.cluster > 1) cluster_arrive();  // this block runs
  float sums[TOKENS / 2];
  if (!consumes) {
    if (fetches_x || !p.constant_weights) wait_for_previous_kernel();  // nothing has been read so far
    allow_next_kernel();
    REQUANT_MARK(2);
    if (fetches_x) {
      if (lane == 0) fetch_x<TOKENS>(p, shared_address(shared), barriers, rank);
    } else {
      const int row = (blockIdx.y * p.row_groups + row_group) * kWgRows;
      const int first = wg_first_stage(p, me), stages = wg_stages(p, me);
      if (p.scale_copy == 16) {
        fetch_weights<FORMAT, 16>(p, shared_address(shared), barriers, group, row, first, stages, lane);
      } else if (p.scale_copy == 8) {
        fetch_weights<FORMAT, 8>(p, shared_address(shared), barriers, group, row, first, stages, lane);
      } else {
        fetch_weights<FORMAT, 4>(p, shared_address(shared), barriers, group, row, first, stages, lane);
      }
      if (p.constant_weights) wait_for_previous_kernel();
    }
    __syncwarp();
    REQUANT_MARK(3);
  } else {
    wait_for_previous_kernel();
    allow_next_kernel();
    REQUANT_MARK(2);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
    consume<FORMAT, TOKENS>(p, shared, barriers, group, k_group, wg_stages(p, me), warp % 4, lane, sums);
    REQUANT_MARK(3);
  }

  // Sums meet: [warpgroup][participant][token][row], at the participant that finishes the token.
  const int participants = p.cluster * p.k_groups, each = 1 << p.tokens_shift;
  constexpr int kPitch = kSumsPitch * 4;
  if (p.cluster > 1) cluster_wait();  // the other blocks run
  if (p.sums_share) meet(p);          // all rings have drained
  if (consumes) {
    const uint32_t to = shared_address(shared) + p.sums_offset + (warp % 4 * 16 + (lane >> 2)) * 4;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n) {
      const int token = n * 8 + (lane & 3) * 2, owner = token >> p.tokens_shift;
      const int slot = (owner & (p.k_groups - 1)) * p.row_groups + row_group;
      const uint32_t at = block_address(to + ((slot * participants + me) * each + (token & (each - 1))) * kPitch,
                                        owner >> p.k_shift);
      store_to_cluster(at, sums[4 * n]);
      store_to_cluster(at + kPitch, sums[4 * n + 1]);
      store_to_cluster(at + 32, sums[4 * n + 2]);
      store_to_cluster(at + kPitch + 32, sums[4 * n + 3]);
    }
  }
  REQUANT_MARK(4);
  meet(p);
  REQUANT_MARK(5);
  if (!consumes) return;
  float scale = p.global_scale;
  if (p.global_scales != nullptr) scale *= __ldg(p.global_scales);
  if (!(scale > 0.0f)) scale = __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
  constexpr float kFactor = FORMAT == Format::kNvfp4 ? kBf16CodeFactor : 1.0f;
  const int row = (blockIdx.y * p.row_groups + row_group) * kWgRows + lane * 2;  // a lane stores two rows of a token
  const uint8_t* const mine = shared + p.sums_offset + group * participants * each * kPitch + lane * 8;
  const int tokens = min(each, p.tokens - me * each);
#pragma unroll 2
  for (int i = warp % 4; i < tokens; i += 4) {
    float2 v = *reinterpret_cast<const float2*>(mine + i * kPitch);
#pragma unroll 4
    for (int from = 1; from < participants; ++from) {
      const float2 term = *reinterpret_cast<const float2*>(mine + (from * each + i) * kPitch);
      v.x += term.x;
      v.y += term.y;
    }
    v.x = v.x * kFactor * scale;
    v.y = v.y * kFactor * scale;
    const size_t to = static_cast<size_t>(me * each + i) * p.rows + row;
    const bool pair = row + 1 < p.rows && p.rows % 2 == 0;
    if (p.output_is_float) {
      float* y = static_cast<float*>(p.y) + to;
      if (row < p.rows) y[0] = v.x;
      if (row + 1 < p.rows) y[1] = v.y;
    } else {
      __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + to;
      if (pair) {
        *reinterpret_cast<__nv_bfloat162*>(y) = __floats2bfloat162_rn(v.x, v.y);
      } else {
        if (row < p.rows) y[0] = __float2bfloat16(v.x);
        if (row + 1 < p.rows) y[1] = __float2bfloat16(v.y);
      }
    }
  }
  REQUANT_MARK(6);
#endif
}

}  // namespace requant
