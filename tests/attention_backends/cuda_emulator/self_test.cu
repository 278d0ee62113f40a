// Kernels that hold the device layer to what CUDA says, on the emulator and (the well-behaved ones) on a device.
#include <pageloom_device.cuh>

namespace pageloom::cuda {
namespace {

// ---- every thread's view of matrix instructions: registers in, registers out, [lane][register] ----

struct MmaParams {
  const uint32_t* a;
  const uint32_t* b;
  float* d;
};

template <class T>
__global__ void mma_registers(MmaParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  uint32_t a[4], b[2];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = p.a[lane * 4 + i];
  for (int i = 0; i < 2; ++i) b[i] = p.b[lane * 2 + i];
  for (int i = 0; i < 4; ++i) d[i] = p.d[lane * 4 + i];
  mma_m16n8k16<T>(d, a, b);
  for (int i = 0; i < 4; ++i) p.d[lane * 4 + i] = d[i];
}

struct LdMatrixParams {
  const vec16* rows;   // [32]
  const int* order;    // [32]: the row that each lane names
  uint32_t* out;       // [3 variants][32 lanes][4]
};

__global__ void ldmatrix_registers(LdMatrixParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  char* shared = shared_memory();
  store16(shared + lane * 16, load16(p.rows + lane));
  sync_warp();
  const char* row = shared + p.order[lane] * 16;
  uint32_t four[2][4], two[2];
  ldmatrix_x4(four[0], row);
  ldmatrix_x4_trans(four[1], row);
  ldmatrix_x2(two, row);
  for (int variant = 0; variant < 2; ++variant) {
    for (int i = 0; i < 4; ++i) p.out[variant * 128 + lane * 4 + i] = four[variant][i];
  }
  for (int i = 0; i < 2; ++i) p.out[256 + lane * 4 + i] = two[i];
}

// ---- conversions over arrays ----

struct ConvertParams {
  const void* in;
  void* out;
  int count;
};

template <class T>
__global__ void widen(ConvertParams p) {  // T -> float
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < p.count; i += gridDim.x * blockDim.x) {
    static_cast<float*>(p.out)[i] = to_float(static_cast<const T*>(p.in)[i]);
  }
}

template <class T>
__global__ void narrow_pairs(ConvertParams p) {  // float pairs -> packed pairs, count of pairs
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < p.count; i += gridDim.x * blockDim.x) {
    const float* in = static_cast<const float*>(p.in) + 2 * i;
    static_cast<uint32_t*>(p.out)[i] = pack2<T>(in[0], in[1]);
  }
}

__global__ void narrow_fours(ConvertParams p) {  // four floats -> four e4m3
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < p.count; i += gridDim.x * blockDim.x) {
    const float* in = static_cast<const float*>(p.in) + 4 * i;
    static_cast<uint32_t*>(p.out)[i] = pack4_fp8(in[0], in[1], in[2], in[3]);
  }
}

template <class T>
__global__ void widen_pairs(ConvertParams p) {  // e4m3 pairs -> float pairs by way of packed T
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < p.count; i += gridDim.x * blockDim.x) {
    const uint32_t two = fp8x2_to<T>(static_cast<const uint16_t*>(p.in)[i]);
    static_cast<float*>(p.out)[2 * i] = unpack_low<T>(two);
    static_cast<float*>(p.out)[2 * i + 1] = unpack_high<T>(two);
  }
}

__global__ void functions(ConvertParams p) {  // float -> exp2, log2, tanh, shuffles of one warp
  const int i = static_cast<int>(threadIdx.x);
  const float x = static_cast<const float*>(p.in)[i];
  float* out = static_cast<float*>(p.out) + i;
  out[0] = exp2_fast(x);
  out[32] = log2_fast(x);
  out[64] = tanh_precise(x);
  out[96] = shuffle_xor(x, 5);
  out[128] = shuffle(x, (i * 7 + 3) % 32);
  out[160] = static_cast<float>(shuffle_xor(i, 16) * 100 + shuffle(i, 9));
  out[192] = any_in_warp(i == p.count) ? 1.f : 0.f;
  out[224] = bits_float(byte_perm(0x33221100u, 0x77665544u, 0x7250u));
}

// Every block adds its number to a sum of its own and announces it; the last to arrive adds all up.
struct ArriveParams {
  float* parts;   // [blocks][4]
  int* arrivals;  // zero, before and after
  float* out;     // [4]
  int fault;      // `Disorder`
};

