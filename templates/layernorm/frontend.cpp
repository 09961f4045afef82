// layer_norm as Python and PyTorch's dispatcher call it: frontend.py in C++. See _shared/norm.h.
#include <ATen/autocast_mode.h>
#include <ATen/ops/layer_norm.h>

#include <limits>

#include "_shared/norm.h"

namespace {

using Signature = Tensor(const Tensor&, SymIntArrayRef, const Optional&, const Optional&, double);

const char* const NAME = "layer_norm";
const char* const SCHEMA =
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor";
const bool CENTRED = true, KEEPS_CHANNELS_LAST = false;
const double DEFAULT_EPS = std::numeric_limits<double>::quiet_NaN();

Tensor torchs(const AnyCall& c) {
    return at::layer_norm_symint(*c.input, c.shape, optional(c.weight), optional(c.bias), *c.eps);
}

Tensor dispatched(const Operator& op, const AnyCall& c) {
    return dispatched<Signature>(op).call(*c.input, c.shape, optional(c.weight), optional(c.bias), *c.eps);
}

template <class Eps>
bool launch(
    Table& table, const Answer& answer, const Problem& problem, const Memory& m, std::int64_t rows, std::int64_t cols,
    Eps eps) {
    const void* residual = nullptr;
    void* sum = nullptr;
    return table.run(answer, problem, m.x, residual, m.weight, m.bias, m.y, sum, m.mean, m.rstd, rows, cols, eps);
}

bool launch_backward(
    Table& table, const Answer& answer, const Problem& problem, const OfBackward& m, std::int64_t rows, std::int64_t cols) {
    const void* residual = nullptr;
    return table.run(
        answer, problem, m.dy, m.x, m.weight, m.mean, m.rstd, residual, m.dx, m.dweight, m.dbias, m.workspace[0],
        m.workspace[1], rows, cols);
}

// CUDA's autocast computes layer_norm in float32, the CPU's leaves it alone.
Tensor with_autocast(Operator& op, const AnyCall& c) {
    const c10::impl::ExcludeDispatchKeyGuard done(c10::autocast_dispatch_keyset);
    if (!c.input->is_cuda()) return dispatched(op, c);
    const auto cast = [](const Tensor* t) {
        return t ? at::autocast::cached_cast(at::kFloat, *t, at::kCUDA) : Tensor();
    };
    const Tensor input = cast(c.input), weight = cast(c.weight), bias = cast(c.bias);
    return dispatched(op, {&input, c.shape, c.weight ? &weight : nullptr, c.bias ? &bias : nullptr, c.eps});
}

void add_kernels(Operator& op, torch::Library& library) {
    add_norm(library, [&op](auto function) {
        return [&op, function](
                   const Tensor& input, SymIntArrayRef shape, const Optional& weight, const Optional& bias, double eps) {
            return function(op, AnyCall{&input, shape, pointer(weight), pointer(bias), eps});
        };
    });
}

}  // namespace
