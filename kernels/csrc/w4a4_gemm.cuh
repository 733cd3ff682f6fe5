// W4A4: y[M, N] = x[M, K] . w[N, K]^T with both operands in FP4, dense or grouped by expert, on the FP4 tensor cores.
//
// Operands lie as the checkpoint stores weights: codes [rows, K/2], block scales [rows, K/group], K innermost, nothing
// repacked. Activations sit in the m16 slot of the instruction, weights in the n8 slot.
//
// A CTA makes a BM x 128 tile of y from a ring of K slices of 256 in shared memory, filled by cp.async:
//   codes    128 bytes a row, one full line of memory; 16-byte chunk c of row r lies at c ^ (r % 8), so that the eight
//            rows of an ldmatrix phase fall into eight different bank groups
//   scales   one 16-byte (NVFP4) or 8-byte (MXFP4) slot a row, loaded once per slice by one wide load a lane. The
//            instruction's scale selectors let lane p of quad g hold row 8p + g: one register serves 32 rows, so those
//            32 rows are what one load covers, and scale_slot() keeps the load free of bank conflicts
// What lies past M, N or K is filled with code 0 and scale byte 0. That is exact: such a step adds nothing.
//
// Small M leaves few tiles, so K is also split over CTAs (blockIdx.z). Their FP32 parts go to `partial` and combine_kernel
// adds them in the order of K: the same bits every time. Global scales enter in FP32, after the sum over K.
#pragma once
#include <cuda_bf16.h>

#include <utility>

#include "fp4_mma.cuh"

namespace requant {

struct GemmArgs {
  const uint8_t* x_codes;   // [tokens, K/2], 16-byte aligned, as every pointer here
  const uint8_t* x_scales;  // [tokens, K/group]
  const float* x_global;    // NVFP4: [tokens] or [1]
  const uint8_t* w_codes;   // [experts, N, K/2]
  const uint8_t* w_scales;  // [experts, N, K/group]
  const float* w_global;    // NVFP4: [experts]
  const int* token;         // grouped: [rows], the token that row r reads; null: token r
  const int* offsets;       // grouped: [experts + 1], rows of expert e are offsets[e] .. offsets[e + 1]; null: dense
  void* y;                  // [rows, N] BF16 or FP32
  float* partial;           // [splits, rows, N] FP32 where splits > 1
  int rows, N, K, experts, splits;
  int x_global_stride;      // 1: a global scale per token; 0: one for all
  int y_is_bf16;
};

template <Format FORMAT_, int BM_>
struct Tile {
  static constexpr Format FORMAT = FORMAT_;
  static constexpr int BM = BM_, BN = 128, BK = 256;
  static constexpr int STEPS = BK / 64;  // instructions along K per slice
  static constexpr int GROUP = FORMAT == Format::NVFP4 ? 16 : 32;
  static constexpr int CODE_BYTES = BK / 2, SCALE_BYTES = BK / GROUP;
  static constexpr int WARPS_M = BM >= 64 ? 2 : 1, WARPS_N = 4;
  static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
  static constexpr int WARP_ROWS = BM / WARPS_M, WARP_COLUMNS = BN / WARPS_N;
  static constexpr int M_TILES = WARP_ROWS / 16, N_TILES = WARP_COLUMNS / 8;
  static constexpr int SCALE_BLOCKS = (M_TILES + 1) / 2;  // of 32 rows
  // As many slices in flight as 99 KB (an SM120 block's limit) hold, at most four.
  static constexpr int STAGES = BM <= 32 ? 4 : BM == 64 ? 3 : 2;
  static constexpr int STAGE_BYTES = (BM + BN) * (CODE_BYTES + SCALE_BYTES);
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
  static_assert(SHARED_BYTES <= 99 * 1024 - 1024, "SM120 has 99 KB a block, and the row table needs some");
  static_assert(N_TILES == 4, "one scale register serves four column tiles");

