// Attention of one new token of each stream over its cache: biases, rotary embedding, writing the cache, sliding window, sinks.
//
// kernels/triton/decode.py has the same for any head size, length and number of streams, where a KV head's parts meet in the last
// program to arrive: store, fence, counter and loads cost as much as the attention. Here one block has a KV head and all of its
// keys, each of its 16 warps up to three tiles of 16:
//   * the copy engine brings keys and values before the kernel before has ended (they are older than it), a barrier a warp;
//   * keys are the M side of the tensor core's product, the up to eight query heads of the KV head its n = 8;
//   * a warp's exponentials, turned by movmatrix, are the B side of the product with values;
//   * the warps' sums meet in shared memory.
// Eight blocks leave the other multiprocessors to the product that follows: it may start at once, for it reads nothing but
// weights before it waits for this kernel. (Clusters of eight blocks for a KV head were no faster alone, and beside a product that
// fills most multiprocessors they found no four free pairs of them until it had ended.)
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "hopper.cuh"
#include "ptx.cuh"
#include "w4a16_wgmma_launch.cuh"

namespace requant {

constexpr int kAttendWarps = 16, kAttendThreads = kAttendWarps * 32;
constexpr int kAttendHeads = 8;                // most query heads of a KV head
constexpr int kHeadDim = 64, kHalfDim = 32;
constexpr int kKeyRow = kHeadDim * 2;          // bytes; 16-byte piece c of row r lies at c ^ (r & 7)
constexpr int kTileKeys = 16, kTileBytes = kTileKeys * kKeyRow, kTilesOfWarp = 3;
constexpr int kMostKeys = 736;                 // what fits into shared memory
constexpr int kQueryPitch = kHeadDim + 8;      // elements: rows of queries start four banks apart
constexpr int kSumPitch = kHeadDim + 4;        // floats
static_assert(kMostKeys <= kAttendWarps * kTilesOfWarp * kTileKeys && kMostKeys % kTileKeys == 0);

// Mirrored by ctypes in kernels/decode_cuda.py.
struct AttendCall {
  const __nv_bfloat16* qkv;      // [tokens][(heads + 2 kv_heads) * 64]: what the kernel before this one gave
  const __nv_bfloat16* bias;     // of one such row; null: none
  const __nv_bfloat16* sinks;    // [heads]; null: none
  const float *cos, *sin;        // [positions][32]
  const int* positions;          // [tokens]
  __nv_bfloat16 *keys, *values;  // [tokens][kv_heads][capacity][64]
  __nv_bfloat16* out;            // [tokens][heads * 64]
  float scale;
  int tokens, heads, kv_heads, capacity;
  int window;                    // 0: none
};

struct AttendMaps {
  CUtensorMap keys, values;  // rows of 64, in boxes of 16
};

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrices_turned(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint32_t turned(uint32_t matrix) {
  uint32_t to;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(matrix));
  return to;
}

__device__ __forceinline__ uint32_t two_bf16(float a, float b) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&two);
}

__device__ __forceinline__ float2 two_floats(uint32_t two) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
}

// Of a head: elements d, d + 1 and d + 32, d + 33.
struct Pairs {
  float2 low, high;
};

__device__ __forceinline__ Pairs biased(const uint32_t (&of)[2], const uint32_t (&bias)[2]) {
  const float2 a = two_floats(of[0]), b = two_floats(of[1]), a_bias = two_floats(bias[0]), b_bias = two_floats(bias[1]);
  return {make_float2(a.x + a_bias.x, a.y + a_bias.y), make_float2(b.x + b_bias.x, b.y + b_bias.y)};
}

__device__ __forceinline__ Pairs rotated(const Pairs& v, float2 cos, float2 sin) {
  return {make_float2(v.low.x * cos.x - v.high.x * sin.x, v.low.y * cos.y - v.high.y * sin.y),
          make_float2(v.high.x * cos.x + v.low.x * sin.x, v.high.y * cos.y + v.low.y * sin.y)};
}

