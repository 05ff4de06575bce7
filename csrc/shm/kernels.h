// What is done to the data: copies, and sums in an order that rank numbers alone decide.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ze::shm {

enum Type : int { kFloat = 0, kDouble, kBFloat16, kHalf, kInt8, kUInt8, kInt16, kInt32, kInt64, kTypes };

size_t type_bytes(int type);

// Whether sum() adds elements of type `wire` in type `type`.
bool can_sum(int wire, int type);

// Where a result of so many bytes goes: past the caches, into which it would not fit beside what else is in use. Stores
// need not read the target first, then.
enum class Store { kCached, kPastCaches };
Store store_of(size_t bytes);

void copy(void* target, const void* source, size_t bytes, Store how);

// out[i] = scale * (((rows[0][i] + rows[1][i]) + (rows[2][i] + rows[3][i])) + ...), added to out[i] with `accumulate`.
// An odd row is carried up unchanged. Elements are converted from `wire` to `type` first, and every result is rounded
// to `type`, as torch does that adds whole tensors; no bit depends on where a buffer is cut or aligned. `out` may be
// one of the rows. What is read for `accumulate` is cached anyway.
void sum(void* out, const void* const* rows, int n, size_t count, int wire, int type, double scale, bool accumulate,
         Store how);

}  // namespace ze::shm
