// The element-wise mathematics of the optimizers, one element at a time: the same code in the CPU loop and in the CUDA
// kernel.
//
// Each operation rounds once (no contraction), in the order written here; zeroengine/ops/twins.py does the same in
// torch. `g` is the gradient already multiplied by the factor on gradients. `h` are the numbers of one parameter in one
// step, computed in double precision and rounded once; their order is that of the `hyper` functions in
// zeroengine/ops/rules.py.
#pragma once

#include <math.h>

#include "ze/export.h"

namespace ze {

constexpr int kHypers = 8;

struct Hypers {
    float at[kHypers];
};

enum RuleCode : int {
    kAdam = 0,
    kAdamW = 1,
    kAdamMax = 2,
    kAdamWMax = 3,
    kLion = 4,
    kAdagrad = 5,
    kSgd = 6,
    kSgdMomentum = 7,
    kSgdNesterov = 8,
};

// Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019), with AMSGrad (Reddi et al. 2018).
// h: 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), eps, decay
// Decay is weight_decay where it is added to the gradient, and 1 - lr * weight_decay where it shrinks the weight.
template <bool kDecoupled, bool kMax>
struct Adam {
    static constexpr int kStates = kMax ? 3 : 2;
    static ZE_HD void apply(float& p, float g, float& m, float& v, float& top, const Hypers& h) {
        if (kDecoupled) {
            p = p * h.at[6];
        } else {
            g = g + p * h.at[6];
        }
        m = m + (g - m) * h.at[0];
        v = v * h.at[1] + (g * g) * h.at[2];
        float second = v;
        if (kMax) {
            top = (v > top || v != v) ? v : top;  // NaN stays
            second = top;
        }
        p = p - (m / (sqrtf(second) * h.at[4] + h.at[5])) * h.at[3];
    }
};

// Lion (Chen et al. 2023). h: 1 - beta1, 1 - beta2, lr, 1 - lr * weight_decay
struct Lion {
    static constexpr int kStates = 1;
    static ZE_HD void apply(float& p, float g, float& m, float&, float&, const Hypers& h) {
        const float c = m + (g - m) * h.at[0];
        const float sign = c > 0.0f ? 1.0f : (c < 0.0f ? -1.0f : c);  // of NaN: NaN
        p = p * h.at[3] - sign * h.at[2];
        m = m + (g - m) * h.at[1];
    }
};

// Adagrad (Duchi et al. 2011). h: lr / (1 + (t - 1) * lr_decay), eps, weight_decay
struct Adagrad {
    static constexpr int kStates = 1;
    static ZE_HD void apply(float& p, float g, float& sum, float&, float&, const Hypers& h) {
        g = g + p * h.at[2];
        sum = sum + g * g;
        p = p - (g / (sqrtf(sum) + h.at[1])) * h.at[0];
    }
};

// Gradient descent without momentum. h: lr, weight_decay
struct Sgd {
    static constexpr int kStates = 0;
    static ZE_HD void apply(float& p, float g, float&, float&, float&, const Hypers& h) {
        g = g + p * h.at[1];
        p = p - g * h.at[0];
    }
};

// With momentum (Sutskever et al. 2013, as torch writes it). h: lr, weight_decay, momentum, 1 - dampening, momentum in
// the look-ahead. In a parameter's first step the third is 0 and the fourth 1: the buffer starts as the gradient.
template <bool kNesterov>
struct SgdMomentum {
    static constexpr int kStates = 1;
    static ZE_HD void apply(float& p, float g, float& buffer, float&, float&, const Hypers& h) {
        g = g + p * h.at[1];
        buffer = buffer * h.at[2] + g * h.at[3];
        p = p - (kNesterov ? g + buffer * h.at[4] : buffer) * h.at[0];
    }
};

// Calls `f` with the rule of `code`; false where there is none.
template <class F>
bool with_rule(int code, F&& f) {
    switch (code) {
        case kAdam:
            f(Adam<false, false>());
            return true;
        case kAdamW:
            f(Adam<true, false>());
            return true;
        case kAdamMax:
            f(Adam<false, true>());
            return true;
        case kAdamWMax:
            f(Adam<true, true>());
            return true;
        case kLion:
            f(Lion());
            return true;
        case kAdagrad:
            f(Adagrad());
            return true;
        case kSgd:
            f(Sgd());
            return true;
        case kSgdMomentum:
            f(SgdMomentum<false>());
            return true;
        case kSgdNesterov:
            f(SgdMomentum<true>());
            return true;
        default:
            return false;
    }
}

}  // namespace ze
