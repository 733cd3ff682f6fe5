// Host side of W4A16: variants, launch, expert routing, and the C interface that kernels/w4a16.py loads.
//
// What is compiled in (VARIANTS below): per format and alignment, one kernel per token width; the division of a block
// into column and row warps, the cluster size and the ring's place in shared memory are run-time numbers, so a tuned
// configuration (kernels/w4a16_configs.py) needs no code of its own.
#include <cuda_runtime.h>

#include "decode_attend.cuh"
#include "decode_choose.cuh"
#include "w4a16_core.cuh"
#include "w4a16_dense.cuh"
#include "w4a16_dense_resident.cuh"
#include "w4a16_routing.cuh"
#include "w4a16_split_launch.cuh"
#include "w4a16_stream_launch.cuh"
#include "w4a16_wgmma_launch.cuh"

namespace requant {
namespace {

constexpr int kMaxShared = 227 * 1024;
constexpr int kWarp = 32;
constexpr int kConstantWeights = 2;  // RequantCall::early_start: 0 no, 1 the block may start early but reads nothing, 2

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
  const void* kernel;
};

template <Format FORMAT, Alignment ALIGNMENT, int TOKENS, int ROW_TILES, int DEPTH, int THREADS, int BLOCKS>
Variant variant() {
  Variant v = {FORMAT,  ALIGNMENT, TOKENS, ROW_TILES, DEPTH, THREADS, Ring<FORMAT, ROW_TILES, DEPTH, ALIGNMENT>::kSlotBytes,
               nullptr};
  if constexpr (TOKENS > 0 && TOKENS <= kDenseTokens) {
    v.kernel = reinterpret_cast<const void*>(w4a16_dense_kernel<FORMAT, TOKENS, ROW_TILES, DEPTH, ALIGNMENT, THREADS, BLOCKS>);
  } else {
    v.kernel = reinterpret_cast<const void*>(w4a16_kernel<FORMAT, TOKENS, ROW_TILES, DEPTH, ALIGNMENT, THREADS, BLOCKS>);
  }
  return v;
}

// What the H200's table (kernels/w4a16_h200.py) asks for beyond WIDTHS: one token in so few registers that two launches'
// blocks of 12 warps fit a multiprocessor, and a deeper ring.
#define TUNED(ALIGNMENT)                                                                                         \
  variant<Format::kNvfp4, ALIGNMENT, 1, 1, 3, 384, 2>(), variant<Format::kNvfp4, ALIGNMENT, 1, 1, 4, 512, 1>(), \
      variant<Format::kNvfp4, ALIGNMENT, 2, 1, 4, 512, 1>()

// Where wgmma takes all wider layers whose block scales start at words (w4a16_configs.py), REQUANT_WGMMA leaves them out.
#ifdef REQUANT_WGMMA
#define WIDE(FORMAT, ALIGNMENT, DEPTH)
#else
#define WIDE(FORMAT, ALIGNMENT, DEPTH) ALL_WIDE(FORMAT, ALIGNMENT, DEPTH)
#endif

#define ALL_WIDE(FORMAT, ALIGNMENT, DEPTH)                                                                 \
  , variant<FORMAT, ALIGNMENT, 16, 1, DEPTH, 512, 1>(), variant<FORMAT, ALIGNMENT, 32, 1, DEPTH, 512, 1>(), \
      variant<FORMAT, ALIGNMENT, 64, 1, DEPTH, 512, 1>()

#define NARROW(FORMAT, ALIGNMENT, DEPTH)                                                                           \
  variant<FORMAT, ALIGNMENT, 0, 1, DEPTH, 512, 1>(), variant<FORMAT, ALIGNMENT, 1, 1, DEPTH, 512, 1>(),            \
      variant<FORMAT, ALIGNMENT, 2, 1, DEPTH, 512, 1>(), variant<FORMAT, ALIGNMENT, 4, 1, DEPTH, 512, 1>(),        \
      variant<FORMAT, ALIGNMENT, 8, 1, DEPTH, 512, 1>()

#define WIDTHS(FORMAT, ALIGNMENT, DEPTH) NARROW(FORMAT, ALIGNMENT, DEPTH) WIDE(FORMAT, ALIGNMENT, DEPTH)

const Variant kVariants[] = {
    WIDTHS(Format::kNvfp4, Alignment::kScale16, 3),
    WIDTHS(Format::kNvfp4, Alignment::kScale8, 3),
    WIDTHS(Format::kNvfp4, Alignment::kScale4, 3),
    NARROW(Format::kNvfp4, Alignment::kGeneral, 3) ALL_WIDE(Format::kNvfp4, Alignment::kGeneral, 3),
    WIDTHS(Format::kMxfp4, Alignment::kScale16, 3),
    WIDTHS(Format::kMxfp4, Alignment::kScale8, 3),
    WIDTHS(Format::kMxfp4, Alignment::kScale4, 3),
    NARROW(Format::kMxfp4, Alignment::kGeneral, 3) ALL_WIDE(Format::kMxfp4, Alignment::kGeneral, 3),
    TUNED(Alignment::kScale16),
#ifdef REQUANT_SWEEP  // candidates of a tuning run
#include "w4a16_sweep.inc"
#endif
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

// w4a16_dense_resident.cuh, as the H200's table asks for it: NVFP4, one token.
struct ResidentVariant {
  Alignment alignment;
  int tiles;  // of 16 rows
  const void* kernel;
};

template <Alignment ALIGNMENT, int TILES>
ResidentVariant resident_variant() {
  return {ALIGNMENT, TILES, reinterpret_cast<const void*>(w4a16_dense_resident_kernel<ALIGNMENT, TILES>)};
}

const ResidentVariant kResidents[] = {resident_variant<Alignment::kScale4, 3>(), resident_variant<Alignment::kScale16, 2>()};
constexpr int kResidentCount = sizeof(kResidents) / sizeof(kResidents[0]);

int group_of(Format format) { return format == Format::kNvfp4 ? 16 : 32; }

int align_up(int value, int to) { return (value + to - 1) / to * to; }

}  // namespace
}  // namespace requant

