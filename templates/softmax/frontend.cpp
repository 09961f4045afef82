// softmax as Python and PyTorch's dispatcher call it: frontend.py in C++. See runtime/native.h.
//
// What no variant serves is PyTorch's, and so are gradients, which follow from the result.
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/Dtype.h>

#include "runtime/native.h"

namespace {

using at::Tensor;
using Signature = Tensor(const Tensor&, std::int64_t);

const char* const SCHEMA = "softmax(Tensor input, int dim) -> Tensor";
const Py_ssize_t ARGUMENTS = 3;

Tensor torch_softmax(const Tensor& input, std::int64_t dim) { return at::softmax(input, dim); }

// Why no variant can serve, whichever there are; null if one may. Does not ask whether gradients are recorded.
const char* misfit(const Tensor& input, std::int64_t dim) {
    if (const char* reason = unfit({&input})) return reason;
    const bool last = input.dim() && (dim == -1 || dim == input.dim() - 1);
    return last ? nullptr : "dim is not the last axis";
}

Problem problem_of(const Tensor& input) {
    const std::int64_t cols = input.sizes().back();
    return {input.is_cpu() ? -1 : input.device().index(), input.scalar_type(), {input.numel() / cols, cols}};
}

// Undefined where it is left to PyTorch. Records no gradient.
Tensor run(Operator& op, const Tensor& input) {
    const Problem problem = problem_of(input);
    const auto answer = op.table.find(problem);
    if (!answer.serves()) return {};
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor dense = input.contiguous();  // PyTorch's own kernels copy it, too
    Tensor output = at::empty(dense.sizes(), dense.options());
    const void* x = dense.const_data_ptr();
    void* y = output.mutable_data_ptr();
    const std::int64_t rows = problem.words[2], cols = problem.words[3];
    return op.table.run(answer, problem, x, y, rows, cols) ? output : Tensor();
}

// The operator below autograd.
Tensor forward(Operator& op, const Tensor& input, std::int64_t dim) {
    if (!misfit(input, dim))
        if (Tensor output = run(op, input); output.defined()) return output;
    return torch_softmax(input, dim);
}

struct Differentiable : torch::autograd::Function<Differentiable> {
    static Tensor forward(
        torch::autograd::AutogradContext* context, const c10::TypedOperatorHandle<Signature>& op, const Tensor& input,
        std::int64_t dim) {
        const at::AutoDispatchBelowADInplaceOrView below;
        const Tensor output = op.call(input, dim);
        context->save_for_backward({output});
        context->saved_data["dim"] = dim;
        context->saved_data["dtype"] = static_cast<std::int64_t>(input.scalar_type());
        return output;
    }

    static torch::autograd::variable_list backward(
        torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
        auto& data = context->saved_data;
        const Tensor output = context->get_saved_variables()[0];
        const auto dtype = static_cast<c10::ScalarType>(data["dtype"].toInt());
        return {Tensor(), at::_softmax_backward_data(gradients[0], output, data["dim"].toInt(), dtype), Tensor()};
    }
};

Tensor with_gradients(Operator& op, const Tensor& input, std::int64_t dim) {
    if (under_transform() || dual(&input)) return torch_softmax(input, dim);
    const auto self = dispatched<Signature>(op);
    if (!recorded({&input})) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return self.call(input, dim);
    }
    if (!wanted_of_dispatcher(keys_of({&input})))
        if (misfit(input, dim) || !op.table.find(problem_of(input)).serves()) return torch_softmax(input, dim);
    return Differentiable::apply(self, input, dim);
}

// Under autocast PyTorch's softmax is called: CUDA's casts to float32, the CPU's leaves the dtype alone.
void add_kernels(Operator& op, torch::Library& library) {
    const auto bound = [&op](auto function) {
        return [&op, function](const Tensor& input, std::int64_t dim) { return function(op, input, dim); };
    };
    using Key = c10::DispatchKey;
    add_kernel(library, "softmax", bound(forward), {Key::CompositeExplicitAutograd});
    add_kernel(library, "softmax", bound(with_gradients), {Key::Autograd});
    add_kernel(library, "softmax", torch_softmax, {Key::AutocastCPU, Key::AutocastCUDA, Key::FuncTorchBatched});
}

// The input of a call in Python's arguments (input, dim, dtype), or why no variant can serve it.
const char* read(PyObject* const* args, const Tensor*& input) {
    if (overridden()) return "a tensor subclass or a torch function mode (such as torch.set_default_device) is involved";
    input = plain_tensor(args[0]);
    if (!input) return "an argument is no plain tensor, but a tensor subclass or something else";
    if (!PyLong_CheckExact(args[1])) return "dim is not the last axis";
    int beyond = 0;
    const long long dim = PyLong_AsLongLongAndOverflow(args[1], &beyond);
    if (const char* reason = misfit(*input, beyond ? input->dim() : dim)) return reason;
    const bool own = args[2] == Py_None ||
        (THPDtype_Check(args[2]) && reinterpret_cast<THPDtype*>(args[2])->scalar_type == input->scalar_type());
    return own ? nullptr : "dtype is not the input's own";
}

PyObject* call(Operator& op, PyObject* const* args) {
    const Tensor* input;
    if (read(args, input)) Py_RETURN_NONE;
    const Held held{{*input}};
    Tensor output;
    {
        const WithoutGil gil;
        if (recorded({input})) {
            output = with_gradients(op, *input, -1);
        } else {
            EVO_RECORD(op);
            output = run(op, *input);
        }
    }
    if (!output.defined()) Py_RETURN_NONE;
    return THPVariable_Wrap(std::move(output));
}

PyObject* explain(Operator& op, PyObject* const* args) {
    const Tensor* input;
    if (const char* reason = read(args, input)) return to_text(std::string("PyTorch: ") + reason);
    return to_text(op.table.find(problem_of(*input)).in_words());
}

}  // namespace
