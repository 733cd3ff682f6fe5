// Host side of W4A16: variants, launch, expert routing, and the C interface that kernels/w4a16.py loads.
//
// What is compiled in (VARIANTS below): per format and alignment, one kernel per token width; the division of a block
// into column and row warps, the cluster size and the ring's place in shared memory are run-time numbers, so a tuned
// configuration (kernels/w4a16_configs.py) needs no code of its own.
#include <cuda_runtime.h>

#include "w4a16_core.cuh"
#include "w4a16_stream.cuh"
#include "w4a16_wgmma_launch.cuh"

namespace requant {
namespace {

constexpr int kMaxShared = 227 * 1024;
constexpr int kWarp = 32;
constexpr int kConstantWeights = 2;  // RequantCall::early_start: 0 no, 1 the block may start early but reads nothing, 2

__host__ __device__ constexpr int padded_ints(int count) { return (count + 3) / 4 * 4; }

// ---- routing -------------------------------------------------------------------------------------------------------
// One block sorts slots by expert, stably, so the result never depends on timing. Layout of `routing` (ints):
//   [0] tiles, [1] slots with a valid expert, [2..3] 0
//   tiles: int4 {expert, first position in the slot list, tokens, first slot}, at most min(slots, experts + slots / tile_tokens)
//   slot list: slot numbers by expert; those with an expert id out of range come last
//   row list: for each entry of the slot list its token, slot / slots_per_token
__global__ void __launch_bounds__(1024) route_kernel(const int* __restrict__ expert_ids, int slots, int slots_per_token,
                                                     int experts, int tile_tokens, int max_tiles,
                                                     int* __restrict__ routing) {
  extern __shared__ int shared_ints[];
  // Each array starts on its own 16 bytes: the widest access, and what racecheck takes as one place.
  int* ids = shared_ints;                                  // [slots]
  int* counts = ids + padded_ints(slots);                  // [experts + 1], then first positions
  int* tiles_before = counts + padded_ints(experts + 1);   // [experts + 1]
  for (int s = threadIdx.x; s < slots; s += blockDim.x) {
    const int id = expert_ids[s];
    ids[s] = id >= 0 && id < experts ? id : experts;  // bucket `experts` holds the invalid ones
  }
  __syncthreads();
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
    int n = 0;
    for (int s = 0; s < slots; ++s) n += ids[s] == e;
    counts[e] = n;
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {  // exclusive prefix sums of slots and of tiles, 32 experts at a time
    int slot_base = 0, tile_base = 0;
    for (int base = 0; base <= experts; base += kWarp) {
      const int e = base + threadIdx.x, n = e <= experts ? counts[e] : 0;
      const int t = e < experts ? (n + tile_tokens - 1) / tile_tokens : 0;
      int n_sum = n, t_sum = t;
      for (int step = 1; step < kWarp; step *= 2) {
        const int n_up = __shfl_up_sync(~0u, n_sum, step), t_up = __shfl_up_sync(~0u, t_sum, step);
        if (static_cast<int>(threadIdx.x) >= step) {
          n_sum += n_up;
          t_sum += t_up;
        }
      }
      if (e <= experts) {
        counts[e] = slot_base + n_sum - n;
        tiles_before[e] = tile_base + t_sum - t;
      }
      slot_base += __shfl_sync(~0u, n_sum, kWarp - 1);
      tile_base += __shfl_sync(~0u, t_sum, kWarp - 1);
    }
  }
  __syncthreads();
  int4* tiles = reinterpret_cast<int4*>(routing + kRoutingHeader);
  int* list = routing + kRoutingHeader + 4 * max_tiles;
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
    const int begin = counts[e], end = e < experts ? counts[e + 1] : slots;
    if (begin == end) continue;
    int at = begin;
    for (int s = 0; s < slots; ++s) {
      if (ids[s] != e) continue;
      list[at] = s;
      list[slots + at++] = s / slots_per_token;
    }
    if (e == experts) continue;
    for (int first = begin, tile = tiles_before[e]; first < end; first += tile_tokens, ++tile) {
      tiles[tile] = make_int4(e, first, min(end - first, tile_tokens), list[first]);
    }
  }
  if (threadIdx.x == 0) {
    routing[0] = tiles_before[experts];
    routing[1] = counts[experts];
    routing[2] = routing[3] = 0;
  }
}

// What the card can read: nothing but 16-byte loads, eight in flight per thread. The ceiling that times are held against.
__global__ void __launch_bounds__(512) read_kernel(const uint4* __restrict__ from, size_t count, uint32_t* sink) {
  constexpr int kInFlight = 8;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  uint32_t seen = 0;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += kInFlight * stride) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      v[j] = i + j * stride < count ? __ldcs(from + i + j * stride) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (seen == 0x9E3779B9u) *sink = seen;  // keeps the loads alive
}