  // Where a stage keeps its parts.
  static constexpr int W_CODES = BM * CODE_BYTES, X_SCALES = (BM + BN) * CODE_BYTES,
                       W_SCALES = X_SCALES + BM * SCALE_BYTES;
};

// --- memory ---------------------------------------------------------------------------------------------------------

// BYTES (4, 8, 16) to shared memory in the background; what lies past `valid` bytes is zero and not read.
template <int BYTES>
__device__ __forceinline__ void copy_async(uint8_t* shared, const uint8_t* global, int valid) {
  uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(global), "n"(BYTES), "r"(valid)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8 and gets 4 bytes of each.
__device__ __forceinline__ void load_matrices(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                              const uint8_t* row) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

// Slot of a row's scales. A wide load serves its lanes in groups (8 lanes of 16 bytes, 16 lanes of 8): rows 8p + g for
// two (four) neighbouring g and all p. The xor spreads the p over the banks that those g leave free.
template <class T>
__device__ __forceinline__ int scale_slot(int row) {
  return T::FORMAT == Format::NVFP4 ? row ^ (row >> 2 & 6) : row ^ (row >> 2 & 4);
}

struct Operand {
  const uint8_t *codes, *scales;
};

// Rows 0 .. ROWS of one operand's K slice at k, into shared memory. source(r): the row's index in memory, negative for
// none. SCALE_COPY: bytes of scales per copy, as the alignment of a scale row allows; 1 means plain byte loads.
template <class T, int ROWS, int SCALE_COPY, class Source>
__device__ __forceinline__ void load_slice(uint8_t* codes, uint8_t* scales, Operand from, Source source, int k, int K) {
  constexpr int CHUNKS = T::CODE_BYTES / 16;
  constexpr int CODE_COPY = T::FORMAT == Format::NVFP4 && SCALE_COPY == 1 ? 8 : 16;  // K % 32 == 16: 8-byte rows
  FP4_UNROLL
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += T::THREADS) {
    int r = i / CHUNKS, chunk = i % CHUNKS, row = source(r);
    uint8_t* target = codes + r * T::CODE_BYTES + ((chunk ^ r % 8) * 16);
    FP4_UNROLL
    for (int part = 0; part < 16; part += CODE_COPY) {
      int first = k / 2 + chunk * 16 + part, valid = row < 0 ? 0 : min(max(K / 2 - first, 0), CODE_COPY);
      const uint8_t* address = from.codes + (valid ? static_cast<size_t>(row) * (K / 2) + first : 0);
      copy_async<CODE_COPY>(target + part, address, valid);
    }
  }
  int row_bytes = K / T::GROUP, begin = k / T::GROUP;
  if constexpr (SCALE_COPY > 1) {
    constexpr int COPIES = T::SCALE_BYTES / SCALE_COPY;
    for (int i = threadIdx.x; i < ROWS * COPIES; i += T::THREADS) {
      int r = i / COPIES, row = source(r), first = begin + i % COPIES * SCALE_COPY;
      int valid = row < 0 ? 0 : min(max(row_bytes - first, 0), SCALE_COPY);
      const uint8_t* address = from.scales + (valid ? static_cast<size_t>(row) * row_bytes + first : 0);
      copy_async<SCALE_COPY>(scales + scale_slot<T>(r) * T::SCALE_BYTES + i % COPIES * SCALE_COPY, address, valid);
    }
  } else {
    for (int i = threadIdx.x; i < ROWS * T::SCALE_BYTES; i += T::THREADS) {
      int r = i / T::SCALE_BYTES, row = source(r), first = begin + i % T::SCALE_BYTES;
      bool valid = row >= 0 && first < row_bytes;
      scales[scale_slot<T>(r) * T::SCALE_BYTES + i % T::SCALE_BYTES] =
          valid ? from.scales[static_cast<size_t>(row) * row_bytes + first] : 0;
    }
  }
}

// --- the sum over one K slice ----------------------------------------------------------------------------------------

template <int I>
struct Index {
  static constexpr int value = I;
};

template <class Body, int... I>
__device__ __forceinline__ void for_each(std::integer_sequence<int, I...>, Body body) {
  (body(Index<I>{}), ...);
}

// body(Index<0>), body(Index<1>), ...: the instruction's selectors must be constants, which a loop counter is not.
template <int COUNT, class Body>
__device__ __forceinline__ void for_each(Body body) {
  for_each(std::make_integer_sequence<int, COUNT>{}, body);
}

// A row's scales for one slice, as the words that the instruction takes.
template <class T>
__device__ __forceinline__ void load_scales(uint32_t (&words)[T::SCALE_BYTES / 4], const uint8_t* slot) {
  if constexpr (T::SCALE_BYTES == 16) {
    uint4 v = *reinterpret_cast<const uint4*>(slot);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
    uint2 v = *reinterpret_cast<const uint2*>(slot);
    words[0] = v.x, words[1] = v.y;
  }
}

template <class T>
__device__ __forceinline__ void add_slice(float (&sum)[T::M_TILES][T::N_TILES][4], const uint8_t* stage, int warp_m,
                                          int warp_n) {
  constexpr int WORDS = T::SCALE_BYTES / 4;
  const int lane = threadIdx.x % 32, g = lane / 4, p = lane % 4;
  const int row0 = warp_m * T::WARP_ROWS, column0 = warp_n * T::WARP_COLUMNS;

  uint32_t scale_x[T::SCALE_BLOCKS][WORDS], scale_w[WORDS];
  FP4_UNROLL
  for (int block = 0; block < T::SCALE_BLOCKS; ++block) {
    int row = row0 + 32 * block + 8 * (T::M_TILES == 1 ? p % 2 : p) + g;  // a 16-row tile has no rows for p = 2, 3
    load_scales<T>(scale_x[block], stage + T::X_SCALES + scale_slot<T>(row) * T::SCALE_BYTES);
  }
  load_scales<T>(scale_w, stage + T::W_SCALES + scale_slot<T>(column0 + 8 * p + g) * T::SCALE_BYTES);

  // ldmatrix: matrix l / 8 of an x tile is (rows + 0, +8) x (k + 0, +32) with rows first; of a w tile k first.
  const int swizzle = lane % 8;
  const uint8_t* x_row = stage + (row0 + lane % 8 + 8 * (lane / 8 % 2)) * T::CODE_BYTES;
  const uint8_t* w_row = stage + T::W_CODES + (column0 + lane % 8 + 8 * (lane / 16)) * T::CODE_BYTES;
  const int x_half = lane / 16, w_half = lane / 8 % 2;

  for_each<T::STEPS>([&](auto step) {
    constexpr int STEP = decltype(step)::value;
    constexpr int WORD = T::FORMAT == Format::NVFP4 ? STEP : STEP / 2;
    constexpr int BYTE = T::FORMAT == Format::NVFP4 ? 0 : STEP % 2 * 2;
    uint32_t x[T::M_TILES][4], w[T::N_TILES][2];
    FP4_UNROLL
    for (int i = 0; i < T::M_TILES; ++i)
      load_matrices(x[i][0], x[i][1], x[i][2], x[i][3],
                    x_row + 16 * i * T::CODE_BYTES + ((2 * STEP + x_half) ^ swizzle) * 16);
    FP4_UNROLL
    for (int j = 0; j < T::N_TILES; j += 2)
      load_matrices(w[j][0], w[j][1], w[j + 1][0], w[j + 1][1],
                    w_row + 8 * j * T::CODE_BYTES + ((2 * STEP + w_half) ^ swizzle) * 16);
    for_each<T::M_TILES>([&](auto i) {
      constexpr int I = decltype(i)::value;
      for_each<T::N_TILES>([&](auto j) {
        constexpr int J = decltype(j)::value;
        fp4_mma<T::FORMAT, BYTE, I % 2, J>(sum[I][J], x[I], w[J], scale_x[I / 2][WORD], scale_w[WORD]);
      });
    });
  });
}

// --- which rows, which scale -----------------------------------------------------------------------------------------

struct RowTile {  // rows first .. end of y, all of one expert; none where end <= first
  int expert, first, end;
};

// The index-th tile of BM rows when every expert's rows are cut into tiles of their own. Called by one whole warp.
template <int BM>
__device__ __forceinline__ RowTile find_tile(const int* offsets, int experts, int rows, int index) {
  const int lane = threadIdx.x % 32;
  int before = 0;  // tiles of the experts already passed
  for (int base = 0; base < experts; base += 32) {
    int expert = base + lane;
    int begin = expert < experts ? offsets[expert] : 0, end = expert < experts ? offsets[expert + 1] : 0;
    int tiles = (end - begin + BM - 1) / BM, through = tiles;
    FP4_UNROLL
    for (int offset = 1; offset < 32; offset *= 2) {
      int lower = __shfl_up_sync(0xFFFFFFFFu, through, offset);
      if (lane >= offset) through += lower;
    }
    unsigned reached = __ballot_sync(0xFFFFFFFFu, before + through > index);
    if (reached) {
      int owner = __ffs(static_cast<int>(reached)) - 1;
      int first = begin + (index - before - (through - tiles)) * BM;
      first = __shfl_sync(0xFFFFFFFFu, first, owner);
      end = __shfl_sync(0xFFFFFFFFu, end, owner);
      return {base + owner, first, min(min(first + BM, end), rows)};
    }
    before += __shfl_sync(0xFFFFFFFFu, through, 31);
  }
  return {0, 0, 0};
}

// a * b as two factors. Their product alone can leave FP32's range while sum * a * b is inside it; each factor takes
// half of the exponent, both on the same side of 1, so sum * first * second leaves the range only if the result does.
struct Factors {
  float first, second;
};

__device__ __forceinline__ Factors split_product(float a, float b) {
  int exponent_a, exponent_b;
  float mantissa = frexpf(a, &exponent_a) * frexpf(b, &exponent_b);
  int exponent = exponent_a + exponent_b, half = exponent / 2;
  return {ldexpf(mantissa, half), ldexpf(1.0f, min(exponent - half, 127))};
}

// --- kernels ---------------------------------------------------------------------------------------------------------

// Elements index and, where there are `both`, index + 1 of a BF16 or FP32 array; in one store where that is aligned.
__device__ __forceinline__ void store_pair(void* y, bool bf16, size_t index, float first, float second, bool both) {
  if (bf16) {
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(y) + index;
    if (both && index % 2 == 0) {
      *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(first, second);
    } else {
      out[0] = __float2bfloat16_rn(first);
      if (both) out[1] = __float2bfloat16_rn(second);
    }
  } else {
    float* out = static_cast<float*>(y) + index;
    if (both && index % 2 == 0) {
      *reinterpret_cast<float2*>(out) = make_float2(first, second);
    } else {
      out[0] = first;
      if (both) out[1] = second;
    }
  }
}

// Grid: row tiles, column tiles, splits of K. The grouped grid may hold more row tiles than there are; those return.
template <class T, int SCALE_COPY>
__global__ void __launch_bounds__(T::THREADS) gemm_kernel(const GemmArgs args) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ int tokens[T::BM];
  __shared__ RowTile shared_tile;

