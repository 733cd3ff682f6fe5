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
#include "w4a16_core.cuh"

namespace requant {

constexpr int kWgRows = 64;                           // rows of a tile
constexpr int kWgThreads = 128;
constexpr int kWgTileBytes = kWgRows * kLine;         // codes of one stage
constexpr int kBlockK = 64;                           // k of one swizzled row of x
constexpr int kStageBlocks = kStageK / kBlockK;
constexpr int kWgMaxGroups = 4;                       // warpgroups per block
constexpr int kWgMaxDepth = 8;
constexpr int kFetchThreads = 64;
constexpr int kRingBarriers = 4 * kWgMaxGroups * kWgMaxDepth;  // full and empty, of weights and of x

struct WgmmaParams {
  CUtensorMap codes_map, x_map;
  const void *codes, *x;  // what the maps describe
  const uint8_t* block_scales;
  void* y;
  const float* global_scales;
  float global_scale;
  int tokens, rows, k, output_is_float;
  int row_groups, k_groups, cluster;
  int stages_each, stages_left;  // K stages per participant, and how many take one more
  int depth, x_depth;            // ring stages of weights and of x
  int scale_copy;                // bytes per copy of block scales: 16, 8, 4
  int units_each;                // units of sums that a participant finishes
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
      p.marks[((blockIdx.y * gridDim.x + blockIdx.x) * 20 + threadIdx.x / 32) * 16 + (i)] = clock64();       \
  } while (0)
#else
#define REQUANT_MARK(i)
#endif

template <Format FORMAT>
struct WgScales {
  static constexpr int kRow = FormatTraits<FORMAT>::kStageScales;  // bytes per row and stage
  static constexpr int kTile = kWgRows * kRow;
};

// 8 codes that a lane gathered -> BF16 pairs of two k steps, times the block scales of the first and of the second 16 k.
template <Format FORMAT>
__device__ __forceinline__ void decode_scaled(uint32_t codes, __nv_bfloat162 first, __nv_bfloat162 second,
                                              uint32_t (&pairs)[4]) {
  decode_e2m1_bf16(codes, pairs);
  if constexpr (FORMAT == Format::kMxfp4) {
    const __nv_bfloat162 lift = __float2bfloat162_rn(0x1p126f);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = multiply_bf162(pairs[i], lift);
  }
  pairs[0] = multiply_bf162(pairs[0], first);
  pairs[1] = multiply_bf162(pairs[1], first);
  pairs[2] = multiply_bf162(pairs[2], second);
  pairs[3] = multiply_bf162(pairs[3], second);
}

// Four block scales of NVFP4 -> BF16 pairs (0, 2) and (1, 3), times 2^110.
__device__ __forceinline__ void lift_e4m3(uint32_t bytes, bool special, __nv_bfloat162 (&pairs)[2]) {
  if (special) {
    const __nv_bfloat162 low = decode_e4m3x2_bf16(bytes), high = decode_e4m3x2_bf16(bytes >> 16);
    pairs[0] = __lows2bfloat162(low, high);
    pairs[1] = __highs2bfloat162(low, high);
  } else {
    const __nv_bfloat162 lift = __float2bfloat162_rn(0x1p115f);
    const uint32_t even = (bytes & 0x007F007Fu) << 4, odd = (bytes >> 4) & 0x07F007F0u;
    const uint32_t a = multiply_bf162(multiply_bf162(even, lift), lift);
    const uint32_t b = multiply_bf162(multiply_bf162(odd, lift), lift);
    pairs[0] = *reinterpret_cast<const __nv_bfloat162*>(&a);
    pairs[1] = *reinterpret_cast<const __nv_bfloat162*>(&b);
  }
}

// Two block scales of MXFP4 -> one BF16 pair.
__device__ __forceinline__ __nv_bfloat162 lift_e8m0x2(uint32_t bytes, bool special) {
  uint32_t pair = permute_bytes(bytes, 0, 0x4140) << 7;  // bytes 0 and 1 to the bottom of a half each
  if (special) {
    const uint32_t low = bytes & 0xFFu, high = (bytes >> 8) & 0xFFu;
    pair |= low == 0 ? 0x0040u : low == 255 ? 0x0040u : 0u;  // 2^-127, and NaN instead of infinity
    pair |= high == 0 ? 0x00400000u : high == 255 ? 0x00400000u : 0u;
  }
  return *reinterpret_cast<const __nv_bfloat162*>(&pair);
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

// The warp that fetches codes and block scales.
template <Format FORMAT>
__device__ __forceinline__ void fetch_weights(const WgmmaParams& p, uint32_t shared, const WgBarriers& barriers, int rank,
                                              int lane) {
  constexpr int kRow = WgScales<FORMAT>::kRow;
  const int groups = p.row_groups * p.k_groups, pitch = p.k / FormatTraits<FORMAT>::kGroup;
  const int width = min(p.scale_copy, kRow), shift = __ffs(kRow / width) - 1;  // copies per row, a power of two
  const int part = (lane & ((1 << shift) - 1)) * width, lane_row = lane >> shift, rows_at_once = 32 >> shift;
  RingPlace at;
  const int most = wg_stages(p, rank * p.k_groups);
#pragma unroll 1
  for (int i = 0; i < most; ++i) {
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      const int k_group = group / p.row_groups, row_group = group - k_group * p.row_groups;
      const int participant = rank * p.k_groups + k_group;
      if (i >= wg_stages(p, participant)) continue;
      const int stage = wg_first_stage(p, participant) + i, row = (blockIdx.y * p.row_groups + row_group) * kWgRows;
      const int place = group * p.depth + at.slot;
      const uint32_t full = barriers.weights(0, group, at.slot);
      barrier_wait(barriers.weights(1, group, at.slot), at.parity ^ 1);
      if (lane == 0) {
        barrier_expect(full, kWgTileBytes);
        copy_box(shared + p.codes_offset + place * kWgTileBytes, &p.codes_map, full, stage * kLine, row);
      }
      __syncwarp();
      const int column = stage * kRow + part;
      const uint8_t* from = p.block_scales + static_cast<size_t>(row + lane_row) * pitch + column;
      const uint32_t to = shared + p.scales_offset + place * WgScales<FORMAT>::kTile + lane_row * kRow + part;
#pragma unroll 2
      for (int r = 0; r < kWgRows; r += rows_at_once) {
        const bool inside = row + lane_row + r < p.rows && column < pitch;
        const uint8_t* source = inside ? from + static_cast<size_t>(r) * pitch : p.block_scales;
        if (width == 16) {
          copy_async<16>(to + r * kRow, source, inside ? 16 : 0);
        } else if (width == 8) {
          copy_async<8>(to + r * kRow, source, inside ? 8 : 0);
        } else {
          copy_async<4>(to + r * kRow, source, inside ? 4 : 0);
        }
      }
      barrier_arrive_after_copies(full);
    }
    at.next(p.depth);
  }
}

// The warp that fetches x: one box of 64 k per swizzled row.
template <int TOKENS>
__device__ __forceinline__ void fetch_x(const WgmmaParams& p, uint32_t shared, const WgBarriers& barriers, int rank,
                                        int lane) {
  constexpr int kBox = TOKENS * kBlockK * 2;
  RingPlace at;
  const int most = wg_stages(p, rank * p.k_groups);
#pragma unroll 1
  for (int i = 0; i < most; ++i) {
#pragma unroll 1
    for (int group = 0; group < p.k_groups; ++group) {
      const int participant = rank * p.k_groups + group;
      if (i >= wg_stages(p, participant)) continue;
      const int stage = wg_first_stage(p, participant) + i;
      const uint32_t full = barriers.x(0, group, at.slot);
      barrier_wait(barriers.x(1, group, at.slot), at.parity ^ 1);
      if (lane == 0) {
        barrier_expect(full, kStageBlocks * kBox);
        const uint32_t to = shared + (group * p.x_depth + at.slot) * kStageBlocks * kBox;
#pragma unroll
        for (int b = 0; b < kStageBlocks; ++b) {
          copy_box(to + b * kBox, &p.x_map, full, stage * kStageK + b * kBlockK, 0);
        }
      }
      __syncwarp();
    }
    at.next(p.x_depth);
  }
}

// One warpgroup's share of K: decode and multiply.
template <Format FORMAT, int TOKENS>
__device__ __forceinline__ void consume(const WgmmaParams& p, uint8_t* shared, const WgBarriers& barriers, int group,
                                        int k_group, int stages, int warp, int lane, float (&sums)[TOKENS / 2]) {
  constexpr int kRow = WgScales<FORMAT>::kRow, kBox = TOKENS * kBlockK * 2;
  const int g = lane >> 2, q = lane & 3;
  const uint32_t select = q | (q + 4) << 4;  // byte q of two words
  const uint8_t* const codes0 = shared + p.codes_offset + group * p.depth * kWgTileBytes + (warp * 16 + g) * kLine;
  const uint8_t* const scales0 =
      shared + p.scales_offset + group * p.depth * WgScales<FORMAT>::kTile + (warp * 16 + g) * kRow;
  const uint32_t x0 = shared_address(shared) + k_group * p.x_depth * kStageBlocks * kBox;
  RingPlace at, x_at;
  int x_before = 0;
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    barrier_wait(barriers.weights(0, group, at.slot), at.parity);
    const uint8_t* codes = codes0 + at.slot * kWgTileBytes;
    const uint8_t* scales = scales0 + at.slot * WgScales<FORMAT>::kTile;
    bool special;
    {
      const uint32_t mine = special_scales<FORMAT>(*reinterpret_cast<const uint32_t*>(scales + q % (kRow / 4) * 4)) |
                            special_scales<FORMAT>(*reinterpret_cast<const uint32_t*>(scales + 8 * kRow + q % (kRow / 4) * 4));
      special = __any_sync(~0u, mine != 0);
    }
    uint64_t x = kSwizzledRows | ((x0 + x_at.slot * kStageBlocks * kBox) >> 4);
#pragma unroll 1
    for (int b = 0; b < kStageBlocks; ++b) {
      uint4 low[2], high[2];  // rows g and g + 8, 32 k each
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint8_t* at_chunk = codes + (((2 * b + j) ^ g) << 4);
        low[j] = *reinterpret_cast<const uint4*>(at_chunk);
        high[j] = *reinterpret_cast<const uint4*>(at_chunk + 8 * kLine);
      }
      __nv_bfloat162 scale_low[2], scale_high[2];
      if constexpr (FORMAT == Format::kNvfp4) {
        lift_e4m3(*reinterpret_cast<const uint32_t*>(scales + b * 4), special, scale_low);
        lift_e4m3(*reinterpret_cast<const uint32_t*>(scales + b * 4 + 8 * kRow), special, scale_high);
      } else {
        scale_low[0] = lift_e8m0x2(*reinterpret_cast<const uint16_t*>(scales + b * 2), special);
        scale_high[0] = lift_e8m0x2(*reinterpret_cast<const uint16_t*>(scales + b * 2 + 8 * kRow), special);
      }
      const auto gather = [select](const uint4& v) {
        return permute_bytes(permute_bytes(v.x, v.y, select), permute_bytes(v.z, v.w, select), 0x5410);
      };
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t above[4], below[4];
        if constexpr (FORMAT == Format::kNvfp4) {
          const auto half = [j](__nv_bfloat162 v) { return j == 0 ? __low2bfloat162(v) : __high2bfloat162(v); };
          decode_scaled<FORMAT>(gather(low[j]), half(scale_low[0]), half(scale_low[1]), above);
          decode_scaled<FORMAT>(gather(high[j]), half(scale_high[0]), half(scale_high[1]), below);
        } else {
          const auto half = [j](__nv_bfloat162 v) { return j == 0 ? __low2bfloat162(v) : __high2bfloat162(v); };
          decode_scaled<FORMAT>(gather(low[j]), half(scale_low[0]), half(scale_low[0]), above);
          decode_scaled<FORMAT>(gather(high[j]), half(scale_high[0]), half(scale_high[0]), below);
        }
        if (j == 0 && b == 0) barrier_wait(barriers.x(0, k_group, x_at.slot), x_at.parity);
        wgmma_fence();
        const uint32_t first[4] = {above[0], below[0], above[1], below[1]};
        const uint32_t second[4] = {above[2], below[2], above[3], below[3]};
        Wgmma<TOKENS>::run(sums, first, x + j * 4);
        Wgmma<TOKENS>::run(sums, second, x + j * 4 + 2);
        wgmma_commit();
        wgmma_wait<1>();  // frees the registers of the pair before
        if (j == 0 && b == 0 && i > 0 && lane == 0) barrier_arrive(barriers.x(1, k_group, x_before));
      }
      x += kBox >> 4;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.weights(1, group, at.slot));
    x_before = x_at.slot;
    at.next(p.depth);
    x_at.next(p.x_depth);
  }
  wgmma_wait<0>();
}

