// The operations of a group in order, done by one thread of the caller's: `serve` runs what is native, and comes back
// for the rest alone. A thread of an interpreter so holds no lock of it while there is work, and wakes nobody who needs
// one.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

#include "order.h"

namespace ze::shm {

enum Turn : int { kForeignTurn = 0, kFailed, kClosed };

class Stream {
  public:
    explicit Stream(Group& group) : group_(group) {}

    void put(const Order& order);

    // Until an order is foreign (the caller does it and then comes back), one fails (with `status`; all later ones are
    // dropped), or the stream was closed and nothing is left.
    Turn serve(Status* status);

    // How many orders were done.
    int64_t done() const { return done_.load(std::memory_order_acquire); }
    // Whether order `index` was done, or all were given up, within so many seconds.
    bool wait(int64_t index, double seconds);
    // Whether a native operation runs.
    bool busy() const { return busy_.load(std::memory_order_relaxed); }
    // Seconds of std::chrono::steady_clock at which order `index` began and ended; false for one of long ago.
    bool span(int64_t index, double* to);

    // No order begins any more; `serve` comes back from the one that runs. Does not end it: see Group::interrupt.
    void stop();
    // After `stop`: who waits goes on.
    void give_up();
    // No order follows.
    void close();

  private:
    struct Span {
        int64_t index = -1;
        double begin = 0, end = 0;
    };

    Group& group_;
    std::mutex mutex_;
    std::condition_variable arrived_, passed_;
    std::deque<Order> orders_;
    std::array<Span, 256> spans_;
    std::atomic<int64_t> done_{0};
    std::atomic<bool> busy_{false};
    double began_ = 0;
    bool foreign_ = false;  // one is in the caller's hands
    bool stopped_ = false;  // no order begins any more
    bool given_up_ = false;
    bool closed_ = false;
};

}  // namespace ze::shm
