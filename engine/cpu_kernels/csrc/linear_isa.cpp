// Which kernels this CPU runs. Units of an ISA or a format that this build leaves out are weak symbols, hence null.
#include "experts_schedule.h"
#include "states.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pageloom {

#define PAGELOOM_WEAK __attribute__((weak))
#define PAGELOOM_WEAK_LINEAR(isa)                                \
  extern const LinearKernels* linear_bf16_##isa() PAGELOOM_WEAK; \
  extern const LinearKernels* linear_int8_##isa() PAGELOOM_WEAK; \
  extern const LinearKernels* linear_group_##isa(Format format) PAGELOOM_WEAK; \
  extern const LinearKernels* linear_float8_##isa(Format format) PAGELOOM_WEAK; \
  extern const LinearKernels* linear_float_##isa() PAGELOOM_WEAK; \
  extern const LinearKernels* rotate_heads_##isa() PAGELOOM_WEAK;
PAGELOOM_WEAK_LINEAR(portable)
PAGELOOM_WEAK_LINEAR(avx2)
PAGELOOM_WEAK_LINEAR(avx512)
PAGELOOM_WEAK_LINEAR(avx512vnni)
PAGELOOM_WEAK_LINEAR(avx512bf16)
PAGELOOM_WEAK_LINEAR(amx)
extern CombineRows combine_rows_portable() PAGELOOM_WEAK;
extern CombineRows combine_rows_avx2() PAGELOOM_WEAK;
extern CombineRows combine_rows_avx512() PAGELOOM_WEAK;
extern CombineRows combine_rows_avx512bf16() PAGELOOM_WEAK;
extern const MixKernels* mix_states_portable() PAGELOOM_WEAK;
extern const MixKernels* mix_states_avx2() PAGELOOM_WEAK;
extern const MixKernels* mix_states_avx512() PAGELOOM_WEAK;
extern const MixKernels* mix_states_avx512bf16() PAGELOOM_WEAK;

namespace {

constexpr int kFloat32 = static_cast<int>(Format::kFloat32), kRotate = static_cast<int>(Format::kRotate), kFormats = kRotate + 1;

#if defined(__x86_64__) && defined(__linux__)
// Whether the CPU has bf16 and int8 tiles, and the kernel lets this process (all its threads) use their registers.
bool tiles_allowed() {
  constexpr unsigned kTileBits = 1u << 22 | 1u << 24 | 1u << 25;  // leaf 7, EDX: bf16, tiles, int8
  constexpr unsigned long kRequestPermission = 0x1023, kTileData = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kTileBits) != kTileBits) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#if defined(__x86_64__) && defined(__linux__)
// Time stamps that 2,400 products of pairs, or of floats, take when none waits for another.
template <bool kPairs>
__attribute__((target("avx512f,avx512bf16"))) uint64_t time_products() {
  __m512 sums[12] = {};
  __m512i ones = _mm512_set1_epi32(0x3f803f80);
  __asm__ volatile("" : "+v"(ones));
  const uint64_t start = __rdtsc();
  for (int i = 0; i < 200; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j)
      sums[j] = kPairs ? _mm512_dpbf16_ps(sums[j], (__m512bh)ones, (__m512bh)ones)
                       : _mm512_fmadd_ps((__m512)ones, (__m512)ones, sums[j]);
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) __asm__ volatile("" : "+v"(sums[j]));
  }
  return __rdtsc() - start;
}

// Whether multiplying pairs beats widening them. A pair is two products and saves widening, but some CPUs with tiles
// issue pairs at a quarter of the rate.
bool pairs_are_fast() {
  uint64_t pairs = UINT64_MAX, floats = UINT64_MAX;
  for (int i = 0; i < 64; ++i) {  // the least of many, which every process finds alike: interrupted ones say nothing
    const uint64_t a = time_products<true>(), b = time_products<false>();
    pairs = a < pairs ? a : pairs;
    floats = b < floats ? b : floats;
  }
  return pairs < 3 * floats;
}
#else
bool pairs_are_fast() { return true; }
#endif

struct Family {
  const LinearKernels* (*bf16)();
  const LinearKernels* (*int8)();
  const LinearKernels* (*group)(Format);
  const LinearKernels* (*float8)(Format);
  const LinearKernels* (*wide)();
  const LinearKernels* (*rotate)();
};

bool cpu_has(int64_t isa) {
  switch (isa) {
    case kPortable: return true;
#if defined(__x86_64__)
    case kAvx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case kAvx512Vnni: return cpu_has(kAvx512) && __builtin_cpu_supports("avx512vnni");
    case kAvx512Bf16: return cpu_has(kAvx512Vnni) && __builtin_cpu_supports("avx512bf16");
#if defined(__linux__)
    case kAmx: return cpu_has(kAvx512Bf16) && tiles_allowed();
#endif
#endif
    default: return false;
  }
}