  RowTile tile{0, static_cast<int>(blockIdx.x) * T::BM, min(static_cast<int>(blockIdx.x + 1) * T::BM, args.rows)};
  if (args.offsets) {
    if (threadIdx.x < 32) {
      RowTile found = find_tile<T::BM>(args.offsets, args.experts, args.rows, static_cast<int>(blockIdx.x));
      if (threadIdx.x == 0) shared_tile = found;
    }
    __syncthreads();
    tile = shared_tile;
  }
  if (tile.end <= tile.first) return;
  if (threadIdx.x < T::BM) {
    int row = tile.first + static_cast<int>(threadIdx.x);
    tokens[threadIdx.x] = row >= tile.end ? -1 : args.token ? args.token[row] : row;
  }
  __syncthreads();

  const int column0 = static_cast<int>(blockIdx.y) * T::BN;
  const int slices = (args.K + T::BK - 1) / T::BK, split = static_cast<int>(blockIdx.z);
  const int begin = static_cast<int>(int64_t{slices} * split / args.splits);
  const int end = static_cast<int>(int64_t{slices} * (split + 1) / args.splits);
  const size_t weight_rows = static_cast<size_t>(tile.expert) * args.N;
  const Operand x{args.x_codes, args.x_scales};
  const Operand w{args.w_codes + weight_rows * (args.K / 2), args.w_scales + weight_rows * (args.K / T::GROUP)};
  auto x_source = [&](int r) { return tokens[r]; };
  auto w_source = [&](int r) { return column0 + r < args.N ? column0 + r : -1; };
  auto fetch = [&](int slice) {
    if (slice < end) {
      uint8_t* stage = ring + (slice - begin) % T::STAGES * T::STAGE_BYTES;
      int k = slice * T::BK;
      load_slice<T, T::BN, SCALE_COPY>(stage + T::W_CODES, stage + T::W_SCALES, w, w_source, k, args.K);
      load_slice<T, T::BM, SCALE_COPY>(stage, stage + T::X_SCALES, x, x_source, k, args.K);
    }
    commit_copies();  // also where there is nothing left, so that the count of pending groups stays right
  };