enum Disorder : int { IN_ORDER, FENCE_BEFORE_BARRIER, NO_FIRST_FENCE, NO_FIRST_BARRIER, NO_LAST_FENCE, NO_LAST_BARRIER };

__global__ void last_adds_up(ArriveParams p) {
  const int thread = static_cast<int>(threadIdx.x), blocks = static_cast<int>(gridDim.x);
  int* last = reinterpret_cast<int*>(shared_memory());
  if (thread < 4) p.parts[blockIdx.x * 4 + thread] = static_cast<float>(blockIdx.x * 4 + thread);
  if (p.fault == FENCE_BEFORE_BARRIER) fence_device();
  if (p.fault != NO_FIRST_BARRIER) sync_block();
  if (thread == 0) {
    if (p.fault != FENCE_BEFORE_BARRIER && p.fault != NO_FIRST_FENCE) fence_device();
    *last = atomic_add(p.arrivals, 1) == blocks - 1;
    if (p.fault != NO_LAST_FENCE) fence_device();
    if (*last != 0) *p.arrivals = 0;
    if (p.fault == NO_LAST_BARRIER) p.out[0] = load_fresh(p.parts);
  }
  sync_block();
  if (*last == 0) return;
  float sum = 0.f;
  for (int i = 0; i < blocks && thread < 4; ++i) sum += load_fresh(p.parts + i * 4 + thread);
  if (thread < 4) p.out[thread] = sum;
  if (thread == 4) {
    for (int i = 0; i < blocks; ++i) p.out[4] += bits_float(load16_fresh(p.parts + i * 4).x[3]);
  }
}

// ---- kernels with and without what CUDA demands ----

enum Fault : int {
  NONE,
  NO_BARRIER,
  NO_WAIT,
  LATE_GROUP,
  ENDED_BEFORE_WAIT,
  DIVERGENT_BARRIER,
  DIVERGENT_WARP,
  LANES_ENDED,
  SHUFFLE_FROM_ENDED,
  LDMATRIX_OUTSIDE,
  LDMATRIX_MISALIGNED,
  STORE_OUTSIDE,
  GLOBAL_OUTSIDE,
  GLOBAL_MISALIGNED,
  PLAIN_WRITE_BEFORE,
  PLAIN_WRITE_AFTER,
  WILD_WRITE,
  DEEP_STACK,
  UNINITIALISED,
  WARP_BARRIER,
  NO_WARP_BARRIER,
};

struct FaultParams {
  const char* in;  // [threads] x 16 bytes
  float* out;      // [threads]
  int fault;
  int shared_bytes;
};

__attribute__((noinline)) __device__ uint32_t fill_stack(int at) {
  volatile char many[1 << 18];
  for (int i = 0; i < 1 << 18; ++i) many[i] = 1;
  return static_cast<uint32_t>(many[at]);
}

__global__ void neighbour_by_copy(FaultParams p) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  char* shared = shared_memory();
  cp_async16(shared + (threads + thread) * 16, p.in + thread * 16, true);
  cp_async_commit();
  cp_async16(shared + thread * 16, p.in + thread * 16, true);
  cp_async_commit();
  if (p.fault == LATE_GROUP) {  // what is read is the last of two groups
    cp_async_wait<1>();
  } else if (p.fault != NO_WAIT && p.fault != ENDED_BEFORE_WAIT) {
    cp_async_wait<0>();
  }
  if (p.fault != NO_BARRIER) sync_block();
  const float* read = reinterpret_cast<const float*>(shared + (thread + 37) % threads * 16);
  p.out[thread] = *read;
  sync_block();
  if (p.fault != ENDED_BEFORE_WAIT) cp_async_wait<0>();
}

