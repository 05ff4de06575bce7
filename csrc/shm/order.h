// One operation of a group in plain words, as it comes from outside.
#pragma once

#include <cstdint>

#include "group.h"

namespace ze::shm {

enum Kind : int64_t { kBarrier = 0, kAllGather, kReduceScatter, kAllReduce, kBroadcast, kAllToAll, kForeign };

// One operation; zeroengine/comm/stream.py has the same fields.
struct Order {
    int64_t kind;
    int64_t target, source;  // addresses
    int64_t count;           // bytes (all_gather: of a shard, all_to_all: of a block) or, of sums, elements of a result
    int64_t wire, type;      // of sums
    int64_t with;            // reduce_scatter: whether it accumulates; broadcast: the place of the source
    double scale;
    int64_t header[kHeaderWords];
    char text[kTextBytes];
};

static_assert(sizeof(Order) == 8 * sizeof(int64_t) + kHeaderWords * sizeof(int64_t) + kTextBytes, "as in stream.py");

// Moves the data of a native order; its fingerprint is the caller's.
Status run(Group& group, const Order& order);

}  // namespace ze::shm