// ---- variants ------------------------------------------------------------------------------------------------------

struct Variant {
  Format format;
  Alignment alignment;
  int tokens;     // widest M; 0: grouped
  int row_tiles;  // 16-row tiles per warp
  int depth;      // ring stages
  int threads;    // most threads per block
  int slot_bytes;
  void (*kernel)(Params);
};

template <Format FORMAT, Alignment ALIGNMENT, int TOKENS, int ROW_TILES, int DEPTH, int THREADS, int BLOCKS>
constexpr Variant variant() {
  return {FORMAT,  ALIGNMENT, TOKENS, ROW_TILES, DEPTH, THREADS, Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>::kSlotBytes,
          w4a16_kernel<FORMAT, TOKENS, ROW_TILES, DEPTH, ALIGNMENT, THREADS, BLOCKS>};
}

// What the H200's table (kernels/w4a16_configs.py) asks for beyond WIDTHS: a deeper ring for few tokens, two row tiles
// per warp for many.
#define TUNED(ALIGNMENT)                                                                                    \
  variant<Format::kNvfp4, ALIGNMENT, 1, 1, 6, 512, 1>(), variant<Format::kNvfp4, ALIGNMENT, 2, 1, 6, 512, 1>(),       \
      variant<Format::kNvfp4, ALIGNMENT, 4, 1, 4, 512, 1>(), variant<Format::kNvfp4, ALIGNMENT, 8, 1, 4, 512, 1>(),   \
      variant<Format::kNvfp4, ALIGNMENT, 16, 1, 4, 512, 1>(), variant<Format::kNvfp4, ALIGNMENT, 32, 2, 3, 256, 1>(), \
      variant<Format::kNvfp4, ALIGNMENT, 64, 2, 3, 256, 1>()

#define WIDTHS(FORMAT, ALIGNMENT, DEPTH)                                                                           \
  variant<FORMAT, ALIGNMENT, 0, 1, DEPTH, 512, 1>(), variant<FORMAT, ALIGNMENT, 1, 1, DEPTH, 512, 1>(),            \
      variant<FORMAT, ALIGNMENT, 2, 1, DEPTH, 512, 1>(), variant<FORMAT, ALIGNMENT, 4, 1, DEPTH, 512, 1>(),        \
      variant<FORMAT, ALIGNMENT, 8, 1, DEPTH, 512, 1>(), variant<FORMAT, ALIGNMENT, 16, 1, DEPTH, 512, 1>(),       \
      variant<FORMAT, ALIGNMENT, 32, 1, DEPTH, 512, 1>(), variant<FORMAT, ALIGNMENT, 64, 1, DEPTH, 512, 1>()

constexpr Variant kVariants[] = {
    WIDTHS(Format::kNvfp4, Alignment::kScale16, 3),
    WIDTHS(Format::kNvfp4, Alignment::kScale8, 3),
    WIDTHS(Format::kNvfp4, Alignment::kScale4, 3),
    WIDTHS(Format::kNvfp4, Alignment::kGeneral, 3),
    WIDTHS(Format::kMxfp4, Alignment::kScale16, 3),
    WIDTHS(Format::kMxfp4, Alignment::kScale8, 3),
    WIDTHS(Format::kMxfp4, Alignment::kScale4, 3),
    WIDTHS(Format::kMxfp4, Alignment::kGeneral, 3),
    TUNED(Alignment::kScale16),
    TUNED(Alignment::kScale8),
#ifdef REQUANT_SWEEP  // candidates of a tuning run
#include "w4a16_sweep.inc"
#endif
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

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

int group_of(Format format) { return format == Format::kNvfp4 ? 16 : 32; }

int align_up(int value, int to) { return (value + to - 1) / to * to; }

}  // namespace
}  // namespace requant

using namespace requant;

