// How a call hands over many tensors at once: rows of 64-bit words, one row for each segment. zeroengine/ops/native.py
// writes them.
#pragma once

#include <stdint.h>

#include "ze/export.h"

namespace ze {

enum Kind : int {
    kNone = 0,
    kFloat = 1,
    kBfloat16 = 2,
    kHalf = 3,
};

// An update: addresses of parameter, gradient, three states and copy (0 where there is none); elements; kinds and row
// of hypers.
struct Update {
    void* param;
    const void* grad;
    float* states[3];
    void* copy;
    int64_t count;
    uint64_t kinds;  // parameter | gradient << 8 | copy << 16 | row of hypers << 32

    ZE_HD int param_kind() const { return int(kinds & 0xff); }
    ZE_HD int grad_kind() const { return int((kinds >> 8) & 0xff); }
    ZE_HD int copy_kind() const { return int((kinds >> 16) & 0xff); }
    ZE_HD int64_t hypers() const { return int64_t(kinds >> 32); }
};
static_assert(sizeof(Update) == 8 * 8, "a row is eight words");

// A conversion: target, source, elements, kinds (target | source << 8).
struct Cast {
    void* target;
    const void* source;
    int64_t count;
    uint64_t kinds;

    ZE_HD int target_kind() const { return int(kinds & 0xff); }
    ZE_HD int source_kind() const { return int((kinds >> 8) & 0xff); }
};
static_assert(sizeof(Cast) == 4 * 8, "a row is four words");

// Something to read: address, elements, kind.
struct Read {
    const void* source;
    int64_t count;
    uint64_t kind;
};
static_assert(sizeof(Read) == 3 * 8, "a row is three words");

}  // namespace ze
