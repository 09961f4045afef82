// layer_norm as Python and PyTorch's dispatcher call it: frontend.py in C++, with gradients. See _shared/norm.h.
//
// The forward pass is a variant's, or PyTorch's where none serves. The backward pass is PyTorch's own: a variant gives no
// mean and no reciprocal deviation, so native_layer_norm computes them again.
#include <ATen/autocast_mode.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

#include "_shared/norm.h"

namespace {

using Signature = Tensor(const Tensor&, SymIntArrayRef, const Optional&, const Optional&, double);

const char* const NAME = "layer_norm";
const char* const SCHEMA =
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor";
const bool HAS_BIAS = true, KEEPS_CHANNELS_LAST = false;
const double DEFAULT_EPS = std::numeric_limits<double>::quiet_NaN();
const size_t OPTIONS = 0;

Tensor torchs(const AnyCall& c) {
    return at::layer_norm_symint(*c.input, c.shape, optional(c.weight), optional(c.bias), *c.eps);
}

Tensor dispatched(const Operator& op, const AnyCall& c) {
    return dispatched<Signature>(op).call(*c.input, c.shape, optional(c.weight), optional(c.bias), *c.eps);
}

bool launch(
    Operator& op, const Answer& answer, const Problem& problem, std::uintptr_t addresses, const void* x, const void* weight,
    const void* bias, void* y, std::int64_t rows, std::int64_t cols, float eps) {
    return op.run(answer, problem.device(), addresses, x, weight, bias, y, rows, cols, eps);
}

struct Differentiable : torch::autograd::Function<Differentiable> {
    static Tensor forward(
        torch::autograd::AutogradContext* context, const c10::TypedOperatorHandle<Signature>& op, const Tensor& input,
        SymIntArrayRef shape, const Optional& weight, const Optional& bias, double eps) {
        context->save_for_backward({input, weight.value_or(Tensor()), bias.value_or(Tensor())});
        context->saved_data["shape"] = shape;
        context->saved_data["eps"] = eps;
        const at::AutoDispatchBelowADInplaceOrView below;
        return op.call(input, shape, weight, bias, eps);
    }

    static torch::autograd::variable_list backward(
        torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
        const auto saved = context->get_saved_variables();
        const Tensor &input = saved[0], &weight = saved[1], &bias = saved[2];
        const std::vector<c10::SymInt> shape = context->saved_data["shape"].toSymIntVector();
        const double eps = context->saved_data["eps"].toDouble();
        const auto optional = [](const Tensor& t) { return t.defined() ? Optional(t) : std::nullopt; };
        Tensor mean, deviation;
        {
            const at::NoGradGuard constants;  // the derivative of the backward pass knows them as functions of the input
            std::tie(std::ignore, mean, deviation) =
                at::native_layer_norm_symint(input, shape, std::nullopt, std::nullopt, eps);
        }
        size_t edge = 0;  // arguments that are no tensors, or left out, have none
        std::array<bool, 3> wanted;
        for (size_t i = 0; i < wanted.size(); ++i)
            wanted[i] = saved[i].defined() && context->needs_input_grad(edge++);
        auto [of_input, of_weight, of_bias] = at::native_layer_norm_backward_symint(
            gradients[0], input, shape, mean, deviation, optional(weight), optional(bias), wanted);
        return {Tensor(), of_input, Tensor(), of_weight, of_bias, Tensor()};
    }
};

Tensor differentiable(const Operator& op, const AnyCall& c) {
    return Differentiable::apply(
        dispatched<Signature>(op), *c.input, c.shape, optional(c.weight), optional(c.bias), *c.eps);
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
