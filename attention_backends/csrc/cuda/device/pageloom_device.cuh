// The only file with CUDA intrinsics and inline PTX (sm_80 and later). Kernels include it as <pageloom_device.cuh>; the
// tests put an emulation of the same names in its place and run the very same kernel sources on a CPU.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <mutex>

namespace pageloom::cuda {

using Stream = void*;  // cudaStream_t; as in launch.h

// Storage only: arithmetic is done in float. fp8 is e4m3: no infinity, 0x7f and 0xff are NaN.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct fp8 {
  uint8_t bits;
};
struct alignas(16) vec16 {
  uint32_t x[4];
};

constexpr int WARP = 32;

__host__ __device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ int min_i(int a, int b) { return min(a, b); }
__device__ __forceinline__ int max_i(int a, int b) { return max(a, b); }
__device__ __forceinline__ float max_f(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ uint32_t float_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float bits_float(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// ---- conversions: to nearest even; NaN stays NaN; fp8 saturates at 448, infinities included ----

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
__device__ __forceinline__ float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float to_float(fp8 x) {
  return to_float(f16{__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3).x});
}

// The first argument lies at the lower address.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<bf16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <>
__device__ __forceinline__ uint32_t pack2<f16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ uint32_t pack4_fp8(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

template <class T>
__device__ __forceinline__ float unpack_low(uint32_t two) {
  return to_float(T{static_cast<uint16_t>(two)});
}
template <class T>
__device__ __forceinline__ float unpack_high(uint32_t two) {
  return to_float(T{static_cast<uint16_t>(two >> 16)});
}

namespace detail {

// e4m3 pairs before sm_89: each 7-bit magnitude slides under the wider exponent, and one exact multiplication
// (subnormals included) repairs the bias. Code 127 alone carries out of the magnitude when 1 is added: its exponent is
// filled, and it is NaN.
template <int SHIFT, uint32_t EXPONENT_ABOVE>
__device__ __forceinline__ uint32_t spread_e4m3(uint16_t two) {
  const uint32_t spread = __byte_perm(two, 0, 0x1404);  // each byte in the upper half of a 16-bit lane
  const uint32_t magnitude = (spread & 0x7f007f00u) >> SHIFT;
  const uint32_t one = 0x01000100u >> SHIFT;
  const uint32_t nan = (magnitude + one) & (0x80008000u >> SHIFT);
  return (spread & 0x80008000u) | (magnitude + nan * EXPONENT_ABOVE);
}

}  // namespace detail

// Two e4m3 (the first in the low byte) as a packed pair of T; exact.
template <class T>
__device__ __forceinline__ uint32_t fp8x2_to(uint16_t two);
template <>
__device__ __forceinline__ uint32_t fp8x2_to<f16>(uint16_t two) {
  uint32_t y;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(two));
#else
  asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(detail::spread_e4m3<1, 1>(two)), "r"(0x5c005c00u));  // 2^8
#endif
  return y;
}
template <>
__device__ __forceinline__ uint32_t fp8x2_to<bf16>(uint16_t two) {
#if __CUDA_ARCH__ >= 890
  const uint32_t halves = fp8x2_to<f16>(two);
  return pack2<bf16>(unpack_low<f16>(halves), unpack_high<f16>(halves));
#else
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(y)
      : "r"(detail::spread_e4m3<4, 15>(two)), "r"(0x7b807b80u), "r"(0x80008000u));  // * 2^120 + -0
  return y;
#endif
}

// ---- mathematics ----

__device__ __forceinline__ float exp2_fast(float x) {  // -inf gives 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {  // 0 gives -inf
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_precise(float x) { return tanhf(x); }

// ---- threads ----

__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ float shuffle_xor(float x, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, x, lane_mask);
}
__device__ __forceinline__ int shuffle_xor(int x, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, x, lane_mask);
}
__device__ __forceinline__ float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ bool any_in_warp(bool x) { return __any_sync(0xffffffffu, x); }

// ---- memory ----

// The block's dynamic shared memory, aligned to 128 bytes.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char pageloom_shared[];
  return pageloom_shared;
}

namespace detail {

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

}  // namespace detail

__device__ __forceinline__ vec16 load16(const void* from) { return *static_cast<const vec16*>(from); }
__device__ __forceinline__ void store16(void* to, vec16 value) { *static_cast<vec16*>(to) = value; }

// Global memory that this kernel touches once.
__device__ __forceinline__ vec16 load16_streaming(const void* from) {
  vec16 y;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(y.x[0]), "=r"(y.x[1]), "=r"(y.x[2]), "=r"(y.x[3])
               : "l"(from)
               : "memory");
  return y;
}
__device__ __forceinline__ void store16_streaming(void* to, vec16 value) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x[0]), "r"(value.x[1]),
               "r"(value.x[2]), "r"(value.x[3])
               : "memory");
}

// Between blocks of one kernel: the writer's threads meet in sync_block, then one of them fences and adds; the reader's
// one thread adds, fences, and its block meets in sync_block. What was written is then read by load*_fresh. By PTX's
// memory model (ISA, 8.9): writes -> barrier -> fence; add is a release pattern of the adding thread, cumulative over
// what the barrier ordered before it. A fence before the barrier is none of it: other threads' writes are not before it.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ int atomic_add(int* at, int value) { return atomicAdd(at, value); }  // the value before
__device__ __forceinline__ float load_fresh(const float* from) {  // past L1, which other blocks' writes do not reach
  float y;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(y) : "l"(from) : "memory");
  return y;
}
__device__ __forceinline__ vec16 load16_fresh(const void* from) {
  vec16 y;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(y.x[0]), "=r"(y.x[1]), "=r"(y.x[2]), "=r"(y.x[3])
               : "l"(from)
               : "memory");
  return y;
}

// 16 bytes global to shared without registers; when !valid, zeros, and `global` is not dereferenced.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(detail::shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most N of this thread's latest groups are under way; other threads' copies need a barrier besides.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- matrices: PTX semantics; lane i names row i % 8 of matrix i / 8, 16 bytes each ----

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(shared_row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(shared_row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(detail::shared_address(shared_row))
               : "memory");
}
// d += a b; a [16, 16] row-major, b [16, 8] column-major, d [16, 8].
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<f16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- host ----

namespace detail {

constexpr int SHARED_WITHOUT_ASKING = 48 * 1024;

// The driver is asked once for each kernel and device, not at each launch.
inline cudaError_t allow_shared(const void* kernel, int shared_bytes) {
  struct Allowed {
    const void* kernel;
    int device;
    int bytes;
  };
  static std::mutex mutex;
  static Allowed table[128];
  static int used = 0;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  int at = 0;
  while (at < used && (table[at].kernel != kernel || table[at].device != device)) ++at;
  if (at < used && table[at].bytes >= shared_bytes) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess && at < 128) {
    table[at] = Allowed{kernel, device, shared_bytes};
    if (at == used) ++used;
  }
  return error;
}

}  // namespace detail

// Queues kernel(params); returns null or an error text that lives for ever. A grid with a zero dimension launches
// nothing.
template <class Params>
const char* launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, Stream stream,
                   const Params& params) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return nullptr;
  if (shared_bytes > detail::SHARED_WITHOUT_ASKING) {
    const cudaError_t error = detail::allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace pageloom::cuda
