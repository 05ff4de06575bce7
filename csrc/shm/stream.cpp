#include "stream.h"

#include "collectives.h"

namespace ze::shm {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class T>
T* pointer(int64_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

void Stream::put(const Order& order) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (failed_) return;
        orders_.push_back(order);
    }
    arrived_.notify_one();
}

Turn Stream::serve(Status* status) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto end = [&](int64_t index) {
        spans_[static_cast<size_t>(index) % spans_.size()] = {index, began_, now()};
        done_.store(index + 1, std::memory_order_release);
        passed_.notify_all();
    };
    if (foreign_) {
        foreign_ = false;
        end(done());
    }
    while (true) {
        arrived_.wait(lock, [&] { return closed_ || !orders_.empty(); });
        if (orders_.empty()) return kClosed;
        const Order order = orders_.front();
        orders_.pop_front();
        began_ = now();
        if (order.kind == kForeign) {
            foreign_ = true;
            return kForeignTurn;
        }
        busy_.store(true, std::memory_order_relaxed);
        lock.unlock();
        *status = run(order);
        lock.lock();
        busy_.store(false, std::memory_order_relaxed);
        if (*status != kDone) {  // who waits goes on when the caller has found out why
            failed_ = true;
            orders_.clear();
            return kFailed;
        }
        end(done());
    }
}

Status Stream::run(const Order& o) {
    group_.announce(o.header, o.text);
    const auto target = pointer<char>(o.target);
    const auto source = pointer<const char>(o.source);
    const auto count = static_cast<size_t>(o.count);
    const int wire = static_cast<int>(o.wire), type = static_cast<int>(o.type);
    Status status = kDone;
    switch (o.kind) {
        case kAllGather:
            status = all_gather(group_, target, source, count);
            break;
        case kReduceScatter:
            status = reduce_scatter(group_, target, source, count, wire, type, o.scale, o.with != 0);
            break;
        case kAllReduce:
            status = all_reduce(group_, target, count, type, o.scale);
            break;
        case kBroadcast:
            status = broadcast(group_, target, count, static_cast<int>(o.with));
            break;
        case kAllToAll:
            status = all_to_all(group_, target, source, count);
            break;
        default:
            break;  // a meeting is all that a barrier is
    }
    return status == kDone ? group_.finish() : status;
}

bool Stream::wait(int64_t index, double seconds) {
    if (done() > index) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    return passed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return given_up_ || done() > index; });
}

bool Stream::span(int64_t index, double* to) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Span& found = spans_[static_cast<size_t>(index) % spans_.size()];
    if (found.index != index) return false;
    to[0] = found.begin;
    to[1] = found.end;
    return true;
}

void Stream::give_up() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        failed_ = given_up_ = true;
        orders_.clear();
    }
    passed_.notify_all();
}

void Stream::close() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
    }
    arrived_.notify_one();
}

}  // namespace ze::shm
