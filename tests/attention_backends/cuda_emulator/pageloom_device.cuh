// The names of csrc/cuda/device/pageloom_device.cuh in plain C++20: tests compile the very same kernel sources against
// this file and run them on a CPU. Slower than a device and stricter: see emulator.h.
#pragma once

#include "emulator.h"
#include "numbers.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace pageloom::cuda {

using Stream = void*;

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

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int min_i(int a, int b) { return a < b ? a : b; }
inline int max_i(int a, int b) { return a > b ? a : b; }
inline float max_f(float a, float b) { return fmaxf(a, b); }
inline uint32_t float_bits(float x) { return emulator::bits_of(x); }
inline float bits_float(uint32_t x) { return emulator::float_of(x); }
inline uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t y = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(both >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;  // PTX: the sign of the byte, replicated
    y |= byte << (8 * i);
  }
  return y;
}

// ---- conversions ----

inline float to_float(bf16 x) { return emulator::bf16_to_float(x.bits); }
inline float to_float(f16 x) { return emulator::f16_to_float(x.bits); }
inline float to_float(fp8 x) { return emulator::fp8_to_float(x.bits); }

template <class T>
uint32_t pack2(float low, float high);
template <>
inline uint32_t pack2<bf16>(float low, float high) {
  return emulator::float_to_bf16(low) | uint32_t{emulator::float_to_bf16(high)} << 16;
}
template <>
inline uint32_t pack2<f16>(float low, float high) {
  return emulator::float_to_f16(low) | uint32_t{emulator::float_to_f16(high)} << 16;
}
inline uint32_t pack4_fp8(float a, float b, float c, float d) {
  return emulator::float_to_fp8(a) | uint32_t{emulator::float_to_fp8(b)} << 8 |
         uint32_t{emulator::float_to_fp8(c)} << 16 | uint32_t{emulator::float_to_fp8(d)} << 24;
}
template <class T>
inline float unpack_low(uint32_t two) {
  return to_float(T{static_cast<uint16_t>(two)});
}
template <class T>
inline float unpack_high(uint32_t two) {
  return to_float(T{static_cast<uint16_t>(two >> 16)});
}
template <class T>
inline uint32_t fp8x2_to(uint16_t two) {
  return pack2<T>(to_float(fp8{static_cast<uint8_t>(two)}), to_float(fp8{static_cast<uint8_t>(two >> 8)}));
}

// ---- mathematics ----

inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }
inline float tanh_precise(float x) { return tanhf(x); }

// ---- threads ----

inline void sync_block(emulator::Site site = emulator::Site::current()) {
  emulator::meet(emulator::Op::block_sync, nullptr, site);
}
inline void sync_warp(emulator::Site site = emulator::Site::current()) {
  emulator::meet(emulator::Op::warp_sync, nullptr, site);
}

namespace detail {

inline uint32_t exchange(uint32_t value, int source, emulator::Site site) {
  emulator::Shuffle operand{value, source, 0};
  emulator::meet(emulator::Op::shuffle, &operand, site);
  return operand.result;
}

inline int lane() { return static_cast<int>(threadIdx.x % WARP); }

}  // namespace detail

inline float shuffle_xor(float x, int lane_mask, emulator::Site site = emulator::Site::current()) {
  return bits_float(detail::exchange(float_bits(x), detail::lane() ^ lane_mask, site));
}
inline int shuffle_xor(int x, int lane_mask, emulator::Site site = emulator::Site::current()) {
  return static_cast<int>(detail::exchange(static_cast<uint32_t>(x), detail::lane() ^ lane_mask, site));
}
inline float shuffle(float x, int lane, emulator::Site site = emulator::Site::current()) {
  return bits_float(detail::exchange(float_bits(x), lane & 31, site));
}
inline int shuffle(int x, int lane, emulator::Site site = emulator::Site::current()) {
  return static_cast<int>(detail::exchange(static_cast<uint32_t>(x), lane & 31, site));
}
inline bool any_in_warp(bool x, emulator::Site site = emulator::Site::current()) {
  emulator::Any operand{x};
  emulator::meet(emulator::Op::any, &operand, site);
  return operand.value;
}

// ---- memory ----

inline char* shared_memory() { return emulator::shared_memory(); }

inline vec16 load16(const void* from, emulator::Site site = emulator::Site::current()) {
  emulator::check_access(from, site, "load16");
  vec16 y;
  memcpy(&y, from, 16);
  return y;
}
inline void store16(void* to, vec16 value, emulator::Site site = emulator::Site::current()) {
  emulator::check_access(to, site, "store16");
  memcpy(to, &value, 16);
}
inline vec16 load16_streaming(const void* from, emulator::Site site = emulator::Site::current()) {
  return load16(from, site);
}
inline void store16_streaming(void* to, vec16 value, emulator::Site site = emulator::Site::current()) {
  store16(to, value, site);
}

// Blocks run one after another here, so nothing stale is ever seen; instead, the order that the memory model asks for
// is: barrier, fence, atomic_add, fence, barrier, load*_fresh.
inline void fence_device() { emulator::fence(); }
inline int atomic_add(int* at, int value, emulator::Site site = emulator::Site::current()) {
  emulator::check_release(site);
  const int before = *at;
  *at = before + value;
  return before;
}
inline float load_fresh(const float* from, emulator::Site site = emulator::Site::current()) {
  emulator::check_acquired(site);
  return *from;
}
inline vec16 load16_fresh(const void* from, emulator::Site site = emulator::Site::current()) {
  emulator::check_acquired(site);
  return load16(from, site);
}

inline void cp_async16(void* shared, const void* global, bool valid, emulator::Site site = emulator::Site::current()) {
  emulator::cp_async16(shared, global, valid, site);
}
inline void cp_async_commit() { emulator::cp_async_commit(); }
template <int N>
inline void cp_async_wait() {
  static_assert(N >= 0 && N < 8);
  emulator::cp_async_wait(N);
}

// ---- matrices ----

namespace detail {

template <int N>
inline void ldmatrix(uint32_t (&r)[N], const void* shared_row, bool transposed, emulator::Site site) {
  if (lane() < 8 * N) emulator::check_shared_row(shared_row, site);
  emulator::LdMatrix operand{shared_row, r, N, transposed};
  emulator::meet(emulator::Op::ldmatrix, &operand, site);
}

}  // namespace detail

inline void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row, emulator::Site site = emulator::Site::current()) {
  detail::ldmatrix(r, shared_row, false, site);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared_row,
                              emulator::Site site = emulator::Site::current()) {
  detail::ldmatrix(r, shared_row, true, site);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* shared_row, emulator::Site site = emulator::Site::current()) {
  detail::ldmatrix(r, shared_row, false, site);
}
template <class T>
struct is_f16;
template <>
struct is_f16<bf16> {
  static constexpr bool value = false;
};
template <>
struct is_f16<f16> {
  static constexpr bool value = true;
};

template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         emulator::Site site = emulator::Site::current()) {
  emulator::Mma operand{d, a, b, is_f16<T>::value};
  emulator::meet(emulator::Op::mma, &operand, site);
}

// ---- host ----

template <class Params>
const char* launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, Stream, const Params& params) {
  struct Job {
    void (*kernel)(Params);
    const Params& params;
  };
  const Job job{kernel, params};
  const auto entry = [](const void* argument) {
    const Job& job = *static_cast<const Job*>(argument);
    job.kernel(job.params);
  };
  return emulator::run_grid({grid.x, grid.y, grid.z}, threads, shared_bytes, entry, &job);
}

}  // namespace pageloom::cuda
