// What the emulated device API calls: threads are fibers, a block's warps meet in collectives, blocks run one after
// another. Violations of CUDA's rules become an error text that the launcher returns; the block is then abandoned.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <source_location>

namespace pageloom::emulator {

using Site = std::source_location;  // where in the kernel: lanes that meet must stand at the same line

struct Index3 {
  unsigned x, y, z;
};

enum class Op : uint8_t { none, block_sync, warp_sync, shuffle, any, ldmatrix, mma };

// What a lane brings to a collective and takes from it; lives on the lane's stack while it waits.
struct Shuffle {
  uint32_t value;
  int source;
  uint32_t result;
};
struct Any {
  bool value;
};
struct LdMatrix {
  const void* row;
  uint32_t* result;
  int matrices;
  bool transposed;
};
struct Mma {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
  bool is_f16;
};

// Waits until every lane of the warp (block_sync: every thread of the block) has arrived at the same line.
void meet(Op op, void* operand, Site site);
// Records the error and abandons the block.
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

char* shared_memory();
// A matrix row: 16 bytes, aligned, inside the block's shared memory.
void check_shared_row(const void* row, Site site);
// 16 bytes at `at`: aligned, and inside the block's shared memory or (if any are registered) inside a registered range.
void check_access(const void* at, Site site, const char* what);
// Order between blocks: a fence of the running thread; before it adds to a counter, its own fence behind the latest
// barrier of its block; before anyone reads what other blocks wrote, a fence behind the addition and a barrier.
void fence();
void check_release(Site site);
void check_acquired(Site site);
void cp_async16(void* shared, const void* global, bool valid, Site site);
void cp_async_commit();
void cp_async_wait(int at_most_pending);

// Null, or an error text that lives for ever.
const char* run_grid(Index3 grid, int threads, int shared_bytes, void (*entry)(const void*), const void* argument);

}  // namespace pageloom::emulator

extern "C" {
void pageloom_emulator_seed(uint64_t seed);
// Global memory that 16-byte accesses may touch; without any, all may be.
void pageloom_emulator_register(const void* begin, int64_t bytes);
void pageloom_emulator_clear_ranges();
}

// CUDA's own words.
extern pageloom::emulator::Index3 threadIdx, blockIdx, blockDim, gridDim;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
