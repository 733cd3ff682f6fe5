// Thin names for the instructions that SM90 has and later chips lost (wgmma) or share (mbarrier, bulk tensor copies).
// No policy here: one function, one instruction. Only code compiled for sm_90a may call them.
#pragma once
#include <cuda.h>
#include <stdint.h>

namespace requant {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Barriers that were just initialized, made visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and let the phase wait for `bytes` of bulk copies more.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrive once all of this thread's cp.async so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// One lane of the warp, always the same, in a way that lets the compiler know that it is one.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(chosen));
  return chosen != 0;
}

// Shared memory that this thread has written, made visible to wgmma and to the copy engine.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One box of a two-dimensional tensor -> shared memory; what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(inner), "r"(outer)
      : "memory");
}

// A run of bytes -> shared memory, without a tensor map: both addresses and the length are multiples of 16.
__device__ __forceinline__ void copy_run(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// The same for what is read once: the L2 gives it up before all else (evict_first, as CUTLASS encodes it), and keeps what the
// kernels around it read again.
__device__ __forceinline__ void copy_stream(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000;
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}

// copy_box for a tensor of three dimensions.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int inner, int middle,
                                         int outer) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(inner), "r"(middle), "r"(outer)
      : "memory");
}

// Ask the L2 for a line.
__device__ __forceinline__ void prefetch_to_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Where `address` of this block's shared memory lies in that of block `rank` of the cluster.
__device__ __forceinline__ uint32_t block_address(uint32_t address, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ void store_to_cluster(uint32_t address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// The same, and `barrier` of that block counts the four bytes as arrived: no fence, no barrier of the cluster.
__device__ __forceinline__ void store_and_count(uint32_t address, uint32_t barrier, float value) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

// Registers written before are operands of the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// What wgmma needs to know of B in shared memory: [n][64 k] BF16 rows of 128 bytes, 16-byte pieces swizzled by n % 8 as
// the copy engine does (SWIZZLE_128B), 1024 bytes from 8 rows to the next 8. The address is the caller's to add, / 16.
constexpr uint64_t kSwizzledRows = (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16);

// D[64 x N] += A[64 x 16] B[16 x N], BF16 operands, A in registers. A thread's d: as that many m16n8 tiles side by side.
template <int N>
struct Wgmma;

#define REQUANT_WGMMA_N(N, LIST, D0, D1, D2, D3, DESC, ...)                                                            \
  template <>                                                                                                          \
  struct Wgmma<N> {                                                                                                    \
    static __device__ __forceinline__ void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {                \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, {" D0 ", " D1 ", " D2 ", " D3 \
                   "}, " DESC ", 1, 1, 1, 0;"                                                                             \
                   : __VA_ARGS__                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                \
                   : "memory");                                                                                        \
    }                                                                                                                  \
  }
#define REQUANT_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

REQUANT_WGMMA_N(8, "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8", REQUANT_F4(0));
REQUANT_WGMMA_N(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", "%11", "%12", REQUANT_F4(0), REQUANT_F4(4));
REQUANT_WGMMA_N(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "%16", "%17", "%18", "%19",
              "%20", REQUANT_F4(0), REQUANT_F4(4), REQUANT_F4(8), REQUANT_F4(12));
REQUANT_WGMMA_N(64,
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
              "%23, %24, %25, %26, %27, %28, %29, %30, %31",
              "%32", "%33", "%34", "%35", "%36", REQUANT_F4(0), REQUANT_F4(4), REQUANT_F4(8), REQUANT_F4(12),
              REQUANT_F4(16), REQUANT_F4(20), REQUANT_F4(24), REQUANT_F4(28));
#undef REQUANT_F4
#undef REQUANT_WGMMA_N

}  // namespace requant
