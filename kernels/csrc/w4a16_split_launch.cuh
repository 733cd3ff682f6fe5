// Host side of w4a16_split.cuh: the variants that are compiled in, shared memory, launch.
#pragma once
#include <cuda_runtime.h>

#include "w4a16_split_turns.cuh"
#include "w4a16_wgmma_launch.cuh"

namespace requant {

struct SplitVariant {
  Format format;
  int k, warps, depth, slot_bytes;
  int code_box, scale_box;  // bytes of a row's boxes; 0: no tensor maps
  void (*kernel)(Params, TensorMaps);
  void (*extra)(Params, TensorMaps);
  int extra_warps;  // of its blocks
};

constexpr int kSplitFinishers = 4;

template <Format FORMAT, int STEPS, int WARPS, int DEPTH>
constexpr SplitVariant split_variant() {
  using Tile = SplitTile<FORMAT, STEPS, WARPS>;
  SplitVariant v = {FORMAT, Tile::kK, WARPS, DEPTH, Tile::kSlotBytes, Tile::kWhole ? 0 : Tile::kPitch,
                    Tile::kWhole ? 0 : Tile::kScalePitch, w4a16_split_kernel<FORMAT, STEPS, WARPS, DEPTH, false>};
  if constexpr (FORMAT == Format::kNvfp4 && WARPS == 15 && DEPTH >= kSplitFinishers && DEPTH < 8) {  // where it was measured
    v.extra = w4a16_split_turns_kernel<FORMAT, STEPS, WARPS, kSplitFinishers, DEPTH>;
    v.extra_warps = WARPS + kSplitFinishers + 1;
  } else {
    v.extra = w4a16_split_kernel<FORMAT, STEPS, WARPS, DEPTH, true>;
    v.extra_warps = WARPS + 1;
  }
  return v;
}

// Those that kernels/w4a16_configs.py asks for.
constexpr SplitVariant kSplits[] = {
    split_variant<Format::kNvfp4, 3, 15, 4>(), split_variant<Format::kNvfp4, 4, 16, 3>(), split_variant<Format::kNvfp4, 4, 8, 4>(),
    split_variant<Format::kMxfp4, 3, 15, 4>(), split_variant<Format::kMxfp4, 4, 16, 3>(), split_variant<Format::kMxfp4, 4, 8, 4>(),
#ifdef REQUANT_SWEEP
#include "w4a16_sweep_splits.inc"
#endif
};
constexpr int kSplitCount = sizeof(kSplits) / sizeof(kSplits[0]);

// Boxes of box_rows rows x `box` bytes, of rows of `bytes` bytes; what lies past a row's end arrives as zeros.
inline bool make_split_map(CUtensorMap* map, const void* from, uint64_t bytes, uint64_t rows, int box, uint32_t box_rows) {
  const EncodeTiled encode = tensor_map_encoder();
  const cuuint64_t sizes[] = {bytes / 8, rows}, strides[] = {bytes};
  const cuuint32_t boxes[] = {static_cast<cuuint32_t>(box / 8), box_rows}, steps[] = {1, 1};
  return encode != nullptr && encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT64, 2, const_cast<void*>(from), sizes, strides, boxes, steps,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// 0, or a code of requant_w4a16. `p` holds pointers and sizes.
inline int launch_split(const Params& p, Format format, int experts, int depth, int warps, int blocks, int early_start,
                        int most_shared, cudaStream_t stream) {
  const SplitVariant* chosen = nullptr;
  for (const SplitVariant& v : kSplits) {
    if (v.format == format && v.k == p.k && v.depth == depth && v.warps == warps) chosen = &v;
  }
  if (chosen == nullptr) return -1;
  const int scale_bytes = p.k / (format == Format::kNvfp4 ? 16 : 32);
  if (p.rows * scale_bytes % 16 != 0) return -8;
  const bool extra = p.settled || p.bias != nullptr || p.gating != Gating::kNone;
  if (extra && p.rows % kTileRows != 0) return -9;
  TensorMaps maps = {};
  const uint32_t box_rows = extra ? kTileRows / 2 : kTileRows;
  const uint64_t all_rows = static_cast<uint64_t>(p.rows) * experts;
  if (chosen->code_box > 0 && (!make_split_map(&maps.codes, p.codes, p.k / 2, all_rows, chosen->code_box, box_rows) ||
                               !make_split_map(&maps.scales, p.block_scales, scale_bytes, all_rows, chosen->scale_box, box_rows))) {
    return -6;
  }
  Params q = p;
  q.row_groups = (p.rows + kTileRows - 1) / kTileRows;
  const int shared = depth * (chosen->slot_bytes + 16);
  if (shared > most_shared) return -2;
  const auto kernel = extra ? chosen->extra : chosen->kernel;
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1, blocks);
  config.blockDim = dim3(32, 1, extra ? chosen->extra_warps : warps + 1);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = early_start ? 1 : 0;
  error = cudaLaunchKernelEx(&config, kernel, q, maps);
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace requant