// A warp's tiles against all query heads, into shared memory: sums [head][64], and of each head the largest logit and the sum.
// The warp's tiles are warp + 16 i; of all of them `rows` rows are keys.
__device__ __forceinline__ void attend_tiles(float (*sums)[kSumPitch], float2* states, uint32_t keys, uint32_t values,
                                             const __nv_bfloat16* queries, int rows, int warp, int lane) {
  const int g = lane >> 2, p = lane & 3;
  float logits[kTilesOfWarp][4];
#pragma unroll
  for (int i = 0; i < kTilesOfWarp; ++i) {
    const int first = (warp + i * kAttendWarps) * kTileKeys;
    float chains[2][4] = {};
    if (first < rows) {
      const int row = lane & 15;
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32_t a[4];
        load_matrices(a, keys + (warp + i * kAttendWarps) * kTileBytes + row * kKeyRow +
                             (((step * 2 + (lane >> 4)) ^ (row & 7)) << 4));
        const uint32_t* const b = reinterpret_cast<const uint32_t*>(queries + g * kQueryPitch + step * 16 + 2 * p);
        mma_bf16(chains[step % 2], a, b[0], b[4], chains[step % 2]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) logits[i][j] = first + g + j / 2 * 8 < rows ? chains[0][j] + chains[1][j] : -INFINITY;
  }
  float total[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kTilesOfWarp; ++i) most = fmaxf(most, fmaxf(logits[i][j], logits[i][j + 2]));
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    const float from = most == -INFINITY ? 0.0f : most;  // a warp without keys has sums of zero
    total[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < kTilesOfWarp; ++i) {
      logits[i][j] = __expf(logits[i][j] - from);
      logits[i][j + 2] = __expf(logits[i][j + 2] - from);
      total[j] += logits[i][j] + logits[i][j + 2];
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) total[j] += __shfl_xor_sync(~0u, total[j], lanes);
    if (g == 0) states[2 * p + j] = make_float2(most, total[j]);
  }
  float out[kHeadDim / 16][4] = {};
#pragma unroll
  for (int i = 0; i < kTilesOfWarp; ++i) {
    const int tile = warp + i * kAttendWarps;
    if (tile * kTileKeys >= rows) break;
    const uint32_t b0 = turned(two_bf16(logits[i][0], logits[i][1])), b1 = turned(two_bf16(logits[i][2], logits[i][3]));
    const int row = (lane & 7) + (lane >> 4) * 8;
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t a[4];
      load_matrices_turned(a, values + tile * kTileBytes + row * kKeyRow + (((d * 2 + (lane >> 3 & 1)) ^ (row & 7)) << 4));
      mma_bf16(out[d], a, b0, b1, out[d]);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      sums[2 * p + j][d * 16 + g] = out[d][j];
      sums[2 * p + j][d * 16 + g + 8] = out[d][j + 2];
    }
  }
}

struct AttendShared {
  float sums[kAttendWarps][kAttendHeads][kSumPitch];
  float2 states[kAttendWarps][kAttendHeads];
  float shares[kAttendHeads][kAttendWarps];  // of a warp's sums in a head's output
  __nv_bfloat16 queries[kAttendHeads * kQueryPitch];
  __nv_bfloat16 key[kHeadDim], value[kHeadDim];  // the new ones
  uint64_t barriers[kAttendWarps];
};