using namespace requant;

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
  int stream;  // 1: the kernel of w4a16_stream.cuh; 2: that of w4a16_split.cuh, where column_warps split K;
               // 3: that of w4a16_dense_resident.cuh, a column warp for each stage of K
  // of the latter alone
  int settled;         // routing and weights are older than the kernel before this one
  int gating;          // enum Gating
  float limit, alpha;  // of the gate
  const void* bias;    // BF16 [experts][rows]
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
  return launch_wgmma(p, static_cast<Format>(call.format), call.blocks, call.early_start, kMaxShared,
                      static_cast<cudaStream_t>(stream));
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
    p.max_tiles = routing_tiles(call->slots, call->experts);
    p.slot_count = call->slots;
    p.tiles = reinterpret_cast<const int4*>(routing + kRoutingHeader);
    p.slots = routing + kRoutingHeader + 4 * routing_tiles(call->slots, call->experts);
    p.slots_per_x = call->x_row_per_slot ? 1 : call->slots / call->tokens;
    p.x_rows = call->x_row_per_slot ? p.slots : p.slots + call->slots;
  }
  return p;
}

static int call_stream(const RequantCall& call, void* stream) {
  if (call.slots == 0 || call.cluster != 1 || (call.stream == 2 ? call.row_warps : call.column_warps) != 1) return -4;
  if (routing_tile_tokens(call.slots, call.experts) > kStreamTokens) return -7;
  const Format format = static_cast<Format>(call.format);
  if (call.stream == 2) {
    Params p = params_of(&call, format);
    p.settled = call.settled && call.early_start;
    p.gating = static_cast<Gating>(call.gating);
    p.bias = static_cast<const __nv_bfloat16*>(call.bias);
    p.limit = call.limit;
    p.alpha = call.alpha;
    return launch_split(p, format, call.experts, call.depth, call.column_warps, call.blocks, call.early_start,
                        kMaxShared, static_cast<cudaStream_t>(stream));
  }
  return launch_stream(params_of(&call, format), format, static_cast<Alignment>(call.alignment), call.row_tiles, call.depth,
                       call.row_warps, call.experts, call.blocks, call.early_start, kMaxShared,
                       static_cast<cudaStream_t>(stream));
}