#define PAGELOOM_FAMILY(isa) \
  {linear_bf16_##isa,   linear_int8_##isa,  linear_group_##isa, \
   linear_float8_##isa, linear_float_##isa, rotate_heads_##isa}
Family family_of(int64_t isa) {
  switch (isa) {
    case kPortable: return PAGELOOM_FAMILY(portable);
    case kAvx2: return PAGELOOM_FAMILY(avx2);
    case kAvx512: return PAGELOOM_FAMILY(avx512);
    case kAvx512Vnni: return PAGELOOM_FAMILY(avx512vnni);
    case kAvx512Bf16: return PAGELOOM_FAMILY(avx512bf16);
    case kAmx: return PAGELOOM_FAMILY(amx);
    default: return {};
  }
}

struct Table {
  const LinearKernels* widest[kWidest + 1][kFormats] = {};  // of this ISA, else of the next narrower one
  const LinearKernels* fastest[kFormats] = {};
  bool available[kWidest + 1] = {};

  Table() {
    for (int64_t isa = kPortable; isa <= kWidest; ++isa) {
      const Family family = family_of(isa);
      const bool built = family.bf16 != nullptr || family.int8 != nullptr || family.group != nullptr;
      available[isa] = built && cpu_has(isa);
      for (int format = 0; format < kFormats; ++format) {
        const LinearKernels* own = nullptr;
        if (available[isa] && format == 0 && family.bf16 != nullptr) own = family.bf16();
        if (available[isa] && format == 1 && family.int8 != nullptr) own = family.int8();
        if (available[isa] && format == kFloat32 && family.wide != nullptr) own = family.wide();
        if (available[isa] && format == kRotate && family.rotate != nullptr) own = family.rotate();
        if (available[isa] && format >= 2 && format < kFloat32 && family.group != nullptr)
          own = family.group(static_cast<Format>(format));
        if (available[isa] && own == nullptr && family.float8 != nullptr)
          own = family.float8(static_cast<Format>(format));
        widest[isa][format] = own != nullptr ? own : widest[isa - 1][format];
      }
    }
    for (int format = 0; format < kFormats; ++format) fastest[format] = widest[kWidest][format];
    constexpr int kBf16 = static_cast<int>(Format::kBFloat16);
    const LinearKernels* const pairs = available[kAvx512Bf16] ? widest[kAvx512Bf16][kBf16] : nullptr;
    if (pairs != nullptr && fastest[kBf16] == pairs && !pairs_are_fast())
      for (const Format format : {Format::kBFloat16, Format::kFloat8, Format::kFloat8Block})  // all multiply bf16
        fastest[static_cast<int>(format)] = widest[kAvx512Vnni][static_cast<int>(format)];
  }
};

const Table& table() {
  static const Table built;
  return built;
}

}  // namespace

bool isa_available(int64_t isa) { return isa >= kPortable && isa <= kWidest && table().available[isa]; }

const LinearKernels* kernels_of(Format format, int64_t isa) {
  const auto index = static_cast<int32_t>(format);
  if (index < 0 || index >= kFormats || isa < kAuto || isa > kWidest) return nullptr;
  return isa == kAuto ? table().fastest[index] : table().widest[isa][index];
}

const LinearKernels* expert_kernels_of(Format format, int64_t isa) {
  // With tiles, many rows of the group formats are multiplied as bf16 and few as int8 (linear_amx_group.cpp).
  const bool by_rows = format != Format::kBFloat16 && format != Format::kInt8 && format != Format::kFloat8 &&
                       format != Format::kFloat8Block;
  return kernels_of(format, by_rows && (isa == kAuto || isa > kAvx512Bf16) ? int64_t{kAvx512Bf16} : isa);
}

CombineRows combine_rows_of(int64_t isa) {
  const auto best = [&](int64_t of) { return (isa == kAuto || isa >= of) && isa_available(of); };
  if (combine_rows_avx512bf16 != nullptr && best(kAvx512Bf16)) return combine_rows_avx512bf16();
  if (combine_rows_avx512 != nullptr && best(kAvx512)) return combine_rows_avx512();
  if (combine_rows_avx2 != nullptr && best(kAvx2)) return combine_rows_avx2();
  return combine_rows_portable();
}

const MixKernels* mix_kernels_of(int64_t isa) {
  if (isa != kAuto && !isa_available(isa)) return nullptr;
  const auto best = [&](int64_t of) { return (isa == kAuto || isa >= of) && isa_available(of); };
  if (mix_states_avx512bf16 != nullptr && best(kAvx512Bf16)) return mix_states_avx512bf16();
  if (mix_states_avx512 != nullptr && best(kAvx512)) return mix_states_avx512();
  if (mix_states_avx2 != nullptr && best(kAvx2)) return mix_states_avx2();
  return mix_states_portable();
}

}  // namespace pageloom
