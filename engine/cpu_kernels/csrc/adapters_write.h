// An adapter's factors, put where kernels read them (`adapters.h`).
#pragma once

#include <cstdint>

namespace pageloom {

// bf16 [rows][columns], elements so far apart.
struct GivenFactor {
  const uint16_t* data;
  int64_t rows, columns, row_stride, column_stride;
};

// One after the other.
void put_rows(uint16_t* into, const GivenFactor& a);

// b [outputs][rank], times `scale`, into blocks [blocks][max_rank][64] from output `start` on; the others' stay.
void put_blocks(uint16_t* blocks, int64_t max_rank, int64_t start, const GivenFactor& b, float scale);

}  // namespace pageloom
