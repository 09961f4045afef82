// A norm over the last dimensions as Python and PyTorch's dispatcher call it: norm.py in C++. See runtime/native.h.
//
// frontend.cpp includes this and defines, in an unnamed namespace, beside SCHEMA and add_kernels, which calls add_norm:
//
//     const char* const NAME;                                    of the operator
//     const bool HAS_BIAS;                                       whether the function has one
//     const double DEFAULT_EPS;                                  for none; NaN where that is not for variants
//     const bool KEEPS_CHANNELS_LAST;                            PyTorch's result for an input of that layout has it, too
//     const size_t OPTIONS;                                      of the kernel, compiled in and off
//     Tensor torchs(const AnyCall&);                             PyTorch's function
//     Tensor dispatched(const Operator&, const AnyCall&);        the operator by way of the dispatcher
//     Tensor differentiable(const Operator&, const AnyCall&);    a call that records gradients, of a problem that is served
//     Tensor with_autocast(Operator&, const AnyCall&);           what autocast makes of a call
//     bool launch(Operator&, const Answer&, const Problem&, std::uintptr_t addresses, const void* x, const void* weight,
//                 const void* bias, void* y, std::int64_t rows, std::int64_t cols, float eps);    as Operator::run
#pragma once

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <optional>

#include "runtime/native.h"

namespace {

using at::Tensor;
using c10::SymIntArrayRef;
using Optional = std::optional<Tensor>;

// weight and bias may be null.
template <class Shape>
struct CallOf {
    const Tensor* input;
    Shape shape;
    const Tensor *weight, *bias;
    std::optional<double> eps;
};
using Call = CallOf<c10::IntArrayRef>;
using AnyCall = CallOf<SymIntArrayRef>;  // as the dispatcher has it: sizes may be symbols

extern const char* const NAME;
extern const bool HAS_BIAS, KEEPS_CHANNELS_LAST;
extern const double DEFAULT_EPS;
extern const size_t OPTIONS;
Tensor torchs(const AnyCall&);
Tensor dispatched(const Operator&, const AnyCall&);
Tensor differentiable(const Operator&, const AnyCall&);
Tensor with_autocast(Operator&, const AnyCall&);
bool launch(
    Operator&, const Answer&, const Problem&, std::uintptr_t, const void*, const void*, const void*, void*, std::int64_t,
    std::int64_t, float);

const Py_ssize_t ARGUMENTS = HAS_BIAS ? 5 : 4;
constexpr double LOWEST_EPS = 1e-12, HIGHEST_EPS = 1e6;  // see norm.py
const char* const UNFIT_EPS = "eps is not a float from 1e-12 to 1e+06";

inline const Tensor* pointer(const Optional& tensor) { return tensor && tensor->defined() ? &*tensor : nullptr; }

inline Optional optional(const Tensor* tensor) { return tensor ? Optional(*tensor) : std::nullopt; }

template <class Shape>
bool is_recorded(const CallOf<Shape>& c) {
    return recorded({c.input, c.weight, c.bias});
}

// Why no variant can serve, whichever there are; null if one may. Does not ask whether gradients are recorded.
inline const char* misfit(const Call& c) {
    if (const char* reason = unfit({c.input, c.weight, c.bias})) return reason;
    const c10::IntArrayRef sizes = c.input->sizes(), strides = c.input->strides();
    if (c.shape.empty() || c.shape.size() > sizes.size() || !sizes.slice(sizes.size() - c.shape.size()).equals(c.shape))
        return "normalized_shape is not the end of the input's shape";
    const auto unlike = [&](const Tensor* t) { return t && !(t->sizes().equals(c.shape) && t->is_contiguous()); };
    if (unlike(c.weight)) return "weight is not contiguous and of normalized_shape";
    if (unlike(c.bias)) return "bias is not contiguous and of normalized_shape";
    const double eps = c.eps.value_or(DEFAULT_EPS);
    if (!(LOWEST_EPS <= eps && eps <= HIGHEST_EPS)) return UNFIT_EPS;
    if (KEEPS_CHANNELS_LAST && (sizes.size() == 4 || sizes.size() == 5) && strides[1] <= strides.back())
        return "the channels of the input are last in memory, and PyTorch's result has them there, too";
    return nullptr;
}

inline Problem problem_of(const Call& c) {
    const std::int64_t cols = c10::multiply_integers(c.shape);
    const at::Device device = c.input->device();
    Problem found(device.is_cpu() ? -1 : device.index(), c.input->scalar_type(), {c.input->numel() / cols, cols});
    found.count += OPTIONS;  // which are 0
    return found;
}

// Undefined where it is left to PyTorch. Records no gradient.
inline Tensor run(Operator& op, const Call& c) {
    const Problem problem = problem_of(c);
    const auto answer = op.table.find(problem);
    if (!answer.serves()) return {};
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor input = c.input->contiguous();  // PyTorch's own kernels copy it, too
    Tensor output = at::empty(input.sizes(), input.options());
    const void* x = input.const_data_ptr();
    const void* w = c.weight ? c.weight->const_data_ptr() : nullptr;
    const void* b = c.bias ? c.bias->const_data_ptr() : nullptr;
    void* y = output.mutable_data_ptr();
    const std::uintptr_t addresses = reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(w) |
        reinterpret_cast<std::uintptr_t>(b) | reinterpret_cast<std::uintptr_t>(y);
    const float eps = static_cast<float>(c.eps.value_or(DEFAULT_EPS));
    if (!launch(op, answer, problem, addresses, x, w, b, y, problem.words[2], problem.words[3], eps)) return {};
    return output;
}

// The operator below autograd. Its result has the layout that _fake of norm.py promises.
inline Tensor forward(Operator& op, const AnyCall& c) {
    if (const auto sizes = c10::asIntArrayRefSlowOpt(c.shape)) {
        const Call known = {c.input, *sizes, c.weight, c.bias, c.eps};
        if (!misfit(known))
            if (Tensor output = run(op, known); output.defined()) return output;
    }
    return torchs(c).contiguous();
}

inline Tensor with_gradients(Operator& op, const AnyCall& c) {
    if (under_transform() || dual(c.input) || dual(c.weight) || dual(c.bias)) return torchs(c);
    if (!is_recorded(c)) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return dispatched(op, c);
    }
    // What no variant serves is PyTorch's with its own gradients, which need nothing computed twice.
    const auto sizes = c10::asIntArrayRefSlowOpt(c.shape);
    if (sizes && !wanted_of_dispatcher(keys_of({c.input, c.weight, c.bias}))) {
        const Call known = {c.input, *sizes, c.weight, c.bias, c.eps};
        if (misfit(known) || !op.table.find(problem_of(known)).serves()) return torchs(c);
    }
    return differentiable(op, c);
}