// Block: row_groups x k_groups warpgroups and two warps; grid: (cluster, tiles of row_groups * 64 rows).
template <Format FORMAT, int TOKENS>
__global__ void __launch_bounds__(kWgMaxGroups * kWgThreads + kFetchThreads, 1)
    w4a16_wgmma_kernel(const __grid_constant__ WgmmaParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t tiles[];
  uint8_t* const shared = tiles;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
  const int groups = p.row_groups * p.k_groups, rank = blockIdx.x;
  const WgBarriers barriers{shared_address(shared) + p.barriers_offset};
  if (warp == 0) {
    for (int i = lane; i < kRingBarriers; i += 32) {
      const int kind = i / (kWgMaxGroups * kWgMaxDepth);  // weights full, weights empty, x full, x empty
      barrier_init(barriers.base + i * 8, kind == 0 ? 33 : kind == 1 ? 4 : kind == 2 ? 1 : 4 * p.row_groups);
    }
    barrier_init_fence();
  }
  REQUANT_MARK(0);
  __syncthreads();
  if (p.cluster > 1) cluster_arrive();
  float sums[TOKENS / 2];
  const int k_group = group / p.row_groups, row_group = group - k_group * p.row_groups;
  if (group >= groups) {
    if (warp == groups * 4) {
      if (lane == 0) prefetch_map(&p.codes_map);
      if (!p.constant_weights) wait_for_previous_kernel();
      allow_next_kernel();
      fetch_weights<FORMAT>(p, shared_address(shared), barriers, rank, lane);
      wait_for_previous_kernel();
    } else {
      if (lane == 0) prefetch_map(&p.x_map);
      wait_for_previous_kernel();
      allow_next_kernel();
      fetch_x<TOKENS>(p, shared_address(shared), barriers, rank, lane);
    }
    __syncwarp();
  } else {
    wait_for_previous_kernel();
    allow_next_kernel();
    REQUANT_MARK(1);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
    consume<FORMAT, TOKENS>(p, shared, barriers, group, k_group, wg_stages(p, rank * p.k_groups + k_group), warp % 4, lane,
                            sums);
    REQUANT_MARK(2);
  }

  // Sums meet. A unit is two tokens of one row and lane; participant u / units_each finishes unit u of the tile.
  const int participants = p.cluster * p.k_groups, me = rank * p.k_groups + k_group, thread = threadIdx.x % kWgThreads;
  constexpr int kUnits = TOKENS / 4, kUnitBytes = kWgThreads * 8;
  const int units = p.units_each;
  if (p.cluster > 1) cluster_wait();  // the other blocks have started
  if (group < groups) {
    int owner = 0, within = 0;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (owner != me) {
        const int block = owner / p.k_groups, slot = (owner - block * p.k_groups) * p.row_groups + row_group;
        const uint32_t to = shared_address(shared) + p.sums_offset +
                            ((slot * participants + me) * units + within) * kUnitBytes + thread * 8;
        store_pair_to_block(to, block, sums[2 * u], sums[2 * u + 1]);
      }
      if (++within == units) {
        within = 0;
        ++owner;
      }
    }
  }
  if (p.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  REQUANT_MARK(3);
  if (group >= groups) return;
  float scale = p.global_scale;
  if (p.global_scales != nullptr) scale *= __ldg(p.global_scales);
  if (!(scale > 0.0f)) scale = __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
  const int row0 = (blockIdx.y * p.row_groups + row_group) * kWgRows + warp % 4 * 16 + (lane >> 2);
  const uint8_t* const mine = shared + p.sums_offset + group * participants * units * kUnitBytes + thread * 8;
  int owner = 0, within = 0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (owner == me) {
      float2 v = make_float2(0.0f, 0.0f);
#pragma unroll 1
      for (int from = 0; from < participants; ++from) {
        float2 term = make_float2(sums[2 * u], sums[2 * u + 1]);
        if (from != me) term = *reinterpret_cast<const float2*>(mine + (from * units + within) * kUnitBytes);
        v.x = from == 0 ? term.x : v.x + term.x;
        v.y = from == 0 ? term.y : v.y + term.y;
      }
      const int row = row0 + u % 2 * 8, token = u / 2 * 8 + (lane & 3) * 2;
      if (row < p.rows) {
        constexpr float kFactor = FORMAT == Format::kNvfp4 ? kBf16CodeFactor : 1.0f;
        v.x = v.x * kFactor * scale;
        v.y = v.y * kFactor * scale;
        const size_t to = static_cast<size_t>(token) * p.rows + row;
        if (p.output_is_float) {
          float* y = static_cast<float*>(p.y) + to;
          if (token < p.tokens) y[0] = v.x;
          if (token + 1 < p.tokens) y[p.rows] = v.y;
        } else {
          __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + to;
          if (token < p.tokens) y[0] = __float2bfloat16(v.x);
          if (token + 1 < p.tokens) y[p.rows] = __float2bfloat16(v.y);
        }
      }
    }
    if (++within == units) {
      within = 0;
      ++owner;
    }
  }
  REQUANT_MARK(4);
#endif
}

}  // namespace requant
