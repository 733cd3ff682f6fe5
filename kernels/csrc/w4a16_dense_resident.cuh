// Dense NVFP4 layers of one token whose weights are in registers, half decoded, before x is there.
//
// Why beside w4a16_dense.cuh: in a decode step a layer of 5120 x 2880 had its weights in shared memory 2.4 us before the kernel
// before it ended, then took 0.5 us to fetch x, 2.2 to decode and multiply and 0.4 to add up (an H200, %globaltimer). Decoding
// needs no x. So here each warp holds its stage of 32 or 48 rows x 256 k in registers: of each code the high byte of a half (32
// registers for 16 rows; whole halves would take 64, and all of a multiprocessor's have room for no more). What is left when x
// comes is 4 instructions for 8 codes where w4a16_tile.cuh has 11, the products, and the sums. A warp makes the x of its stage
// for itself, and reads it once for all of its rows.
#pragma once
#include "w4a16_dense_weights.cuh"
#include "w4a16_dense_x.cuh"
#include "w4a16_sums.cuh"
#include "w4a16_tile.cuh"

namespace requant {

constexpr int resident_threads(int tiles) { return tiles == 2 ? 512 : 384; }  // 128 and 168 registers each

// 16 rows x 256 k. Lane (g, p) has k = 64p .. 64p + 63 of rows g and g + 8, as in w4a16_tile.cuh.
struct ResidentTile {
  uint32_t even[2][4][2], odd[2][4][2];  // [16-byte piece][word][row]: codes 0 2 4 6 and 1 3 5 7 as high bytes of halves
  uint32_t scales[2];                    // of four groups

  template <int SCALE_PITCH>
  __device__ __forceinline__ void decode(const uint8_t* codes, const uint8_t* scale_rows, int lane) {
    const int g = lane >> 2, p = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scales[h] = *reinterpret_cast<const uint32_t*>(scale_rows + (g + h * 8) * SCALE_PITCH + p * 4);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 piece = *reinterpret_cast<const uint4*>(codes + (g + h * 8) * kLine + (((2 * p + j) ^ g) << 4));
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          odd[j][w][h] = opaque((words[w] & 0x80808080u) | ((words[w] >> 3) & 0x0E0E0E0Eu));
          even[j][w][h] = opaque(((words[w] << 4) & 0x80808080u) | ((words[w] << 1) & 0x0E0E0E0Eu));
        }
      }
    }
  }

  // dot += the products with word w of piece j; b: x.
  __device__ __forceinline__ void multiply(float (&dot)[4], const uint4& b, int j, int w) const {
    const uint32_t a0[4] = {__byte_perm(even[j][w][0], 0, 0x2404), __byte_perm(even[j][w][1], 0, 0x2404),
                            __byte_perm(odd[j][w][0], 0, 0x2404), __byte_perm(odd[j][w][1], 0, 0x2404)};
    const uint32_t a1[4] = {even[j][w][0] & 0xFF00FF00u, even[j][w][1] & 0xFF00FF00u, odd[j][w][0] & 0xFF00FF00u,
                            odd[j][w][1] & 0xFF00FF00u};
    mma_f16(dot, a0, b.x, b.y, dot);
    mma_f16(dot, a1, b.z, b.w, dot);
  }

  __device__ __forceinline__ float group_scale(int row, int group) const {
    const float2 two = __half22float2(decode_e4m3x2(group < 2 ? scales[row] : scales[row] >> 16));
    return group % 2 == 0 ? two.x : two.y;
  }
};