// The copy engine's view of the codes; none is needed where w4a16_dense_weights.cuh does without it (true all the same).
static bool encode_dense_codes(CUtensorMap* map, const Params& p, Format format, Alignment alignment, int row_tiles) {
  static const bool boxes = [] {
    cudaFuncAttributes a = {};
    return cudaFuncGetAttributes(&a, reinterpret_cast<const void*>(read_kernel)) == cudaSuccess && a.binaryVersion >= 90;
  }();
  if (!boxes || alignment == Alignment::kGeneral) return true;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(p.k / 2), static_cast<cuuint64_t>(p.rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(p.k / 2)};
  const cuuint32_t box[2] = {kLine, static_cast<cuuint32_t>(row_tiles * kTileRows)}, steps[2] = {1, 1};
  const EncodeTiled encode = tensor_map_encoder();
  return encode != nullptr &&
         encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(p.codes), sizes, pitch, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Shared memory behind the ring: offsets, and where it ends. `share`: most stages of a block.
static int place_dense(Params& p, const RequantCall& call, int width, int share, int rows_per_block, int slots) {
  const int chunk = call.x_stages * call.column_warps, stages = chunk > 0 && chunk < share ? chunk : share;
  p.x_stages[0] = stages;
  p.zeros_offset = p.x_offset + stages * width * kStageXBytes;
  p.largest_offset = p.zeros_offset + 1024;
  p.sums_offset = p.largest_offset + align_up(stages * width * 4, 16);
  p.barriers_offset = p.sums_offset + call.column_warps * width * totals_pitch(rows_per_block) * 4;
  p.remote_offset = p.barriers_offset + align_up((slots + 1) * 8, 16);
  const int each = (width + call.cluster - 1) / call.cluster;
  return p.remote_offset + (call.cluster > 1 ? call.cluster * each * rows_per_block * 4 : 0);
}

// The same for w4a16_core.cuh; -2 where a cluster's sums do not fit over the ring. `most`: most stages of a column warp.
static int place_core(Params& p, const RequantCall& call, int width, int most, int rows_per_block) {
  const bool grouped = call.slots > 0;
  const int x_stages = call.x_stages > 0 && call.x_stages < most ? call.x_stages : most;
  // Grouped: two buffers, each for two tokens over the whole K, or for one stage of the widest tile if that is more.
  const int x_one = call.column_warps * kStageXBytes;
  p.x_bytes = grouped ? (2 * x_stages > width ? 2 * x_stages : width) * x_one : width * x_stages * x_one;
  p.x_stages[0] = x_stages;
  p.x_stages[1] = p.x_bytes / (8 * x_one);
  p.x_stages[2] = p.x_bytes / (16 * x_one);
  const int x_space = p.x_bytes * (grouped ? 2 : 1), sums_one = width * totals_pitch(rows_per_block) * 4,
            sums_bytes = call.column_warps * sums_one;
  const bool share_space = !grouped && x_stages == most;
  p.sums_offset = share_space ? p.x_offset : p.x_offset + x_space;
  p.largest_offset = p.x_offset + (share_space ? (sums_bytes > x_space ? sums_bytes : x_space) : x_space + sums_bytes);
  p.zeros_offset = align_up(p.largest_offset + 2 * call.column_warps * kMaxWidth * 4, 16);
  const int remote = (width + call.cluster - 1) / call.cluster * call.cluster * totals_pitch(rows_per_block) * 4;
  if (call.cluster > 1 && remote > p.x_offset) return -2;
  return p.zeros_offset + 1024;
}

static int call_resident(const RequantCall& call, void* stream) {
  const ResidentVariant* chosen = nullptr;
  for (const ResidentVariant& v : kResidents) {
    if (static_cast<int>(v.alignment) == call.alignment && v.tiles == call.row_tiles) chosen = &v;
  }
  if (chosen == nullptr || call.format != static_cast<int>(Format::kNvfp4) || call.tokens != 1 || call.depth != 1) return -1;
  const int warps = call.column_warps, rows_per_block = call.row_tiles * kTileRows;
  const int stages = (call.k + kStageK - 1) / kStageK;
  if (warps * kWarp > resident_threads(call.row_tiles)) return -3;
  if (warps < 2) return -5;
  Params p = params_of(&call, Format::kNvfp4);
  p.row_groups = (call.rows + rows_per_block - 1) / rows_per_block;
  if (call.slots > 0 || call.cluster != 1 || call.row_warps != 1 || call.blocks != p.row_groups) return -4;
  if (stages > warps) return -10;
  p.constant_weights = call.early_start == kConstantWeights;
  p.column_warps = call.column_warps;
  p.row_warps = call.row_warps;
  p.cluster = 1;
  p.stages_each = stages;
  p.columns_each = stages / call.column_warps;
  p.columns_left = stages % call.column_warps;
  p.x_offset = align_up(warps * rows_per_block * (kLine + FormatTraits<Format::kNvfp4>::kStageScales), 128);
  const int shared = place_dense(p, call, 1, stages, rows_per_block, warps);
  if (shared > kMaxShared || p.x_stages[0] < stages) return -2;
  cudaError_t error = cudaFuncSetAttribute(chosen->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1, call.blocks);
  config.blockDim = dim3(kWarp, call.column_warps, call.row_warps);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = call.early_start ? 1 : 0;
  CUtensorMap codes = {};
  if (!encode_dense_codes(&codes, p, Format::kNvfp4, chosen->alignment, chosen->tiles)) return -6;
  void* arguments[] = {&p, &codes};
  error = cudaLaunchKernelExC(&config, chosen->kernel, arguments);
  return error != cudaSuccess ? error : cudaGetLastError();
}

// 0 on success; -1 no such variant, -2 too much shared memory, -3 too many threads, -4 a cluster size other than 1, 2, 4, 8
// or one whose blocks would have to do more than one unit, -5 a block of one warp, -6 no tensor maps, -7 a stream whose experts
// may have more tokens than it takes, -8 one whose experts' block scales are no whole 16-byte pieces, -9 rows that
// are no multiple of 16 where the split kernel does more than the product, -10 more stages of K than the division has
// warps; else a cudaError_t.
int requant_w4a16(const RequantCall* call, void* stream) {
  if (call->wgmma) return call_wgmma(*call, stream);
  if (call->stream == 3) return call_resident(*call, stream);
  if (call->stream) return call_stream(*call, stream);
  const Variant* chosen = nullptr;
  const int warps = call->column_warps * call->row_warps;
  bool too_many = false;
  for (int i = 0; i < kVariantCount; ++i) {
    const Variant& v = kVariants[i];
    const bool wide_enough = call->slots > 0 ? v.tokens == 0 : v.tokens >= call->tokens;
    if (static_cast<int>(v.format) != call->format || static_cast<int>(v.alignment) != call->alignment || !wide_enough ||
        v.row_tiles != call->row_tiles || v.depth != call->depth) {
      continue;
    }
    if (warps * kWarp > v.threads) {
      too_many = true;
      continue;
    }
    if (chosen == nullptr || v.tokens < chosen->tokens || (v.tokens == chosen->tokens && v.threads < chosen->threads)) {
      chosen = &v;
    }
  }
  if (chosen == nullptr) return too_many ? -3 : -1;
  const bool grouped = chosen->tokens == 0;
  const int width = grouped ? kGroupedTileTokens : chosen->tokens;
  if (warps < 2) return -5;
  if (call->cluster != 1 && call->cluster != 2 && call->cluster != 4 && call->cluster != 8) return -4;
  const int rows_per_block = call->row_warps * call->row_tiles * kTileRows;
  if (call->cluster > 1 && (grouped || call->blocks * rows_per_block < call->rows)) return -4;
  const int stages = (call->k + kStageK - 1) / kStageK, share = (stages + call->cluster - 1) / call->cluster;
  const int most = (share + call->column_warps - 1) / call->column_warps;

  Params p = params_of(call, chosen->format);
  p.constant_weights = call->early_start == kConstantWeights;
  p.row_groups = (call->rows + rows_per_block - 1) / rows_per_block;
  p.column_warps = call->column_warps;
  p.row_warps = call->row_warps;
  p.cluster = call->cluster;
  p.cluster_shift = call->cluster == 8 ? 3 : call->cluster / 2;
  p.stages_each = stages / call->cluster;
  p.stages_left = stages % call->cluster;
  p.columns_each = p.stages_each / call->column_warps;
  p.columns_left = p.stages_each % call->column_warps;
  p.x_offset = align_up(warps * chosen->depth * chosen->slot_bytes, 128);
  const bool dense = !grouped && width <= kDenseTokens;
  const int shared = dense ? place_dense(p, *call, width, share, rows_per_block, warps * chosen->depth)
                           : place_core(p, *call, width, most, rows_per_block);
  if (shared < 0 || shared > kMaxShared) return -2;

  cudaError_t error = cudaFuncSetAttribute(chosen->kernel,
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
  CUtensorMap codes = {};
  if (dense && !encode_dense_codes(&codes, p, chosen->format, chosen->alignment, call->row_tiles)) return -6;
  void* arguments[] = {&p, &codes};  // w4a16_core.cuh takes the first alone
  error = cudaLaunchKernelExC(&config, chosen->kernel, arguments);
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
      static_cast<const int*>(expert_ids), slots, slots_per_token, experts, routing_tile_tokens(slots, experts),
      routing_tiles(slots, experts), static_cast<int*>(routing));
  return cudaGetLastError();
}

// Attention of new tokens, and the choice of experts of one: decode_attend.cuh, decode_choose.cuh.
int requant_decode_attend(const AttendCall* call, int early_start, void* stream) {
  return launch_attend(*call, early_start != 0, static_cast<cudaStream_t>(stream));
}

int requant_decode_choose(const ChooseCall* call, int early_start, void* stream) {
  return launch_choose(*call, early_start != 0, static_cast<cudaStream_t>(stream));
}

// Read `bytes` (a multiple of 16) from `from`: the read ceiling's kernel.
int requant_read(const void* from, size_t bytes, void* sink, int blocks, void* stream) {
  read_kernel<<<blocks, 512, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(from), bytes / 16,
                                                                     static_cast<uint32_t*>(sink));
  return cudaGetLastError();
}

