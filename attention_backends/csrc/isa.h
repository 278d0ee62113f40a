// Which of the compiled kernels this CPU runs.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "torch_abi.h"

namespace pageloom {
namespace {  // of the one unit that includes it

enum Isa : int64_t { kAuto = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3, kAvx512Bf16 = 4, kAmx = 5, kWidest = kAmx };

#if defined(PAGELOOM_HAVE_AMX) && defined(__linux__)
// Whether the CPU has bf16 tiles, and the kernel lets this process (all its threads) use their registers.
bool tiles_allowed() {
  constexpr unsigned kBf16Bit = 1u << 22, kTileBit = 1u << 24;  // leaf 7, EDX
  constexpr unsigned long kRequestPermission = 0x1023, kTileData = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & kBf16Bit) || !(edx & kTileBit)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#if defined(__x86_64__)
// Not whether kernels for plain AVX-512 were built: a library for one CPU has only the widest that it takes.
bool cpu_has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

const KernelTable* table_of(int64_t isa) {
  switch (isa) {
    case kPortable: return kernels_portable();
#if defined(__x86_64__)
#if defined(PAGELOOM_HAVE_AVX2)
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kernels_avx2() : nullptr;
#endif
#if defined(PAGELOOM_HAVE_AVX512)
    case kAvx512: return cpu_has_avx512() ? kernels_avx512() : nullptr;
#endif
#if defined(PAGELOOM_HAVE_AVX512BF16)
    case kAvx512Bf16:
      return __builtin_cpu_supports("avx512bf16") && cpu_has_avx512() ? kernels_avx512bf16() : nullptr;
#endif
#if defined(PAGELOOM_HAVE_AMX) && defined(__linux__)
    case kAmx: {
      static const bool available = table_of(kAvx512Bf16) != nullptr && tiles_allowed();
      return available ? kernels_amx() : nullptr;
    }
#endif
#endif
    default: return nullptr;
  }
}

// The widest kernels at or below `isa` (kAuto: any) that have the cache's type and whose vectors divide a block.
const KernelTable& pick(int64_t isa, const CacheLayout& cache) {
  for (int64_t i = isa == kAuto ? kWidest : isa; i >= kPortable; --i) {
    const KernelTable* table = table_of(i);
    PAGELOOM_CHECK(table != nullptr || i != isa, "attention: ISA ", isa, " is not available on this CPU");
    if (i == kAmx && (cache.latent || (cache.dtype != Dtype::kBFloat16 && cache.dtype != Dtype::kInt8))) continue;
    if (table != nullptr && cache.block_size % table->vector_tokens == 0) return *table;
  }
  PAGELOOM_CHECK(false, "attention: block size ", cache.block_size, " is not a multiple of 4");
}

// The widest kernels at or below `isa`, for what is asked of no cache.
const KernelTable& widest(int64_t isa) {
  for (int64_t i = isa == kAuto ? kWidest : isa; i > kPortable; --i)
    if (const KernelTable* table = table_of(i)) return *table;
  return *kernels_portable();
}

}  // namespace
}  // namespace pageloom