// bound(function): a function of the operator's arguments that calls this one of an Operator and an AnyCall.
template <class Bound>
void add_norm(torch::Library& library, Bound bound) {
    using Key = c10::DispatchKey;
    add_kernel(library, NAME, bound(forward), {Key::CompositeExplicitAutograd});
    add_kernel(library, NAME, bound(with_gradients), {Key::Autograd});
    add_kernel(library, NAME, bound(with_autocast), {Key::AutocastCPU, Key::AutocastCUDA});
    add_kernel(library, NAME, bound([](Operator&, const AnyCall& c) { return torchs(c); }), {Key::FuncTorchBatched});
}

// normalized_shape into `sizes`: at most as many as there is room for. Equal is not enough: PyTorch refuses 64.0 for 64.
inline const char* read_shape(PyObject* object, std::array<std::int64_t, 8>& sizes, size_t& count) {
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

// The call in Python's arguments, or why they cannot be read as one. `sizes` has to live as long as `c`.
inline const char* read(PyObject* const* args, Call& c, std::array<std::int64_t, 8>& sizes) {
    if (overridden()) return "a tensor subclass or a torch function mode (such as torch.set_default_device) is involved";
    PyObject *weight = args[2], *bias = HAS_BIAS ? args[3] : Py_None, *eps = args[ARGUMENTS - 1];
    c.input = plain_tensor(args[0]);
    c.weight = weight == Py_None ? nullptr : plain_tensor(weight);
    c.bias = bias == Py_None ? nullptr : plain_tensor(bias);
    if (!c.input || (!c.weight && weight != Py_None) || (!c.bias && bias != Py_None))
        return "an argument is no plain tensor, but a tensor subclass or something else";
    size_t count = 0;
    if (const char* reason = read_shape(args[1], sizes, count)) return reason;
    c.shape = {sizes.data(), count};
    if (PyFloat_CheckExact(eps)) c.eps = PyFloat_AS_DOUBLE(eps);
    else if (eps != Py_None || DEFAULT_EPS != DEFAULT_EPS) return UNFIT_EPS;
    return nullptr;
}

PyObject* call(Operator& op, PyObject* const* args) {
    Call c;
    std::array<std::int64_t, 8> sizes;
    if (read(args, c, sizes)) Py_RETURN_NONE;
    const Held held{{*c.input, c.weight ? *c.weight : Tensor(), c.bias ? *c.bias : Tensor()}};
    Tensor output;
    {
        const WithoutGil gil;
        const bool fits = !misfit(c), records = is_recorded(c);
        if (fits && !records) {
            EVO_RECORD(op);
            output = run(op, c);
        }
        if (!output.defined()) {
            const AnyCall any = {c.input, c10::fromIntArrayRefSlow(c.shape), c.weight, c.bias, c.eps};
            output = fits && records && op.gradients ? with_gradients(op, any) : torchs(any);
        }
    }
    return THPVariable_Wrap(std::move(output));
}

PyObject* explain(Operator& op, PyObject* const* args) {
    Call c;
    std::array<std::int64_t, 8> sizes;
    const char* reason = read(args, c, sizes);
    if (!reason) reason = misfit(c);
    if (reason) return to_text(std::string("PyTorch: ") + reason);
    if (is_recorded(c) && !op.gradients) return to_text("PyTorch: gradients are being recorded");
    return to_text(op.table.find(problem_of(c)).in_words());
}

}  // namespace