int requant_w4a16_variants() { return kVariantCount + kStreamCount + kSplitCount + kResidentCount; }

// {format, alignment, tokens, row_tiles, depth, threads, registers, local bytes, stream, k} of variant i; k is 0 where any will do.
int requant_w4a16_variant(int i, int* out) {
  if (i >= kVariantCount + kStreamCount + kSplitCount) {
    const ResidentVariant& v = kResidents[i - kVariantCount - kStreamCount - kSplitCount];
    cudaFuncAttributes a = {};
    const cudaError_t error = cudaFuncGetAttributes(&a, v.kernel);
    const int values[] = {static_cast<int>(Format::kNvfp4), static_cast<int>(v.alignment), 1, v.tiles, 1,
                          resident_threads(v.tiles), a.numRegs, static_cast<int>(a.localSizeBytes), 3, 0};
    for (int j = 0; j < 10; ++j) out[j] = values[j];
    return error;
  }
  if (i >= kVariantCount + kStreamCount) {
    const SplitVariant& v = kSplits[i - kVariantCount - kStreamCount];
    cudaFuncAttributes a = {};
    const cudaError_t error = cudaFuncGetAttributes(&a, reinterpret_cast<const void*>(v.kernel));
    const int values[] = {static_cast<int>(v.format), 0, 0, 1, v.depth, (v.warps + 1) * kWarp, a.numRegs,
                          static_cast<int>(a.localSizeBytes), 2, v.k};
    for (int j = 0; j < 10; ++j) out[j] = values[j];
    return error;
  }
  if (i >= kVariantCount) {
    const StreamVariant& v = kStreams[i - kVariantCount];
    cudaFuncAttributes a = {};
    const cudaError_t error = cudaFuncGetAttributes(&a, reinterpret_cast<const void*>(v.kernel));
    const int values[] = {static_cast<int>(v.format), static_cast<int>(v.alignment), 0, v.row_tiles, v.depth, v.warps * kWarp,
                          a.numRegs, static_cast<int>(a.localSizeBytes), 1, 0};
    for (int j = 0; j < 10; ++j) out[j] = values[j];
    return error;
  }
  const Variant& v = kVariants[i];
  cudaFuncAttributes a = {};
  const cudaError_t error = cudaFuncGetAttributes(&a, v.kernel);
  const int values[] = {static_cast<int>(v.format), static_cast<int>(v.alignment), v.tokens, v.row_tiles, v.depth,
                        v.threads, a.numRegs, static_cast<int>(a.localSizeBytes), 0, 0};
  for (int j = 0; j < 10; ++j) out[j] = values[j];
  return error;
}

const char* requant_w4a16_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
}