  const int warp = threadIdx.x / 32, warp_m = warp / T::WARPS_N, warp_n = warp % T::WARPS_N;
  float sum[T::M_TILES][T::N_TILES][4] = {};
  for (int ahead = 0; ahead < T::STAGES - 1; ++ahead) fetch(begin + ahead);
  for (int slice = begin; slice < end; ++slice) {
    wait_copies<T::STAGES - 2>();
    __syncthreads();  // this slice is there for all, and all are done with the one that fetch() now overwrites
    fetch(slice + T::STAGES - 1);
    add_slice<T>(sum, ring + (slice - begin) % T::STAGES * T::STAGE_BYTES, warp_m, warp_n);
  }

  const int lane = threadIdx.x % 32, g = lane / 4, p = lane % 4;
  FP4_UNROLL
  for (int i = 0; i < 2 * T::M_TILES; ++i) {  // a lane holds rows g and g + 8 of each m16 tile
    int r = warp_m * T::WARP_ROWS + 8 * i + g, row = tile.first + r;
    if (row >= tile.end) continue;
    Factors scale{1.0f, 1.0f};
    if constexpr (T::FORMAT == Format::NVFP4)
      scale = split_product(args.x_global[static_cast<size_t>(tokens[r]) * args.x_global_stride],
                            args.w_global[tile.expert]);
    FP4_UNROLL
    for (int j = 0; j < T::N_TILES; ++j) {
      int column = column0 + warp_n * T::WARP_COLUMNS + 8 * j + 2 * p;
      if (column >= args.N) continue;
      const float* d = sum[i / 2][j] + i % 2 * 2;
      float first = d[0] * scale.first * scale.second, second = d[1] * scale.first * scale.second;
      size_t index = static_cast<size_t>(row) * args.N + column;
      bool both = column + 1 < args.N;
      if (args.splits > 1)
        store_pair(args.partial, false, index + static_cast<size_t>(split) * args.rows * args.N, first, second, both);
      else
        store_pair(args.y, args.y_is_bf16, index, first, second, both);
    }
  }
}

// y = the parts of K, added in their order.
__global__ void __launch_bounds__(256) combine_kernel(const GemmArgs args) {
  size_t count = static_cast<size_t>(args.rows) * args.N;
  for (size_t i = blockIdx.x * 256u + threadIdx.x; i < count; i += gridDim.x * 256u) {
    float sum = args.partial[i];
    for (int split = 1; split < args.splits; ++split) sum += args.partial[split * count + i];
    store_pair(args.y, args.y_is_bf16, i, sum, 0.0f, false);
  }
}

}  // namespace requant
