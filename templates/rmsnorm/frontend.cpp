// rms_norm as Python and PyTorch's dispatcher call it: frontend.py in C++. See _shared/norm.h.
//
// Calls that record gradients are PyTorch's: its rms_norm is differentiable.
#include <ATen/ops/rms_norm.h>
#include <torch/version.h>

#include <limits>

#include "_shared/norm.h"

namespace {

using Signature = Tensor(const Tensor&, SymIntArrayRef, const Optional&, std::optional<double>);

const char* const NAME = "rms_norm";
const char* const SCHEMA =
    "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor";
const bool HAS_BIAS = false, KEEPS_CHANNELS_LAST = true;
const double DEFAULT_EPS = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7  // see frontend.py
    ? std::numeric_limits<float>::epsilon()
    : std::numeric_limits<double>::quiet_NaN();
const size_t OPTIONS = 3;  // residual, sum, rstd

Tensor torchs(const AnyCall& c) { return at::rms_norm_symint(*c.input, c.shape, optional(c.weight), c.eps); }

Tensor dispatched(const Operator& op, const AnyCall& c) {
    return dispatched<Signature>(op).call(*c.input, c.shape, optional(c.weight), c.eps);
}

bool launch(
    Operator& op, const Answer& answer, const Problem& problem, std::uintptr_t addresses, const void* x, const void* weight,
    const void*, void* y, std::int64_t rows, std::int64_t cols, float eps) {
    const void* residual = nullptr;
    void *sum = nullptr, *rstd = nullptr;
    return op.run(answer, problem.device(), addresses, x, residual, weight, y, sum, rstd, rows, cols, eps);
}

Tensor differentiable(const Operator&, const AnyCall& c) { return torchs(c); }

// Which precision PyTorch's autocast has it in differs from version to version.
Tensor with_autocast(Operator&, const AnyCall& c) { return torchs(c); }

void add_kernels(Operator& op, torch::Library& library) {
    add_norm(library, [&op](auto function) {
        return [&op, function](
                   const Tensor& input, SymIntArrayRef shape, const Optional& weight, std::optional<double> eps) {
            return function(op, AnyCall{&input, shape, pointer(weight), nullptr, eps});
        };
    });
}

}  // namespace
