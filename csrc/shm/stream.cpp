#include "stream.h"

namespace ze::shm {
namespace {

// The ranks compare what they issued at their first meeting; an operation without data is that meeting.
Status take_part(Group& group, const Order& order) {
    group.announce(order.header, order.text);
    const Status status = run(group, order);
    return status == kDone ? group.finish() : status;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

void Stream::put(const Order& order) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (stopped_) return;
        orders_.push_back(order);
    }
    arrived_.notify_one();
}

Turn Stream::serve(Status* status) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto end = [&](int64_t index) {
        spans_[static_cast<size_t>(index) % spans_.size()] = {index, began_, now()};
        done_.store(index + 1, std::memory_order_release);
        lock.unlock();  // one who holds an interpreter's lock may be about to take this one
        passed_.notify_all();
        lock.lock();
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
        *status = take_part(group_, order);
        lock.lock();
        busy_.store(false, std::memory_order_relaxed);
        if (*status == kDone && stopped_) *status = kInterrupted;  // it may have moved, but nobody counts on it
        if (*status != kDone) {  // who waits goes on when the caller has found out why
            stopped_ = true;
            orders_.clear();
            return kFailed;
        }
        end(done());
    }
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

void Stream::stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    orders_.clear();
}

void Stream::give_up() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        given_up_ = true;
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
