// What stands between attention and the experts of one token: residual, RMSNorm, router, the choice of experts, and their list.
//
// kernels/triton/decode.py has the same for any number of tokens, where the programs of the experts meet in the last of them to
// arrive: its store, fence, counter and loads are a third of the launch. Here a cluster of four blocks shares the router. Each
// block makes the norm for itself, each warp multiplies its part of K for all experts on the tensor cores (x in every column
// of B), and its sums go to the first block's shared memory, counted as they come (st.async); a warp there adds them in their
// order and chooses. Everything older than the kernel before is in registers before that one has ended.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "hopper.cuh"
#include "ptx.cuh"
#include "w4a16_types.cuh"

namespace requant {

constexpr int kChooseBlocks = 4, kChooseWarps = 8, kChooseThreads = kChooseWarps * 32;
constexpr int kChooseExperts = 32, kChooseStepK = 32;  // k of one step of a warp: eight for each of four lanes
constexpr int kChoosePieces = 3;                       // of four columns, for each thread
constexpr int kChooseSteps = 3;                        // for each warp
constexpr int kChooseK = kChoosePieces * 4 * kChooseThreads;
static_assert(kChooseK == kChooseSteps * kChooseStepK * kChooseBlocks * kChooseWarps);

// Mirrored by ctypes in kernels/decode_cuda.py.
struct ChooseCall {
  const float* h;               // [K]
  const __nv_bfloat16* y;       // [K]: what the kernel before this one gave
  const __nv_bfloat16* bias;    // [K], added with y; null: none
  const __nv_bfloat16* norm;    // [K]
  const __nv_bfloat16* router;  // [experts][K]
  const __nv_bfloat16* router_bias;  // [experts]; null: none
  float* h_out;                 // h + y + bias
  __nv_bfloat16* x;             // its norm
  int* ids;                     // [top_k], likeliest first
  float* weights;               // [top_k]
  int* routing;                 // w4a16_routing.cuh; null: none is wanted
  int k, experts, top_k;
  int max_tiles;                // of the routing
  int normalize;                // softmax over the chosen ones; else over all
  float eps;
};

__device__ __forceinline__ float2 floats_of(uint32_t two) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
}

// One warp, a lane for each expert: the choice, the weights and the list. Of equal logits the lower expert's comes first; NaN
// counts as -infinity. Every lane finds its own rank among `all` (32 scores in shared memory): one largest after the other
// would be a chain of reductions.
__device__ __forceinline__ void choose_experts(const ChooseCall& c, float logit, float* all, int lane) {
  const float score = lane < c.experts && logit >= -INFINITY ? logit : -INFINITY;
  all[lane] = score;
  __syncwarp();
  int rank = 0;
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < kChooseExperts; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(all + i);
    const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      rank += others[j] > score || (others[j] == score && i + j < lane) ? 1 : 0;
      most = fmaxf(most, others[j]);
    }
  }
  const bool chosen = rank < c.top_k && lane < c.experts;
  const float share = expf(logit - most);
  float whole = c.normalize ? (chosen ? share : 0.0f) : lane < c.experts ? share : 0.0f;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) whole += __shfl_xor_sync(~0u, whole, lanes);
  const int position = __popc(__ballot_sync(~0u, chosen) & ((1u << lane) - 1));
  if (!chosen) return;
  c.ids[rank] = lane;
  c.weights[rank] = share / whole;
  if (c.routing == nullptr) return;
  reinterpret_cast<int4*>(c.routing + kRoutingHeader)[position] = make_int4(lane, position, 1, rank);
  int* const listed = c.routing + kRoutingHeader + 4 * c.max_tiles;
  listed[position] = rank;
  listed[c.top_k + position] = 0;
  if (rank == 0) *reinterpret_cast<int2*>(c.routing) = make_int2(c.top_k, c.top_k);
}

__global__ void __launch_bounds__(kChooseThreads, 1) decode_choose_kernel(const __grid_constant__ ChooseCall c) {
#if __CUDA_ARCH__ >= 900
  __shared__ __align__(16) __nv_bfloat16 x[kChooseK];
  __shared__ __align__(16) float squares[kChooseWarps];
  __shared__ __align__(16) float sums[kChooseBlocks * kChooseWarps][kChooseExperts];
  __shared__ __align__(16) float scores[kChooseExperts];
  __shared__ __align__(8) uint64_t barrier_word;
  const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0), rank = blockIdx.x;
  const uint32_t barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier_word));
  if (thread == 0 && rank == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, sizeof(sums));
  }
  __syncwarp();
  cluster_arrive_relaxed();

  // The router: rows lane / 4 + 8 i, k = 8 (lane % 4) .. + 7 of the warp's steps.
  const int first_step = rank * kChooseWarps + warp, steps = c.k / kChooseStepK;
  uint4 router[kChooseSteps][4];
#pragma unroll
  for (int s = 0; s < kChooseSteps; ++s) {
    const int step = first_step + s * kChooseBlocks * kChooseWarps;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int expert = (lane >> 2) + 8 * i;
      const bool there = step < steps && expert < c.experts;
      const __nv_bfloat16* at = c.router + static_cast<size_t>(expert) * c.k + step * kChooseStepK + (lane & 3) * 8;
      router[s][i] = there ? __ldg(reinterpret_cast<const uint4*>(at)) : make_uint4(0, 0, 0, 0);
    }
  }
  float router_bias = 0.0f;
  if (rank == 0 && warp == 0 && lane < c.experts && c.router_bias != nullptr) {
    router_bias = __bfloat162float(c.router_bias[lane]);
  }
  float h[kChoosePieces][4];
  uint2 norm[kChoosePieces];
