// Optimizer steps on the CPU: one pass that scales the gradient, updates parameter and states, and writes a rounded
// copy.

#include "ze/convert.h"
#include "ze/export.h"
#include "ze/parallel.h"
#include "ze/rules.h"
#include "ze/segments.h"

namespace {

using namespace ze;

// Memory is asked for before its turn: these are more streams than a processor follows, and it stops at the end of each
// page. Every line is fetched kAhead elements early into the nearest cache. Every kFar elements one line is fetched
// that far ahead into the next cache, for the address of its page to be known in time.
constexpr int64_t kLine = 16;  // elements of a cache line
constexpr int64_t kAhead = 8 * kLine;
constexpr int64_t kFar = 16 * kLine;

template <class Rule>
void apply(int64_t n, float* __restrict p, const float* __restrict g, float* __restrict a, float* __restrict b,
           float* __restrict c, const Hypers& given, float scale) {
    const Hypers h = given;  // in registers
    float none = 0.0f;
    const auto one = [&](int64_t i) {
        if constexpr (Rule::kStates == 3) {
            Rule::apply(p[i], g[i] * scale, a[i], b[i], c[i], h);
        } else if constexpr (Rule::kStates == 2) {
            Rule::apply(p[i], g[i] * scale, a[i], b[i], none, h);
        } else if constexpr (Rule::kStates == 1) {
            Rule::apply(p[i], g[i] * scale, a[i], none, none, h);
        } else {
            Rule::apply(p[i], g[i] * scale, none, none, none, h);
        }
    };
    int64_t i = 0;
    for (; i + kLine <= n; i += kLine) {
        __builtin_prefetch(p + i + kAhead, 1);
        __builtin_prefetch(g + i + kAhead);
        if constexpr (Rule::kStates > 0) __builtin_prefetch(a + i + kAhead, 1);
        if constexpr (Rule::kStates > 1) __builtin_prefetch(b + i + kAhead, 1);
        if constexpr (Rule::kStates > 2) __builtin_prefetch(c + i + kAhead, 1);
        if (i % kFar == 0) {
            __builtin_prefetch(p + i + kFar, 0, 2);
            __builtin_prefetch(g + i + kFar, 0, 2);
            if constexpr (Rule::kStates > 0) __builtin_prefetch(a + i + kFar, 0, 2);
            if constexpr (Rule::kStates > 1) __builtin_prefetch(b + i + kFar, 0, 2);
            if constexpr (Rule::kStates > 2) __builtin_prefetch(c + i + kFar, 0, 2);
        }
        for (int64_t k = i; k < i + kLine; ++k) one(k);
    }
    for (; i < n; ++i) one(i);
}

template <class Rule>
void update_block(const Update& row, int64_t begin, int64_t end, const Hypers& h, float scale) {
    alignas(64) float grad_buffer[kBlock];
    alignas(64) float param_buffer[kBlock];
    const int64_t n = end - begin;
    const float* g = load(row.grad, row.grad_kind(), begin, n, grad_buffer);
    float* p = const_cast<float*>(load(row.param, row.param_kind(), begin, n, param_buffer));
    float* states[3];
    for (int s = 0; s < 3; ++s) states[s] = row.states[s] == nullptr ? nullptr : row.states[s] + begin;
    apply<Rule>(n, p, g, states[0], states[1], states[2], h, scale);
    if (row.param_kind() != kFloat) store(row.param, row.param_kind(), begin, n, p);
    if (row.copy_kind() != kNone) store(row.copy, row.copy_kind(), begin, n, p);
}

}  // namespace

// Returns 0, or 1 for a rule that is not known.
ZE_EXPORT int ze_update(int rule, const Update* rows, int64_t count, const Hypers* hypers, float scale, int threads) {
    const bool known = with_rule(rule, [&](auto kind) {
        using Rule = decltype(kind);
        for_blocks(rows, count, threads, [&](int64_t i, int64_t begin, int64_t end) {
            update_block<Rule>(rows[i], begin, end, hypers[rows[i].hypers()], scale);
        });
    });
    return known ? 0 : 1;
}

// target = source * scale, in the target's type.
ZE_EXPORT int ze_cast(const Cast* rows, int64_t count, float scale, int threads) {
    for_blocks(rows, count, threads, [&](int64_t i, int64_t begin, int64_t end) {
        alignas(64) float buffer[kBlock];
        alignas(64) float scaled[kBlock];
        const int64_t n = end - begin;
        const float* from = load(rows[i].source, rows[i].source_kind(), begin, n, buffer);
        float* to = scaled;
        if (rows[i].target_kind() == kFloat) to = static_cast<float*>(rows[i].target) + begin;
        for (int64_t k = 0; k < n; ++k) to[k] = from[k] * scale;
        if (to == scaled) store(rows[i].target, rows[i].target_kind(), begin, n, scaled);
    });
    return 0;
}