// Block: 512 threads; grid: tokens * kv_heads. Shared memory: `room` rows of keys, as many of values, AttendShared.
__global__ void __launch_bounds__(kAttendThreads, 1)
    decode_attend_kernel(const __grid_constant__ AttendCall c, const __grid_constant__ AttendMaps maps, int room) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* const keys = memory;
  uint8_t* const values = memory + room * kKeyRow;
  AttendShared& shared = *reinterpret_cast<AttendShared*>(memory + 2 * room * kKeyRow);
  const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0);
  const int token = blockIdx.x / c.kv_heads, kv_head = blockIdx.x % c.kv_heads, per = c.heads / c.kv_heads;
  const uint32_t keys_at = static_cast<uint32_t>(__cvta_generic_to_shared(keys)),
                 values_at = static_cast<uint32_t>(__cvta_generic_to_shared(values)),
                 barrier = static_cast<uint32_t>(__cvta_generic_to_shared(shared.barriers + warp));
  allow_next_kernel();  // see above
  const int position = __ldcg(c.positions + token);
  const int first = c.window > 0 ? max(0, position - c.window + 1) : 0;
  const int rows = min(position + 1 - first, room), tiles = (rows + kTileKeys - 1) / kTileKeys;  // the last row is new
  const int mine = (tiles - warp + kAttendWarps - 1) / kAttendWarps;
  const size_t cache = (static_cast<size_t>(token) * c.kv_heads + kv_head) * c.capacity;  // in rows
  if (mine > 0 && elect_one()) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, 2 * mine * kTileBytes);
    for (int i = 0; i < mine; ++i) {
      const int tile = warp + i * kAttendWarps, from = static_cast<int>(cache) + first + tile * kTileKeys;
      copy_box(keys_at + tile * kTileBytes, &maps.keys, barrier, 0, from);
      copy_box(values_at + tile * kTileBytes, &maps.values, barrier, 0, from);
    }
  }
  __syncwarp();
  // 128 threads have two pairs (d, d + 32) of a query head each, the next 16 of the new key and value.
  const int query = thread >> 4, d = (thread & 15) * 2;
  const bool asks = query < per, makes = query == kAttendHeads;
  const float2 cos = __ldg(reinterpret_cast<const float2*>(c.cos + static_cast<size_t>(position) * kHalfDim + d)),
               sin = __ldg(reinterpret_cast<const float2*>(c.sin + static_cast<size_t>(position) * kHalfDim + d));
  const int q_at = (makes ? c.heads + kv_head : kv_head * per + query) * kHeadDim + d,
            v_at = (c.heads + c.kv_heads + kv_head) * kHeadDim + d;
  const auto pair_at = [](const __nv_bfloat16* from, int at, bool there) {
    return there ? *reinterpret_cast<const uint32_t*>(from + at) : 0u;
  };
  const bool has_bias = c.bias != nullptr;
  uint32_t q_bias[2], v_bias[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    q_bias[i] = pair_at(c.bias, q_at + i * kHalfDim, has_bias && (asks || makes));
    v_bias[i] = pair_at(c.bias, v_at + i * kHalfDim, has_bias && makes);
  }
  float sink = -INFINITY;
  if (c.sinks != nullptr && warp < per) sink = __bfloat162float(c.sinks[kv_head * per + warp]);
  const __nv_bfloat16* const qkv = c.qkv + static_cast<size_t>(token) * (c.heads + 2 * c.kv_heads) * kHeadDim;

  wait_for_previous_kernel();

  uint32_t q[2], v[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    q[i] = pair_at(qkv, q_at + i * kHalfDim, asks || makes);
    v[i] = pair_at(qkv, v_at + i * kHalfDim, makes);
  }
  if (query <= kAttendHeads) {
    const Pairs turn = rotated(biased(q, q_bias), cos, sin);
    const float scale = makes ? 1.0f : c.scale;
    const uint32_t low = two_bf16(turn.low.x * scale, turn.low.y * scale);
    const uint32_t high = two_bf16(turn.high.x * scale, turn.high.y * scale);
    __nv_bfloat16* const to = makes ? shared.key : shared.queries + query * kQueryPitch;
    *reinterpret_cast<uint32_t*>(to + d) = low;
    *reinterpret_cast<uint32_t*>(to + kHalfDim + d) = high;
    if (makes) {
      const Pairs value = biased(v, v_bias);
      const uint32_t value_low = two_bf16(value.low.x, value.low.y), value_high = two_bf16(value.high.x, value.high.y);
      *reinterpret_cast<uint32_t*>(shared.value + d) = value_low;
      *reinterpret_cast<uint32_t*>(shared.value + kHalfDim + d) = value_high;
      const size_t at = (cache + position) * kHeadDim + d;
      *reinterpret_cast<uint32_t*>(c.keys + at) = low;
      *reinterpret_cast<uint32_t*>(c.keys + at + kHalfDim) = high;
      *reinterpret_cast<uint32_t*>(c.values + at) = value_low;
      *reinterpret_cast<uint32_t*>(c.values + at + kHalfDim) = value_high;
    }
  }
  __syncthreads();
  if (mine > 0) barrier_wait(barrier, 0);
  if (mine > 0 && (tiles - 1) % kAttendWarps == warp) {  // the last tile: the new row, and zeros behind it
#pragma unroll 1
    for (int i = lane; i < kTileKeys * (kKeyRow / 16); i += 32) {
      const int row = (tiles - 1) * kTileKeys + i / (kKeyRow / 16), piece = i % (kKeyRow / 16);
      const int at = row * kKeyRow + ((piece ^ (row & 7)) << 4);
      if (row < rows - 1) continue;
      const bool newest = row == rows - 1;
      const uint4 zero = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(keys + at) = newest ? reinterpret_cast<const uint4*>(shared.key)[piece] : zero;
      *reinterpret_cast<uint4*>(values + at) = newest ? reinterpret_cast<const uint4*>(shared.value)[piece] : zero;
    }
  }
  __syncwarp();
  attend_tiles(shared.sums[warp], shared.states[warp], keys_at, values_at, shared.queries, rows, warp, lane);
  __syncthreads();
  if (warp < kAttendHeads) {  // a head each; lane % 16: the warp whose sums are weighed
    const float2 state = shared.states[lane % kAttendWarps][warp];
    float best = fmaxf(state.x, sink);
#pragma unroll
    for (int lanes = kAttendWarps / 2; lanes > 0; lanes /= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, lanes));
    const float share = __expf(state.x - best);
    float total = state.y * share;
