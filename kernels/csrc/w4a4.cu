// C entry points of the W4A4 kernels. Each launches on the given stream and returns a cudaError_t; the caller (w4a4.py)
// has checked shapes, dtypes and alignment. No allocation, no synchronisation: safe inside a CUDA graph.
#include <algorithm>

#include "w4a4_gemm.cuh"
#include "w4a4_quantize.cuh"

using namespace requant;

namespace {

template <class T, int SCALE_COPY>
cudaError_t launch_gemm(const GemmArgs& args, int row_tiles, cudaStream_t stream) {
  auto kernel = gemm_kernel<T, SCALE_COPY>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::SHARED_BYTES);
  if (status != cudaSuccess) return status;
  dim3 grid(row_tiles, (args.N + T::BN - 1) / T::BN, args.splits);
  kernel<<<grid, T::THREADS, T::SHARED_BYTES, stream>>>(args);
  status = cudaGetLastError();
  if (status != cudaSuccess || args.splits == 1) return status;
  size_t count = static_cast<size_t>(args.rows) * args.N;
  combine_kernel<<<static_cast<unsigned>(std::min<size_t>((count + 255) / 256, 4096)), 256, 0, stream>>>(args);
  return cudaGetLastError();
}

// A scale row starts at a multiple of K / group bytes, which decides how wide a copy may be.
template <Format FORMAT, int BM>
cudaError_t launch_aligned(const GemmArgs& args, int row_tiles, cudaStream_t stream) {
  using T = Tile<FORMAT, BM>;
  int row_bytes = args.K / T::GROUP;
  if (row_bytes % T::SCALE_BYTES == 0) return launch_gemm<T, T::SCALE_BYTES>(args, row_tiles, stream);
  if (row_bytes % 4 == 0) return launch_gemm<T, 4>(args, row_tiles, stream);
  return launch_gemm<T, 1>(args, row_tiles, stream);
}

template <Format FORMAT>
cudaError_t launch_format(const GemmArgs& args, int block_rows, int row_tiles, cudaStream_t stream) {
  switch (block_rows) {
    case 16: return launch_aligned<FORMAT, 16>(args, row_tiles, stream);
    case 32: return launch_aligned<FORMAT, 32>(args, row_tiles, stream);
    case 64: return launch_aligned<FORMAT, 64>(args, row_tiles, stream);
    case 128: return launch_aligned<FORMAT, 128>(args, row_tiles, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <GlobalScale GLOBAL>
void launch_nvfp4(const QuantizeArgs& args, cudaStream_t stream) {
  quantize_kernel<Format::NVFP4, GLOBAL><<<args.rows, QUANTIZE_THREADS, 0, stream>>>(args);
}

}  // namespace

// mxfp4: 0 NVFP4, 1 MXFP4. block_rows: 16, 32, 64 or 128. row_tiles: an upper bound where the rows are grouped.
extern "C" int requant_w4a4_gemm(const GemmArgs* args, int mxfp4, int block_rows, int row_tiles, void* stream) {
  auto launch = mxfp4 ? launch_format<Format::MXFP4> : launch_format<Format::NVFP4>;
  return launch(*args, block_rows, row_tiles, static_cast<cudaStream_t>(stream));
}

// global_scale: a GlobalScale; MXFP4 has none and ignores it.
extern "C" int requant_w4a4_quantize(const QuantizeArgs* args, int mxfp4, int global_scale, void* stream_handle) {
  cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (mxfp4) {
    quantize_kernel<Format::MXFP4, GlobalScale::GIVEN><<<args->rows, QUANTIZE_THREADS, 0, stream>>>(*args);
  } else if (global_scale == static_cast<int>(GlobalScale::GIVEN)) {
    launch_nvfp4<GlobalScale::GIVEN>(*args, stream);
  } else if (global_scale == static_cast<int>(GlobalScale::TOKEN)) {
    launch_nvfp4<GlobalScale::TOKEN>(*args, stream);
  } else {
    row_amax_kernel<<<args->rows, QUANTIZE_THREADS, 0, stream>>>(*args);
    launch_nvfp4<GlobalScale::TENSOR>(*args, stream);
  }
  return cudaGetLastError();
}

extern "C" const char* requant_w4a4_error(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}
