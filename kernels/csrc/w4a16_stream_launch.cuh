// Host side of w4a16_stream.cuh: the variants that are compiled in, tensor maps, shared memory, launch.
#pragma once
#include <cuda_runtime.h>

#include "w4a16_stream.cuh"
#include "w4a16_wgmma_launch.cuh"

namespace requant {

struct StreamVariant {
  Format format;
  Alignment alignment;
  int row_tiles, depth, warps, box_bytes;
  void (*kernel)(Params, TensorMaps);
};

template <Format FORMAT, Alignment ALIGNMENT, int ROW_TILES, int DEPTH, int WARPS>
constexpr StreamVariant stream_variant() {
  return {FORMAT, ALIGNMENT, ROW_TILES, DEPTH, WARPS, ScaleBox<FORMAT, ROW_TILES, ALIGNMENT>::kBytes,
          w4a16_stream_kernel<FORMAT, ROW_TILES, WARPS, DEPTH, ALIGNMENT>};
}

// Those that kernels/w4a16_configs.py asks for.
#define STREAMS(FORMAT)                                                                                             \
  stream_variant<FORMAT, Alignment::kScale16, 1, 4, 12>(), stream_variant<FORMAT, Alignment::kScale16, 2, 3, 8>(),   \
      stream_variant<FORMAT, Alignment::kScale8, 2, 3, 8>(), stream_variant<FORMAT, Alignment::kScale4, 2, 3, 8>()

constexpr StreamVariant kStreams[] = {
    STREAMS(Format::kNvfp4), STREAMS(Format::kMxfp4),
#ifdef REQUANT_SWEEP
#include "w4a16_sweep_streams.inc"
#endif
};
constexpr int kStreamCount = sizeof(kStreams) / sizeof(kStreams[0]);

// Two-dimensional map of `rows` rows of `bytes` bytes, for boxes of box_bytes x box_rows; false where the driver has none.
// The L2 fetches 256 bytes at a time, since a box's neighbour along K is wanted next.
inline bool make_map(CUtensorMap* map, const void* from, uint64_t bytes, uint64_t rows, uint32_t box_bytes, uint32_t box_rows,
              CUtensorMapSwizzle swizzle) {
  const EncodeTiled encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[] = {bytes, rows}, strides[] = {bytes};
  const cuuint32_t box[] = {box_bytes, box_rows}, steps[] = {1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(from), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// 0, or a code of requant_w4a16. `p` holds pointers and sizes.
inline int launch_stream(Params p, Format format, Alignment alignment, int row_tiles, int depth, int warps, int experts,
                         int blocks, int early_start, int most_shared, cudaStream_t stream) {
  const StreamVariant* chosen = nullptr;
  for (const StreamVariant& v : kStreams) {
    if (v.format == format && v.alignment == alignment && v.row_tiles == row_tiles && v.depth == depth && v.warps == warps) {
      chosen = &v;
    }
  }
  if (chosen == nullptr) return -1;
  const int group = format == Format::kNvfp4 ? 16 : 32, rows = kTileRows * row_tiles, pitch = p.k / group;
  if (alignment != Alignment::kScale16 && p.rows * pitch % 16 != 0) return -8;
  p.row_groups = (p.rows + rows - 1) / rows;
  p.all_rows = p.rows * experts;
  p.column_warps = p.cluster = 1;
  p.row_warps = warps;
  p.stages_each = (p.k + kStageK - 1) / kStageK;
  p.x_bytes = 2 * p.stages_each * kStageXBytes;  // two of them, or one of kStreamTokens
  p.stream_scales_offset = warps * depth * rows * kLine;
  p.x_offset = p.stream_scales_offset + warps * depth * chosen->box_bytes;
  p.sums_offset = p.x_offset + kStreamTokens * p.stages_each * kStageXBytes;
  p.largest_offset = p.sums_offset + warps * 2 * kStreamTokens * rows * 4;
  p.zeros_offset = p.largest_offset + 2 * kStreamTokens * 4;
  p.barriers_offset = p.zeros_offset + 1024;
  const int shared = p.barriers_offset + warps * depth * 8;
  if (shared > most_shared) return -2;
  TensorMaps maps = {};
  const uint64_t all_rows = static_cast<uint64_t>(p.rows) * experts;
  const int wanted = kScaleStages * kStageK / group;
  if (!make_map(&maps.codes, p.codes, p.k / 2, all_rows, kLine, rows, CU_TENSOR_MAP_SWIZZLE_128B)) return -6;
  if (alignment == Alignment::kScale16 &&
      !make_map(&maps.scales, p.block_scales, pitch, all_rows, wanted, rows,
                wanted == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE)) {
    return -6;
  }
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(chosen->kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1, blocks);
  config.blockDim = dim3(32, 1, warps);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = early_start ? 1 : 0;
  error = cudaLaunchKernelEx(&config, chosen->kernel, p, maps);
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace requant