// Block: (32, warps), a warp for each stage of K; grid: (1, row groups of 16 TILES). `codes`: their tensor map, in boxes of so
// many rows x 128.
template <Alignment ALIGNMENT, int TILES>
__global__ void __launch_bounds__(resident_threads(TILES), 1)
    w4a16_dense_resident_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap codes) {
#if __CUDA_ARCH__ >= 900
  constexpr Format kFormat = Format::kNvfp4;
  constexpr int kRows = TILES * kTileRows, kScales = FormatTraits<kFormat>::kStageScales;
  using Tile = WarpTile<kFormat, 1, TILES, 1, ALIGNMENT>;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* const shared = memory;
  const int lane = threadIdx.x, warp = __shfl_sync(~0u, threadIdx.y, 0);
  // Nothing before the wait reads memory, unless the weights are constant.
  if (warp == 0 && lane == 0) prefetch_map(&codes);
  if (warp < 2) reinterpret_cast<uint4*>(shared + p.zeros_offset)[warp * 32 + lane] = make_uint4(0, 0, 0, 0);
  const Share share = share_of_k(p, warp);
  UnitCursor<false> cursor(p);
  BoxedWeights<kFormat, TILES, 1, ALIGNMENT> weights(p, &codes, cursor, shared, share, warp, 0, lane);
  ScaledX<kFormat, 1, 1> scaled_x(p, warp, p.column_warps, lane, 0, p.stages_each);
  uint8_t* const x = shared + p.x_offset;
  float* const restore = reinterpret_cast<float*>(shared + p.largest_offset);
  float* const totals = reinterpret_cast<float*>(shared + p.sums_offset);
  constexpr int kPitch = totals_pitch(kRows);
  // Zeros from other banks than x: a piece is 16 bytes of 64.
  const bool reads = (lane >> 3) == (lane & 3);
  const uint8_t* const source = reads ? x + warp * kStageXBytes + (lane & 3) * kPiece : shared + p.zeros_offset + 64;

  if (!p.constant_weights) wait_for_previous_kernel();
  weights.fill(p);
  const float whole = p.global_scales == nullptr ? 1.0f : __ldcg(p.global_scales);
  __syncthreads();  // zeros are whole
  ResidentTile held[TILES];
  if (share.mine > 0) {
    weights.land(0);
#pragma unroll
    for (int r = 0; r < TILES; ++r) {
      held[r].template decode<kScales>(weights.codes(0) + r * kTileRows * kLine, weights.scales(0) + r * kTileRows * kScales, lane);
    }
  }
  if (p.constant_weights) wait_for_previous_kernel();
  scaled_x.load();
  allow_next_kernel();
  scaled_x.finish(p, x, restore, 0, p.stages_each);
  __syncwarp();

  Tile tile;
  tile.clear_totals();
  if (share.mine > 0) {
    const float of = restore[warp];
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      float dot[TILES][4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = group / 2, w = group % 2 * 2 + i;
        const uint4 b = *reinterpret_cast<const uint4*>(source + (j * 4 + w) * 64);
#pragma unroll
        for (int r = 0; r < TILES; ++r) held[r].multiply(dot[r], b, j, w);
      }
#pragma unroll
      for (int r = 0; r < TILES; ++r) {
        tile.totals[r][0] += held[r].group_scale(0, group) * dot[r][0];
        tile.totals[r][2] += held[r].group_scale(1, group) * dot[r][2];
      }
    }
#pragma unroll
    for (int r = 0; r < TILES; ++r) tile.totals[r][0] *= of, tile.totals[r][2] *= of;
  }
  tile.put_totals(totals + warp * kPitch, kPitch, lane);
  __syncthreads();
  const int local_row = warp * 32 + lane, at = static_cast<int>(blockIdx.y) * kRows + local_row;
  if (local_row < kRows) {
    float v = 0.0f;
#pragma unroll 4
    for (int c = 0; c < p.column_warps; ++c) v += totals[c * kPitch + local_row];
    const float scale = p.global_scale * whole;
    v *= scale > 0.0f ? scale : __uint_as_float(0x7FC00000u);  // zero, negative or NaN: poison, never a wrong number
    if (at < p.rows) {
      if (p.output_is_float) {
        static_cast<float*>(p.y)[at] = v;
      } else {
        static_cast<__nv_bfloat16*>(p.y)[at] = __float2bfloat16(v);
      }
    }
  }
#endif
}

}  // namespace requant