#pragma unroll
  for (int i = 0; i < kChoosePieces; ++i) {
    const int k = (i * kChooseThreads + thread) * 4;
    const bool inside = k < c.k;
    const float4 v = inside ? __ldcg(reinterpret_cast<const float4*>(c.h + k)) : make_float4(0, 0, 0, 0);
    norm[i] = inside ? __ldg(reinterpret_cast<const uint2*>(c.norm + k)) : make_uint2(0, 0);
    uint2 bias = make_uint2(0, 0);
    if (inside && c.bias != nullptr) bias = __ldg(reinterpret_cast<const uint2*>(c.bias + k));
    const float2 low = floats_of(bias.x), high = floats_of(bias.y);
    h[i][0] = v.x + low.x, h[i][1] = v.y + low.y, h[i][2] = v.z + high.x, h[i][3] = v.w + high.y;
  }
  wait_for_previous_kernel();
  allow_next_kernel();

  uint2 y[kChoosePieces];
#pragma unroll
  for (int i = 0; i < kChoosePieces; ++i) {
    const int k = (i * kChooseThreads + thread) * 4;
    y[i] = k < c.k ? *reinterpret_cast<const uint2*>(c.y + k) : make_uint2(0, 0);
  }
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kChoosePieces; ++i) {
    const float2 low = floats_of(y[i].x), high = floats_of(y[i].y);
    h[i][0] += low.x, h[i][1] += low.y, h[i][2] += high.x, h[i][3] += high.y;
#pragma unroll
    for (int j = 0; j < 4; ++j) square += h[i][j] * h[i][j];
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) square += __shfl_xor_sync(~0u, square, lanes);
  if (lane == 0) squares[warp] = square;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kChooseWarps; ++w) sum += squares[w];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(c.k) + c.eps);
#pragma unroll
  for (int i = 0; i < kChoosePieces; ++i) {
    const int k = (i * kChooseThreads + thread) * 4;
    const float2 low = floats_of(norm[i].x), high = floats_of(norm[i].y);
    __nv_bfloat162 two[2] = {__floats2bfloat162_rn(h[i][0] * scale * low.x, h[i][1] * scale * low.y),
                             __floats2bfloat162_rn(h[i][2] * scale * high.x, h[i][3] * scale * high.y)};
    const uint2 piece = *reinterpret_cast<const uint2*>(two);
    *reinterpret_cast<uint2*>(x + k) = piece;  // zeros beyond K
    if (i == rank && k < c.k) {
      *reinterpret_cast<uint2*>(c.x + k) = piece;
      *reinterpret_cast<float4*>(c.h_out + k) = make_float4(h[i][0], h[i][1], h[i][2], h[i][3]);
    }
  }
  __syncthreads();

  float d[2][2][4] = {};  // [rows 0..15, 16..31][chain]
#pragma unroll
  for (int s = 0; s < kChooseSteps; ++s) {
    const int step = first_step + s * kChooseBlocks * kChooseWarps;
    const uint4 b = *reinterpret_cast<const uint4*>(x + step * kChooseStepK + (lane & 3) * 8);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint4 low = router[s][2 * tile], high = router[s][2 * tile + 1];
      const uint32_t a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
      mma_bf16(d[tile][0], a0, b.x, b.y, d[tile][0]);
      mma_bf16(d[tile][1], a1, b.z, b.w, d[tile][1]);
    }
  }
  // All columns are the same: of a row's four lanes each sends one of the rows that they hold.
  const int p = lane & 3, expert = (p >> 1) * 16 + (p & 1) * 8 + (lane >> 2);
  const float low = (p >> 1) == 0 ? d[0][0][0] + d[0][1][0] : d[1][0][0] + d[1][1][0];
  const float high = (p >> 1) == 0 ? d[0][0][2] + d[0][1][2] : d[1][0][2] + d[1][1][2];
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(&sums[first_step][expert]));
  cluster_wait();  // the first block's barrier stands
  store_and_count(block_address(at, 0), block_address(barrier, 0), (p & 1) == 0 ? low : high);
  if (rank != 0 || warp != 0) return;
  barrier_wait(barrier, 0);
  float part[4] = {};
#pragma unroll
  for (int w = 0; w < kChooseBlocks * kChooseWarps; ++w) part[w % 4] += sums[w][lane];
  choose_experts(c, (part[0] + part[1]) + (part[2] + part[3]) + router_bias, scores, lane);
#endif
}

// 0 on success; -11 where the layer is too large for the kernel; else a cudaError_t.
inline int launch_choose(const ChooseCall& call, bool early_start, cudaStream_t stream) {
  if (call.k % kChooseStepK != 0 || call.k > kChooseK || call.experts < 1 || call.experts > kChooseExperts ||
      call.top_k < 1 || call.top_k > call.experts) {
    return -11;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kChooseBlocks);
  config.blockDim = dim3(kChooseThreads);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kChooseBlocks;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = early_start ? 2 : 1;
  void* arguments[] = {const_cast<ChooseCall*>(&call)};
  const cudaError_t error = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(decode_choose_kernel), arguments);
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace requant
