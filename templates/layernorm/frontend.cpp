// layer_norm as Python and PyTorch's dispatcher call it: frontend.py in C++, with gradients. See runtime/native.h.
//
// The forward pass is a variant's, or PyTorch's where none serves. The backward pass is PyTorch's own: a variant gives no
// mean and no reciprocal deviation, so native_layer_norm computes them again.
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "runtime/native.h"

namespace {

using at::Tensor;
using c10::SymIntArrayRef;
using Optional = std::optional<Tensor>;
using Signature = Tensor(const Tensor&, SymIntArrayRef, const Optional&, const Optional&, double);

const char* const SCHEMA =
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor";
const Py_ssize_t ARGUMENTS = 5;
constexpr double LOWEST_EPS = 1e-12, HIGHEST_EPS = 1e6;  // see frontend.py

// A call; weight and bias may be null.
struct Arguments {
    const Tensor* input;
    c10::IntArrayRef shape;
    const Tensor *weight, *bias;
    double eps;
};

Tensor torch_layer_norm(
    const Tensor& input, SymIntArrayRef shape, const Optional& weight, const Optional& bias, double eps) {
    return at::layer_norm_symint(input, shape, weight, bias, eps);
}

// Why no variant can serve, whichever there are; null if one may. Does not ask whether gradients are recorded.
const char* misfit(const Arguments& a) {
    if (const char* reason = unfit({a.input, a.weight, a.bias})) return reason;
    const c10::IntArrayRef sizes = a.input->sizes();
    if (a.shape.empty() || a.shape.size() > sizes.size() || !sizes.slice(sizes.size() - a.shape.size()).equals(a.shape))
        return "normalized_shape is not the end of the input's shape";
    const auto unlike = [&](const Tensor* t) { return t && !(t->sizes().equals(a.shape) && t->is_contiguous()); };
    if (unlike(a.weight)) return "weight is not contiguous and of normalized_shape";
    if (unlike(a.bias)) return "bias is not contiguous and of normalized_shape";
    if (!(LOWEST_EPS <= a.eps && a.eps <= HIGHEST_EPS)) return "eps is not a float from 1e-12 to 1e+06";
    return nullptr;
}

Problem problem_of(const Arguments& a) {
    const std::int64_t cols = c10::multiply_integers(a.shape);
    const at::Device device = a.input->device();
    return {device.is_cpu() ? -1 : device.index(), a.input->scalar_type(), {a.input->numel() / cols, cols}};
}

// Undefined where it is left to PyTorch. Records no gradient.
Tensor run(Operator& op, const Arguments& a) {
    const Problem problem = problem_of(a);
    const auto answer = op.table.find(problem);
    if (!answer.serves()) return {};
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor input = a.input->contiguous();  // PyTorch's own kernels copy it, too
    Tensor output = at::empty(input.sizes(), input.options());
    const void* x = input.const_data_ptr();
    const void* w = a.weight ? a.weight->const_data_ptr() : nullptr;
    const void* b = a.bias ? a.bias->const_data_ptr() : nullptr;
    void* y = output.mutable_data_ptr();
    const std::int64_t rows = problem.words[2], cols = problem.words[3];
    if (!op.table.run(answer, problem, x, w, b, y, rows, cols, static_cast<float>(a.eps))) return {};
    return output;
}

const Tensor* pointer(const Optional& tensor) { return tensor && tensor->defined() ? &*tensor : nullptr; }

// The operator below autograd.
Tensor forward(
    Operator& op, const Tensor& input, SymIntArrayRef shape, const Optional& weight, const Optional& bias, double eps) {
    if (const auto sizes = c10::asIntArrayRefSlowOpt(shape)) {
        const Arguments a = {&input, *sizes, pointer(weight), pointer(bias), eps};
        if (!misfit(a))
            if (Tensor output = run(op, a); output.defined()) return output;
    }
    return torch_layer_norm(input, shape, weight, bias, eps);
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

Tensor with_gradients(
    Operator& op, const Tensor& input, SymIntArrayRef shape, const Optional& weight, const Optional& bias, double eps) {
    const Tensor *w = pointer(weight), *b = pointer(bias);
    const auto self = dispatched<Signature>(op);
    if (under_transform() || dual(&input) || dual(w) || dual(b))
        return torch_layer_norm(input, shape, weight, bias, eps);
    if (!recorded({&input, w, b})) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return self.call(input, shape, weight, bias, eps);
    }
    // What no variant serves is PyTorch's with its own gradients, which need nothing computed twice.
    if (const auto sizes = c10::asIntArrayRefSlowOpt(shape); sizes && !wanted_of_dispatcher(keys_of({&input, w, b}))) {
        const Arguments a = {&input, *sizes, w, b, eps};
        if (misfit(a) || !op.table.find(problem_of(a)).serves()) return torch_layer_norm(input, shape, weight, bias, eps);
    }
    return Differentiable::apply(self, input, shape, weight, bias, eps);
}

// CUDA's autocast computes layer_norm in float32, the CPU's leaves it alone.
Tensor with_autocast(
    Operator& op, const Tensor& input, SymIntArrayRef shape, const Optional& weight, const Optional& bias, double eps) {
    const c10::impl::ExcludeDispatchKeyGuard done(c10::autocast_dispatch_keyset);
    const auto self = dispatched<Signature>(op);
    if (!input.is_cuda()) return self.call(input, shape, weight, bias, eps);
    const auto cast = [](const Tensor& t) { return at::autocast::cached_cast(at::kFloat, t, at::kCUDA); };
    const auto cast_optional = [&](const Optional& t) { return pointer(t) ? Optional(cast(*t)) : std::nullopt; };
    return self.call(cast(input), shape, cast_optional(weight), cast_optional(bias), eps);
}

void add_kernels(Operator& op, torch::Library& library) {
    const auto bound = [&op](auto function) {
        return [&op, function](
                   const Tensor& input, SymIntArrayRef shape, const Optional& weight, const Optional& bias, double eps) {
            return function(op, input, shape, weight, bias, eps);
        };
    };
    add_kernel(library, "layer_norm", bound(forward), {c10::DispatchKey::CompositeExplicitAutograd});
    add_kernel(library, "layer_norm", bound(with_gradients), {c10::DispatchKey::Autograd});
    add_kernel(library, "layer_norm", bound(with_autocast), {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
    add_kernel(library, "layer_norm", torch_layer_norm, {c10::DispatchKey::FuncTorchBatched});
}

// normalized_shape into `sizes`: at most as many as there is room for. Equal is not enough: PyTorch refuses 64.0 for 64.
const char* read_shape(PyObject* object, std::array<std::int64_t, 8>& sizes, size_t& count) {
    const bool is_list = PyList_CheckExact(object);
    if (!is_list && !PyTuple_Check(object)) return "normalized_shape is not a tuple or list of sizes";
    count = static_cast<size_t>(PySequence_Fast_GET_SIZE(object));
    if (count > sizes.size()) return "normalized_shape has more than 8 dimensions";
    for (size_t i = 0; i < count; ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(object, static_cast<Py_ssize_t>(i));
        if (!PyLong_CheckExact(item)) return "normalized_shape is not the end of the input's shape";
        sizes[i] = PyLong_AsLongLong(item);
        if (sizes[i] == -1 && PyErr_Occurred()) PyErr_Clear();
    }
    return nullptr;
}

// The call in Python's arguments, or why they cannot be read as one. `sizes` has to live as long as `a`.
const char* read(PyObject* const* args, Arguments& a, std::array<std::int64_t, 8>& sizes) {
    if (overridden()) return "a tensor subclass or a torch function mode (such as torch.set_default_device) is involved";
    a.input = plain_tensor(args[0]);
    a.weight = args[2] == Py_None ? nullptr : plain_tensor(args[2]);
    a.bias = args[3] == Py_None ? nullptr : plain_tensor(args[3]);
    if (!a.input || (!a.weight && args[2] != Py_None) || (!a.bias && args[3] != Py_None))
        return "an argument is no plain tensor, but a tensor subclass or something else";
    size_t count = 0;
    if (const char* reason = read_shape(args[1], sizes, count)) return reason;
    a.shape = {sizes.data(), count};
    if (!PyFloat_CheckExact(args[4])) return "eps is not a float from 1e-12 to 1e+06";
    a.eps = PyFloat_AS_DOUBLE(args[4]);
    return nullptr;
}

PyObject* call(Operator& op, PyObject* const* args) {
    Arguments a;
    std::array<std::int64_t, 8> sizes;
    if (read(args, a, sizes)) Py_RETURN_NONE;
    const Held held{{*a.input, a.weight ? *a.weight : Tensor(), a.bias ? *a.bias : Tensor()}};
    Tensor output;
    {
        const WithoutGil gil;
        const bool fits = !misfit(a), records = recorded({a.input, a.weight, a.bias});
        if (fits && !records) {
            EVO_RECORD(op);
            output = run(op, a);
        }
        if (!output.defined()) {
            const auto optional = [](const Tensor* t) { return t ? Optional(*t) : std::nullopt; };
            const auto shape = c10::fromIntArrayRefSlow(a.shape);
            output = fits && records && op.gradients
                ? with_gradients(op, *a.input, shape, optional(a.weight), optional(a.bias), a.eps)
                : torch_layer_norm(*a.input, shape, optional(a.weight), optional(a.bias), a.eps);
        }
    }
    return THPVariable_Wrap(std::move(output));
}

PyObject* explain(Operator& op, PyObject* const* args) {
    Arguments a;
    std::array<std::int64_t, 8> sizes;
    const char* reason = read(args, a, sizes);
    if (!reason) reason = misfit(a);
    if (reason) return to_text(std::string("PyTorch: ") + reason);
    if (recorded({a.input, a.weight, a.bias}) && !op.gradients) return to_text("PyTorch: gradients are being recorded");
    return to_text(op.table.find(problem_of(a)).in_words());
}

}  // namespace