__global__ void faulty(FaultParams p) {
  const int thread = static_cast<int>(threadIdx.x);
  char* shared = shared_memory();
  uint32_t r[4] = {0, 0, 0, 0};
  float d[4] = {0, 0, 0, 0};
  vec16 ones{{1, 1, 1, 1}};
  switch (p.fault) {
    case DIVERGENT_BARRIER:
      if (thread < 32) {
        sync_block();
      } else {
        sync_block();
      }
      break;
    case DIVERGENT_WARP:
      if (thread % 2 == 0) {
        d[0] = shuffle_xor(1.f, 2);
      } else {
        sync_warp();
      }
      break;
    case LANES_ENDED:
      if (thread % 32 == 3) return;
      mma_m16n8k16<bf16>(d, r, {0, 0});
      break;
    case SHUFFLE_FROM_ENDED:
      if (thread % 32 == 3) return;
      d[0] = shuffle(1.f, 3);
      break;
    case LDMATRIX_OUTSIDE: ldmatrix_x4(r, shared + p.shared_bytes - 16 * 31 + thread % 32 * 16); break;
    case LDMATRIX_MISALIGNED: ldmatrix_x4(r, shared + 8); break;
    case STORE_OUTSIDE: store16(shared + p.shared_bytes, ones); break;
    case GLOBAL_OUTSIDE: r[0] = load16(p.in + static_cast<int>(blockDim.x) * 16).x[0]; break;
    case GLOBAL_MISALIGNED: r[0] = load16(p.in + 4).x[0]; break;
    case PLAIN_WRITE_BEFORE: *(shared - 4) = 1; break;
    case PLAIN_WRITE_AFTER: *(shared + p.shared_bytes) = 1; break;
    case WILD_WRITE: *reinterpret_cast<volatile int*>(static_cast<uintptr_t>(16)) = 1; break;
    case DEEP_STACK: r[0] = fill_stack(thread); break;
    case WARP_BARRIER:
    case NO_WARP_BARRIER:
      cp_async16(shared + thread * 16, p.in + thread * 16, true);
      cp_async_commit();
      cp_async_wait<0>();
      if (p.fault == WARP_BARRIER) sync_warp();
      ldmatrix_x4(r, shared + thread * 16);
      d[0] = bits_float(r[0]);
      r[0] = 0;
      break;
    case UNINITIALISED: d[0] = *reinterpret_cast<float*>(shared + thread * 4); break;
    default: break;
  }
  p.out[thread] = d[0] + static_cast<float>(r[0]);
}

// A barrier that only the threads which have not ended reach is allowed since sm_70.
__global__ void some_end_early(FaultParams p) {
  const int thread = static_cast<int>(threadIdx.x);
  auto* shared = reinterpret_cast<float*>(shared_memory());
  if (thread >= 40) return;
  shared[thread] = static_cast<float>(thread);
  sync_block();
  p.out[thread] = shared[39 - thread];
}

}  // namespace

extern "C" {

const char* self_test_mma(int is_f16, const uint32_t* a, const uint32_t* b, float* d) {
  return launch(is_f16 ? mma_registers<f16> : mma_registers<bf16>, dim3(1), 32, 0, nullptr, MmaParams{a, b, d});
}

const char* self_test_ldmatrix(const void* rows, const int* order, uint32_t* out) {
  const LdMatrixParams params{static_cast<const vec16*>(rows), order, out};
  return launch(ldmatrix_registers, dim3(1), 32, 512, nullptr, params);
}

const char* self_test_convert(int kind, const void* in, void* out, int count) {
  void (*const kernels[])(ConvertParams) = {widen<bf16>,        widen<f16>,        widen<fp8>,  narrow_pairs<bf16>,
                                            narrow_pairs<f16>,  narrow_fours,      widen_pairs<bf16>,
                                            widen_pairs<f16>};
  return launch(kernels[kind], dim3(2), 64, 0, nullptr, ConvertParams{in, out, count});
}

const char* self_test_functions(const void* in, void* out, int count) {
  return launch(functions, dim3(1), 32, 0, nullptr, ConvertParams{in, out, count});
}

const char* self_test_arrive(float* parts, int* arrivals, float* out, int blocks, int fault) {
  const ArriveParams params{parts, arrivals, out, fault};
  return launch(last_adds_up, dim3(static_cast<unsigned>(blocks)), 64, 16, nullptr, params);
}

const char* self_test_neighbour(const char* in, float* out, int fault, int threads) {
  const int shared_bytes = threads * 32;
  return launch(neighbour_by_copy, dim3(1), threads, shared_bytes, nullptr, FaultParams{in, out, fault, shared_bytes});
}

const char* self_test_faulty(const char* in, float* out, int fault, int threads, int shared_bytes) {
  return launch(faulty, dim3(1), threads, shared_bytes, nullptr, FaultParams{in, out, fault, shared_bytes});
}

const char* self_test_end_early(float* out, int grid_y, int shared_bytes) {
  const FaultParams params{nullptr, out, NONE, shared_bytes};
  return launch(some_end_early, dim3(1, static_cast<unsigned>(grid_y)), 96, shared_bytes, nullptr, params);
}

}  // extern "C"
}  // namespace pageloom::cuda