#pragma unroll
    for (int lanes = kAttendWarps / 2; lanes > 0; lanes /= 2) total += __shfl_xor_sync(~0u, total, lanes);
    if (c.sinks != nullptr) total += __expf(sink - best);
    if (lane < kAttendWarps) shared.shares[warp][lane] = share / total;
  }
  __syncthreads();
  const int head = thread / kHeadDim, column = thread % kHeadDim;
  float out = 0.0f;
#pragma unroll
  for (int w = 0; w < kAttendWarps; ++w) out += shared.sums[w][head][column] * shared.shares[head][w];
  if (head < per) {
    c.out[(static_cast<size_t>(token) * c.heads + kv_head * per + head) * kHeadDim + column] = __float2bfloat16(out);
  }
#endif
}

inline bool make_cache_map(CUtensorMap* map, const void* from, uint64_t rows) {
  const EncodeTiled encode = tensor_map_encoder();
  const cuuint64_t sizes[] = {kHeadDim, rows}, strides[] = {kKeyRow};
  const cuuint32_t box[] = {kHeadDim, kTileKeys}, steps[] = {1, 1};
  return encode != nullptr &&
         encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(from), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// 0 on success; -6 no tensor maps, -12 where the kernel does not fit the layer; else a cudaError_t.
inline int launch_attend(const AttendCall& call, bool early_start, cudaStream_t stream) {
  if (call.tokens < 1 || call.kv_heads < 1 || call.heads % call.kv_heads != 0 || call.heads / call.kv_heads > kAttendHeads) {
    return -12;
  }
  const int seen = call.window > 0 && call.window < call.capacity ? call.window : call.capacity;
  const int room = (seen + kTileKeys - 1) / kTileKeys * kTileKeys;
  const uint64_t cached = static_cast<uint64_t>(call.tokens) * call.kv_heads * call.capacity;
  if (room > kMostKeys || cached > 0x7FFFFFFFu) return -12;
  AttendMaps maps = {};
  if (!make_cache_map(&maps.keys, call.keys, cached) || !make_cache_map(&maps.values, call.values, cached)) return -6;
  const int shared = 2 * room * kKeyRow + static_cast<int>(sizeof(AttendShared));
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(decode_attend_kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           2 * kMostKeys * kKeyRow + static_cast<int>(sizeof(AttendShared)));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(call.tokens * call.kv_heads);
  config.blockDim = dim3(kAttendThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early_start ? 1 : 0;
  int rows = room;
  void* arguments[] = {const_cast<AttendCall*>(&call), &maps, &rows};
  error = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(decode_attend_kernel), arguments);
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace requant
