#include "order.h"

#include "collectives.h"

namespace ze::shm {

Status run(Group& group, const Order& order) {
    const auto target = reinterpret_cast<char*>(order.target);
    const auto source = reinterpret_cast<const char*>(order.source);
    const auto count = static_cast<size_t>(order.count);
    const int wire = static_cast<int>(order.wire), type = static_cast<int>(order.type);
    switch (order.kind) {
        case kAllGather:
            return all_gather(group, target, source, count);
        case kReduceScatter:
            return reduce_scatter(group, target, source, count, wire, type, order.scale, order.with != 0);
        case kAllReduce:
            return all_reduce(group, target, count, type, order.scale);
        case kBroadcast:
            return broadcast(group, target, count, static_cast<int>(order.with));
        case kAllToAll:
            return all_to_all(group, target, source, count);
        default:
            return kDone;
    }
}

}  // namespace ze::shm
