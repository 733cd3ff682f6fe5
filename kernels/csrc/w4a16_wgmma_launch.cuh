// Host side of w4a16_wgmma.cuh: the variants that are compiled in, tensor maps, shared memory, launch.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "w4a16_wgmma.cuh"

namespace requant {

struct WgmmaVariant {
  Format format;
  int tokens;
  int x_warps;
  void (*kernel)(WgmmaParams);
};

template <Format FORMAT, int TOKENS>
constexpr WgmmaVariant wgmma_variant() {
  return {FORMAT, TOKENS, kXWarps<TOKENS>, w4a16_wgmma_kernel<FORMAT, TOKENS>};
}

#define REQUANT_WGMMA_WIDTHS(FORMAT)                                                                   \
  wgmma_variant<FORMAT, 8>(), wgmma_variant<FORMAT, 16>(), wgmma_variant<FORMAT, 32>(), wgmma_variant<FORMAT, 64>()

constexpr WgmmaVariant kWgmmaVariants[] = {
    REQUANT_WGMMA_WIDTHS(Format::kNvfp4),
    REQUANT_WGMMA_WIDTHS(Format::kMxfp4),
};
#undef REQUANT_WGMMA_WIDTHS

// Bytes of shared memory, and the offsets in it: x, codes, block scales, sums, barriers. Swizzled tiles begin at multiples
// of 1024. The sums lie over the rings where both do not fit.
inline int wgmma_layout(WgmmaParams& p, Format format, int tokens, int most_shared) {
  const int groups = p.row_groups * p.k_groups, participants = p.cluster * p.k_groups;
  p.k_shift = p.k_groups == 4 ? 2 : p.k_groups / 2;
  p.tokens_shift = 1;
  while ((participants << p.tokens_shift) < tokens) ++p.tokens_shift;
  const int sums = groups * (participants << p.tokens_shift) * kSumsPitch * 4;
  p.codes_offset = p.k_groups * p.x_depth * (tokens == 64 ? kXBlocks<64> : kXBlocks<32>) * tokens * kBlockK * 2;
  p.scales_offset = p.codes_offset + groups * p.depth * kWgTileBytes;
  const int rings = p.scales_offset + groups * p.depth * kWgRows * kStageK / (format == Format::kNvfp4 ? 16 : 32);
  p.sums_share = rings + sums + kRingBarriers * 8 > most_shared;
  p.sums_offset = p.sums_share ? 0 : rings;
  p.barriers_offset = p.sums_share ? (rings > sums ? rings : sums) : rings + sums;
  return p.barriers_offset + kRingBarriers * 8;
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder of tensor maps, without linking the driver; null where it has none.
inline EncodeTiled tensor_map_encoder() {
  static const EncodeTiled encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(found) : nullptr;
  }();
  return encoder;
}

// A map whose innermost boxes are 128 bytes, swizzled in shared memory. L2 fetches twice that where rows are multiples of
// it: the next stage's; elsewhere that reads bytes twice (kernels/NOTES.md, 10b).
inline bool encode_map(CUtensorMap* map, CUtensorMapDataType type, const void* at, int rank, const cuuint64_t* sizes,
                       const cuuint64_t* pitches, const cuuint32_t* box) {
  const EncodeTiled encode = tensor_map_encoder();
  const cuuint32_t steps[3] = {1, 1, 1};
  const auto l2 = pitches[0] % 256 == 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  return encode != nullptr &&
         encode(map, type, rank, const_cast<void*>(at), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, l2, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Codes [rows][k / 2] in boxes of 64 rows x one line.
inline bool encode_codes(WgmmaParams& p) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(p.k / 2), static_cast<cuuint64_t>(p.rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(p.k / 2)};
  const cuuint32_t box[2] = {kLine, kWgRows};
  return encode_map(&p.codes_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.codes, 2, sizes, pitch, box);
}

// x [tokens][k] as [k / 64][tokens][64], in boxes of all tokens x a stage.
inline bool encode_x(WgmmaParams& p, int width) {
  const cuuint64_t sizes[3] = {kBlockK, static_cast<cuuint64_t>(p.tokens), static_cast<cuuint64_t>(p.k / kBlockK)};
  const cuuint64_t pitches[2] = {static_cast<cuuint64_t>(p.k) * 2, kBlockK * 2};
  const cuuint32_t box[3] = {kBlockK, static_cast<cuuint32_t>(width),
                             static_cast<cuuint32_t>(width == 64 ? kXBlocks<64> : kXBlocks<32>)};
  return encode_map(&p.x_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, p.x, 3, sizes, pitches, box);
}

// 0, or a code of requant_w4a16. `p` holds pointers, sizes and the configuration; `blocks` covers all rows.
inline int launch_wgmma(WgmmaParams& p, Format format, int blocks, int early_start, int most_shared, cudaStream_t stream) {
  const WgmmaVariant* chosen = nullptr;
  for (const WgmmaVariant& v : kWgmmaVariants) {
    if (v.format == format && v.tokens >= p.tokens && (chosen == nullptr || v.tokens < chosen->tokens)) chosen = &v;
  }
  if (chosen == nullptr || p.k % kBlockK != 0) return -1;
  const int groups = p.row_groups * p.k_groups;
  if (groups < 1 || groups > kWgMaxGroups || p.k_groups == 3) return -3;
  if (p.cluster < 1 || p.cluster > 8 || blocks * p.row_groups * kWgRows < p.rows) return -4;
  if (p.depth < 1 || p.depth > kWgMaxDepth || p.x_depth < 2 || p.x_depth > kWgMaxDepth) return -2;
  const int stages = (p.k + kStageK - 1) / kStageK, participants = p.cluster * p.k_groups;
  p.stages_each = stages / participants;
  p.stages_left = stages % participants;
  const int scale_pitch = p.k / (format == Format::kNvfp4 ? 16 : 32);
  p.scale_copy = scale_pitch % 16 == 0 ? 16 : scale_pitch % 8 == 0 ? 8 : 4;
  if (scale_pitch % p.scale_copy != 0) return -1;
  p.constant_weights = early_start == 2;
  const int shared = wgmma_layout(p, format, chosen->tokens, most_shared);
  if (shared > most_shared) return -2;
  if (!encode_codes(p) || !encode_x(p, chosen->tokens)) {
    return -6;
  }
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(chosen->kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.cluster, blocks);
  config.blockDim = dim3(groups * (kWgThreads + 32) + p.k_groups * chosen->x_warps * 32);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = p.cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = early_start ? 2 : 1;
  error = cudaLaunchKernelEx(&config, chosen->kernel, p);
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace requant
