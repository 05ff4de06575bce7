// Collectives as sequences of meetings (see group.h). A source in the arena is read by the peers where it lies, and the
// operation ends with a closing meeting: nobody reads it any more. Other memory goes through the staging area, in
// rounds.
#pragma once

#include "group.h"

namespace ze::shm {

// full[p] = shard of rank p; `bytes` of one shard.
Status all_gather(Group& g, char* full, const char* shard, size_t bytes);

// out = scale * sum over ranks of their slice of `full` (+ out); `count` elements of one slice.
Status reduce_scatter(Group& g, char* out, const char* full, size_t count, int wire, int type, double scale,
                      bool accumulate);

// data = scale * sum over ranks, in place.
Status all_reduce(Group& g, char* data, size_t count, int type, double scale);

Status broadcast(Group& g, char* data, size_t bytes, int src);

// Block j of `input` goes to rank j. All in bytes; `remote[p]`: where the block for this rank begins in p's input;
// `largest`: the largest block of any pair of ranks.
struct Blocks {
    const int64_t* input_offset;
    const int64_t* input_bytes;
    const int64_t* output_offset;
    const int64_t* output_bytes;
    const int64_t* remote;
    size_t input_total;
    size_t largest;
};
Status all_to_all(Group& g, char* output, const char* input, const Blocks& blocks);

// The same with blocks of one size.
Status all_to_all(Group& g, char* output, const char* input, size_t block);

}  // namespace ze::shm