namespace {

// Two-dimensional map of `rows` rows of `bytes` bytes, for boxes of box_bytes x box_rows; false where the driver has none.
bool make_map(CUtensorMap* map, const void* from, uint64_t bytes, uint64_t rows, uint32_t box_bytes, uint32_t box_rows,
              CUtensorMapSwizzle swizzle) {
  const EncodeTiled encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[] = {bytes, rows}, strides[] = {bytes};
  const cuuint32_t box[] = {box_bytes, box_rows}, steps[] = {1, 1};
  // The L2 fetches the box's neighbour along K with it, which is wanted next; not where that would reach into the next row.
  const CUtensorMapL2promotion ahead =
      bytes % 256 == 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(from), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, ahead, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

// Mirrored by ctypes in kernels/w4a16_library.py.
extern "C" {

struct RequantCall {
  const void *codes, *block_scales, *x;
  void* y;
  const void* global_scales;
  const void* routing;
  const void* slot_weights;
  float global_scale;
  int format, alignment, tokens, rows, k, experts, slots, x_row_per_slot, output_is_float;
  // configuration
  int row_tiles, depth, column_warps, row_warps, cluster, x_stages, blocks, early_start;
  int wgmma;  // 1: w4a16_wgmma.cuh, where column_warps and row_warps count warpgroups and x_stages is the depth of x's ring
  int stream;  // 1: the kernel of w4a16_stream.cuh
};

static int call_wgmma(const RequantCall& call, void* stream) {
  if (call.slots > 0) return -1;
  WgmmaParams p = {};
  p.codes = call.codes;
  p.x = call.x;
  p.block_scales = static_cast<const uint8_t*>(call.block_scales);
  p.y = call.y;
  p.global_scales = static_cast<const float*>(call.global_scales);
  p.global_scale = call.global_scale;
  p.tokens = call.tokens;
  p.rows = call.rows;
  p.k = call.k;
  p.output_is_float = call.output_is_float;
  p.row_groups = call.row_warps;
  p.k_groups = call.column_warps;
  p.cluster = call.cluster;
  p.depth = call.depth;
  p.x_depth = call.x_stages;
#ifdef REQUANT_MARKS
  p.marks = static_cast<long long*>(const_cast<void*>(call.slot_weights));
#endif
  return launch_wgmma(p, static_cast<Format>(call.format), call.blocks, call.early_start, kMaxShared,
                      static_cast<cudaStream_t>(stream));
}

// Tokens of one expert that share a pass over its weights: as many as the stream takes, unless experts get so many each
// that wide passes pay.
int requant_w4a16_tile_tokens(int slots, int experts) {
  return slots <= 2 * static_cast<int64_t>(experts) ? kStreamTokens : kGroupedTileTokens;
}

int requant_w4a16_tiles(int slots, int experts) {
  const int by_count = experts + slots / requant_w4a16_tile_tokens(slots, experts);
  return slots < by_count ? slots : by_count;
}

static Params params_of(const RequantCall* call, Format format) {
  Params p = {};
  p.codes = static_cast<const uint8_t*>(call->codes);
  p.block_scales = static_cast<const uint8_t*>(call->block_scales);
  p.x = static_cast<const __nv_bfloat16*>(call->x);
  p.y = call->y;
  p.global_scales = static_cast<const float*>(call->global_scales);
  p.global_scale = call->global_scale;
  p.tokens = call->tokens;
  p.rows = call->rows;
  p.k = call->k;
  p.output_is_float = call->output_is_float;
  p.slot_weights = static_cast<const float*>(call->slot_weights);
  p.scales_end = p.block_scales + static_cast<size_t>(call->experts) * call->rows * (call->k / group_of(format));
  if (call->slots > 0) {
    const int* routing = static_cast<const int*>(call->routing);
    p.tile_count = routing;
    p.max_tiles = requant_w4a16_tiles(call->slots, call->experts);
    p.slot_count = call->slots;
    p.tiles = reinterpret_cast<const int4*>(routing + kRoutingHeader);
    p.slots = routing + kRoutingHeader + 4 * requant_w4a16_tiles(call->slots, call->experts);
    p.slots_per_x = call->x_row_per_slot ? 1 : call->slots / call->tokens;
    p.x_rows = call->x_row_per_slot ? p.slots : p.slots + call->slots;
  }
  return p;
}

static int launch_stream(const RequantCall* call, void* stream) {
  const StreamVariant* chosen = nullptr;
  for (int i = 0; i < kStreamCount; ++i) {
    const StreamVariant& v = kStreams[i];
    if (static_cast<int>(v.format) == call->format && static_cast<int>(v.alignment) == call->alignment &&
        v.row_tiles == call->row_tiles && v.depth == call->depth && v.warps == call->row_warps) {
      chosen = &v;
    }
  }
  if (chosen == nullptr) return -1;
  if (call->slots == 0 || call->cluster != 1 || call->column_warps != 1) return -4;
  if (requant_w4a16_tile_tokens(call->slots, call->experts) > kStreamTokens) return -7;
  const int warps = chosen->warps, depth = chosen->depth, rows = kTileRows * chosen->row_tiles, pitch = call->k / group_of(chosen->format);
  Params p = params_of(call, chosen->format);
  if (chosen->alignment != Alignment::kScale16 && call->rows * pitch % 16 != 0) return -8;
  p.row_groups = (call->rows + rows - 1) / rows;
  p.all_rows = call->rows * call->experts;
  p.column_warps = p.cluster = 1;
  p.row_warps = warps;
  p.stages_each = (call->k + kStageK - 1) / kStageK;
  p.x_bytes = 2 * p.stages_each * kStageXBytes;  // two of them, or one of kStreamTokens
  p.stream_scales_offset = warps * depth * rows * kLine;
  p.x_offset = p.stream_scales_offset + warps * depth * chosen->box_bytes;
  p.sums_offset = p.x_offset + kStreamTokens * p.stages_each * kStageXBytes;
  p.largest_offset = p.sums_offset + warps * 2 * kStreamTokens * rows * 4;
  p.zeros_offset = p.largest_offset + 2 * kStreamTokens * 4;
  p.barriers_offset = p.zeros_offset + 1024;
  const int shared = p.barriers_offset + warps * depth * 8;
  if (shared > kMaxShared) return -2;
  TensorMaps maps = {};
  const uint64_t all_rows = static_cast<uint64_t>(call->rows) * call->experts;
  const int wanted = kScaleStages * kStageK / group_of(chosen->format);
  if (!make_map(&maps.codes, call->codes, call->k / 2, all_rows, kLine, rows, CU_TENSOR_MAP_SWIZZLE_128B)) return -6;
  if (chosen->alignment == Alignment::kScale16 &&
      !make_map(&maps.scales, call->block_scales, pitch, all_rows, wanted, rows,
                wanted == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE)) {
    return -6;
  }
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(chosen->kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1, call->blocks);
  config.blockDim = dim3(kWarp, 1, warps);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = call->early_start ? 1 : 0;
  error = cudaLaunchKernelEx(&config, chosen->kernel, p, maps);
  return error != cudaSuccess ? error : cudaGetLastError();
}

// 0 on success; -1 no such variant, -2 too much shared memory, -3 too many threads, -4 a cluster size other than 1, 2, 4, 8
// or one whose blocks would have to do more than one unit, -5 a block of one warp, -6 no tensor maps, -7 a stream whose experts
// may have more tokens than it takes, -8 one whose experts' block scales are no whole 16-byte pieces; else a cudaError_t.
int requant_w4a16(const RequantCall* call, void* stream) {
  if (call->wgmma) return call_wgmma(*call, stream);
  if (call->stream) return launch_stream(call, stream);
  const Variant* chosen = nullptr;
  for (int i = 0; i < kVariantCount; ++i) {
    const Variant& v = kVariants[i];
    const bool wide_enough = call->slots > 0 ? v.tokens == 0 : v.tokens >= call->tokens;
    if (static_cast<int>(v.format) != call->format || static_cast<int>(v.alignment) != call->alignment || !wide_enough ||
        v.row_tiles != call->row_tiles || v.depth != call->depth) {
      continue;
    }
    if (chosen == nullptr || v.tokens < chosen->tokens) chosen = &v;
  }
  if (chosen == nullptr) return -1;
  const bool grouped = chosen->tokens == 0;
  const int warps = call->column_warps * call->row_warps, width = grouped ? kGroupedTileTokens : chosen->tokens;
  if (warps < 2) return -5;
  if (warps * kWarp > chosen->threads) return -3;
  if (call->cluster != 1 && call->cluster != 2 && call->cluster != 4 && call->cluster != 8) return -4;
  const int rows_per_block = call->row_warps * call->row_tiles * kTileRows;
  if (call->cluster > 1 && (grouped || call->blocks * rows_per_block < call->rows)) return -4;
  const int stages = (call->k + kStageK - 1) / kStageK, share = (stages + call->cluster - 1) / call->cluster;
  const int most = (share + call->column_warps - 1) / call->column_warps;
  const int x_stages = call->x_stages > 0 && call->x_stages < most ? call->x_stages : most;

  Params p = params_of(call, chosen->format);
  p.row_groups = (call->rows + rows_per_block - 1) / rows_per_block;
  p.column_warps = call->column_warps;
  p.row_warps = call->row_warps;
  p.cluster = call->cluster;
  p.cluster_shift = call->cluster == 8 ? 3 : call->cluster / 2;
  p.stages_each = stages / call->cluster;
  p.stages_left = stages % call->cluster;
  p.columns_each = p.stages_each / call->column_warps;
  p.columns_left = p.stages_each % call->column_warps;
  // Grouped: two buffers, each for two tokens over the whole K, or for one stage of the widest tile if that is more.
  const int x_one = call->column_warps * kStageXBytes;
  p.x_bytes = grouped ? (2 * x_stages > width ? 2 * x_stages : width) * x_one : width * x_stages * x_one;
  p.x_stages[0] = x_stages;
  p.x_stages[1] = p.x_bytes / (8 * x_one);
  p.x_stages[2] = p.x_bytes / (16 * x_one);
  const int x_space = p.x_bytes * (grouped ? 2 : 1), sums_one = width * totals_pitch(rows_per_block) * 4,
            sums_bytes = call->column_warps * sums_one;
  p.x_offset = align_up(warps * chosen->depth * chosen->slot_bytes, 128);
  const bool share_space = !grouped && x_stages == most && width >= 16;
  p.sums_offset = share_space ? p.x_offset : p.x_offset + x_space;
  p.largest_offset = p.x_offset + (share_space ? (sums_bytes > x_space ? sums_bytes : x_space) : x_space + sums_bytes);
  p.constant_weights = call->early_start == kConstantWeights;
  p.zeros_offset = align_up(p.largest_offset + 2 * call->column_warps * kMaxWidth * 4, 16);
  const int shared = p.zeros_offset + 1024;
  const int remote = (width + call->cluster - 1) / call->cluster * call->cluster * totals_pitch(rows_per_block) * 4;
  if (call->cluster > 1 && remote > p.x_offset) return -2;  // it lies over the ring
  if (shared > kMaxShared) return -2;

  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(chosen->kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(call->cluster, call->blocks);
  config.blockDim = dim3(kWarp, call->column_warps, call->row_warps);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (call->cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = call->cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (call->early_start) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  error = cudaLaunchKernelEx(&config, chosen->kernel, p);
  return error != cudaSuccess ? error : cudaGetLastError();
}

// Fill `routing` (kRoutingHeader + 4 * tiles + 2 * slots ints) from expert_ids [slots].
int requant_w4a16_route(const void* expert_ids, int slots, int slots_per_token, int experts, void* routing, void* stream) {
  const int shared = (padded_ints(slots) + 2 * padded_ints(experts + 1)) * 4;
  if (shared > kMaxShared) return -2;
  cudaError_t error = cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int threads = experts + 1 < 1024 ? align_up(experts + 1, kWarp) : 1024;
  route_kernel<<<1, threads, shared, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const int*>(expert_ids), slots, slots_per_token, experts, requant_w4a16_tile_tokens(slots, experts),
      requant_w4a16_tiles(slots, experts), static_cast<int*>(routing));
  return cudaGetLastError();
}

// Read `bytes` (a multiple of 16) from `from`: the read ceiling's kernel.
int requant_read(const void* from, size_t bytes, void* sink, int blocks, void* stream) {
  read_kernel<<<blocks, 512, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(from), bytes / 16,
                                                                     static_cast<uint32_t*>(sink));
  return cudaGetLastError();
}

int requant_w4a16_variants() { return kVariantCount + kStreamCount; }

// {format, alignment, tokens, row_tiles, depth, threads, registers, local bytes, stream} of variant i.
int requant_w4a16_variant(int i, int* out) {
  if (i >= kVariantCount) {
    const StreamVariant& v = kStreams[i - kVariantCount];
    cudaFuncAttributes a = {};
    const cudaError_t error = cudaFuncGetAttributes(&a, reinterpret_cast<const void*>(v.kernel));
    const int values[] = {static_cast<int>(v.format), static_cast<int>(v.alignment), 0, v.row_tiles, v.depth, v.warps * kWarp,
                          a.numRegs, static_cast<int>(a.localSizeBytes), 1};
    for (int j = 0; j < 9; ++j) out[j] = values[j];
    return error;
  }
  const Variant& v = kVariants[i];
  cudaFuncAttributes a = {};
  const cudaError_t error = cudaFuncGetAttributes(&a, reinterpret_cast<const void*>(v.kernel));
  const int values[] = {static_cast<int>(v.format), static_cast<int>(v.alignment), v.tokens, v.row_tiles, v.depth,
                        v.threads, a.numRegs, static_cast<int>(a.localSizeBytes), 0};
  for (int j = 0; j < 9; ++j) out[j] = values[j];
  return error;
}

const char* requant_w4a16_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
}
