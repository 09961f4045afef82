// rms_norm as Python and PyTorch's dispatcher call it: frontend.py in C++. See _shared/norm.h.
#include <ATen/ops/rms_norm.h>
#include <torch/version.h>

#include <limits>

#include "_shared/norm.h"

namespace {

using Signature = Tensor(const Tensor&, SymIntArrayRef, const Optional&, std::optional<double>);

const char* const NAME = "rms_norm";
const char* const SCHEMA =
    "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor";
const bool CENTRED = false, KEEPS_CHANNELS_LAST = true;
const double DEFAULT_EPS = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7  // see frontend.py
    ? std::numeric_limits<float>::epsilon()
    : std::numeric_limits<double>::quiet_NaN();

Tensor torchs(const AnyCall& c) { return at::rms_norm_symint(*c.input, c.shape, optional(c.weight), c.eps); }

Tensor dispatched(const Operator& op, const AnyCall& c) {
    return dispatched<Signature>(op).call(*c.input, c.shape, optional(c.weight), c.eps);
}

template <class Eps>
bool launch(
    Table& table, const Answer& answer, const Problem& problem, const Memory& m, std::int64_t rows, std::int64_t cols,
    Eps eps) {
    const void* residual = nullptr;
    void* sum = nullptr;
    return table.run(answer, problem, m.x, residual, m.weight, m.y, sum, m.rstd, rows, cols, eps);
}

bool launch_backward(
    Table& table, const Answer& answer, const Problem& problem, const OfBackward& m, std::int64_t rows, std::int64_t cols) {
    const void* residual = nullptr;
    return table.run(
        answer, problem, m.dy, m.x, m.weight, m.rstd, residual, m.dx, m.dweight, m.workspace[0], m.workspace[1], rows, cols);
}

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
