// Does compute-sanitizer's racecheck understand a cluster's barriers? The pattern of W4A16's split of K, and nothing else:
// each of two blocks fills its own shared memory, all meet at a cluster barrier (release, acquire), then each writes
// into the other's. Case by case:
//   0  filled by cp.async, waited for (wait_group 0), the barrier: what w4a16_sums.cuh does
//   1  filled by ordinary stores, the barrier
//   2  as 0, with a block barrier before the cluster's as well
//   3  filled by ordinary stores, no barrier: a real race, which the tool must find
// nvcc -arch=sm_90 -lineinfo -o cluster_race cluster_race.cu; compute-sanitizer --tool racecheck ./cluster_race CASE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../kernels/csrc/ptx.cuh"

using namespace requant;

constexpr int kThreads = 64;

__global__ void __cluster_dims__(2, 1, 1) exchange(const float4* from, float* to, int how) {
  __shared__ __align__(16) float4 ring[kThreads];
  const int thread = threadIdx.x, rank = blockIdx.x;
  float seen;
  if (how == 0 || how == 2) {
    copy_async<16>(shared_address(ring + thread), from + rank * kThreads + thread);
    copy_commit();
    copy_wait<0>();
    seen = ring[thread].x;
  } else {
    ring[thread] = from[rank * kThreads + thread];
    seen = ring[thread].x;
  }
  if (how == 2) __syncthreads();
  if (how != 3) {
    cluster_arrive();
    cluster_wait();
  }
  // Another thread's place in the other block.
  store_to_block(shared_address(ring + (thread + 32) % kThreads), rank ^ 1, seen + 1.0f);
  cluster_arrive();
  cluster_wait();
  to[rank * kThreads + thread] = ring[thread].x;
}

int main(int argc, char** argv) {
  const int how = argc > 1 ? atoi(argv[1]) : 0;
  float4 host[2 * kThreads];
  for (int i = 0; i < 2 * kThreads; ++i) host[i] = make_float4(i, 0, 0, 0);
  float4* from;
  float* to;
  cudaMalloc(&from, sizeof(host));
  cudaMalloc(&to, 2 * kThreads * sizeof(float));
  cudaMemcpy(from, host, sizeof(host), cudaMemcpyHostToDevice);
  exchange<<<2, kThreads>>>(from, to, how);
  float result[2 * kThreads];
  if (cudaMemcpy(result, to, sizeof(result), cudaMemcpyDeviceToHost) != cudaSuccess) return 2;
  int wrong = 0;
  for (int i = 0; i < 2 * kThreads; ++i) {
    const int rank = i / kThreads, thread = i % kThreads;
    wrong += result[i] != (rank ^ 1) * kThreads + (thread + 32) % kThreads + 1.0f;
  }
  printf("case %d: %d wrong\n", how, wrong);
  return how != 3 && wrong != 0;
}
