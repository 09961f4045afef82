// A norm over the last dimensions as Python and PyTorch's dispatcher call it: norm.py in C++. See runtime/native.h.
//
// frontend.cpp includes this and defines, in an unnamed namespace, beside SCHEMA and add_kernels, which calls add_norm:
//
//     const char* const NAME;                                    of the operator
//     const bool CENTRED;                                        whether it subtracts a mean, and adds a bias
//     const double DEFAULT_EPS;                                  for none but in float64; NaN where that is not for variants
//     const bool KEEPS_CHANNELS_LAST;                            PyTorch's result for an input of that layout has it, too
//     Tensor torchs(const AnyCall&);                             PyTorch's function
//     Tensor dispatched(const Operator&, const AnyCall&);        the operator by way of the dispatcher
//     Tensor with_autocast(Operator&, const AnyCall&);           what autocast makes of a call
//     template <class Eps> bool launch(Table&, const Answer&, const Problem&, const Memory&, std::int64_t rows, std::int64_t cols, Eps eps);
//     bool launch_backward(Table&, const Answer&, const Problem&, const OfBackward&, std::int64_t rows, std::int64_t cols);
//
// A call has the same result whether or not it records gradients: the same variant is chosen, which may give the statistics
// that the backward takes; where it does not, another one gives them beside it. Calls that record gradients are served where
// variants serve both passes, or all, with PyTorch's derivative where no variant of the backward serves.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <limits>
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

// Addresses, of a call and of one of the backward; statistics are the dtype's opmath, one a row, and null where they are not asked for.
struct Memory {
    const void *x, *weight, *bias;
    void *y, *mean, *rstd;
};
struct OfBackward {
    const void *dy, *x, *weight, *mean, *rstd;
    void *dx, *dweight, *dbias;
    const Workspace& workspace;
};

// What a forward pass keeps for the backward pass. weight, bias and statistics may be undefined.
struct Saved {
    Tensor input, weight, bias, mean, rstd;
    std::vector<c10::SymInt> shape;
    std::optional<double> eps;
};
using Gradients = std::array<Tensor, 3>;  // of input, weight and bias

extern const char* const NAME;
extern const bool CENTRED, KEEPS_CHANNELS_LAST;
extern const double DEFAULT_EPS;
Tensor torchs(const AnyCall&);
Tensor dispatched(const Operator&, const AnyCall&);
Tensor with_autocast(Operator&, const AnyCall&);
template <class Eps>
bool launch(Table&, const Answer&, const Problem&, const Memory&, std::int64_t, std::int64_t, Eps);
bool launch_backward(Table&, const Answer&, const Problem&, const OfBackward&, std::int64_t, std::int64_t);

const Py_ssize_t ARGUMENTS = CENTRED ? 5 : 4;
// The kernel's options that are compiled in, of a call without and with statistics: residual, sum, mean (if centred), rstd.
const std::vector<std::int64_t> PLAIN(CENTRED ? 4 : 3), SAVING = CENTRED ? std::vector<std::int64_t>{0, 0, 1, 1} : std::vector<std::int64_t>{0, 0, 1};
constexpr double LOWEST_EPS = 1e-12, HIGHEST_EPS = 1e6;  // see norm.py
const char* const UNFIT_EPS = "eps is not a float from 1e-12 to 1e+06";

inline const Tensor* pointer(const Optional& tensor) { return tensor && tensor->defined() ? &*tensor : nullptr; }

inline Optional optional(const Tensor* tensor) { return tensor ? Optional(*tensor) : std::nullopt; }
inline Optional optional(const Tensor& tensor) { return tensor.defined() ? Optional(tensor) : std::nullopt; }
inline const void* address_of(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
inline void* output_of(const Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

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
    const bool wide = c.input->scalar_type() == at::kDouble;
    const double eps = c.eps.value_or(wide ? std::numeric_limits<double>::epsilon() : DEFAULT_EPS);
    if (!(LOWEST_EPS <= eps && eps <= HIGHEST_EPS)) return UNFIT_EPS;
    if (KEEPS_CHANNELS_LAST && (sizes.size() == 4 || sizes.size() == 5) && strides[1] <= strides.back())
        return "the channels of the input are last in memory, and PyTorch's result has them there, too";
    return nullptr;
}

inline Problem problem_of(const Tensor& input, c10::IntArrayRef shape, c10::IntArrayRef options) {
    const std::int64_t cols = c10::multiply_integers(shape);
    const at::Device device = input.device();
    Problem found(device.is_cpu() ? -1 : device.index(), input.scalar_type(), {input.numel() / cols, cols});
    for (const std::int64_t option : options) found.add(option);
    return found;
}

using Chosen = std::pair<Problem, Answer>;

// What serves a call, with statistics or without; always with them if `saving`.
inline Chosen choose(Operator& op, const Call& c, bool saving = false) {
    const Problem problem = problem_of(*c.input, c.shape, saving ? SAVING : PLAIN);
    return {problem, op.table.find(problem)};
}

struct Result {
    Tensor output, mean, rstd;
};

// Of what was chosen; undefined where it is left to PyTorch. Records no gradient.
inline Result run(Operator& op, const Call& c, const Chosen& chosen) {
    const auto& [problem, answer] = chosen;
    if (!answer.serves()) return {};
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor input = c.input->contiguous();  // PyTorch's own kernels copy it, too
    const std::int64_t rows = problem.words[2], cols = problem.words[3];
    Result found;
    found.output = at::empty(input.sizes(), input.options());
    if (answer.gives_more || c10::IntArrayRef(&problem.words[4], SAVING.size()).equals(SAVING)) {
        found.rstd = at::empty({rows}, input.options().dtype(at::toOpMathType(input.scalar_type())));
        if (CENTRED) found.mean = at::empty_like(found.rstd);
    }
    const Memory memory = {
        input.const_data_ptr(), c.weight ? c.weight->const_data_ptr() : nullptr,
        c.bias ? c.bias->const_data_ptr() : nullptr, found.output.mutable_data_ptr(), output_of(found.mean),
        output_of(found.rstd)};
    const double eps = c.eps.value_or(DEFAULT_EPS);
    const auto launched = [&](auto eps) { return launch(op.table, answer, problem, memory, rows, cols, eps); };
    if (!(input.scalar_type() == at::kDouble ? launched(eps) : launched(static_cast<float>(eps)))) return {};
    return found;
}

inline Tensor run(Operator& op, const Call& c) { return run(op, c, choose(op, c)).output; }

// The operator below autograd. Its result has the layout that _fake of norm.py promises.
inline Tensor forward(Operator& op, const AnyCall& c) {
    if (const auto sizes = c10::asIntArrayRefSlowOpt(c.shape)) {
        const Call known = {c.input, *sizes, c.weight, c.bias, c.eps};
        if (!misfit(known))
            if (Tensor output = run(op, known); output.defined()) return output;
    }
    return torchs(c).contiguous();
}

// Of a call of the backward. wanted: of input, weight and bias.
inline Problem problem_of_backward(
    const Tensor& input, c10::IntArrayRef shape, bool weight, const std::array<bool, 3>& wanted) {
    const std::array<std::int64_t, 4> options = {weight, wanted[1], 0, wanted[2]};  // 0: no gradient of a residual is to be added
    return problem_of(input, shape, c10::IntArrayRef(options.data(), PLAIN.size()));
}

// What gradients a variant of the backward gives, if one serves; else nothing.
inline std::optional<Gradients> run_backward(
    Operator& op, const Saved& saved, const Tensor& gradient, std::array<bool, 3> wanted) {
    const auto shape = c10::asIntArrayRefSlowOpt(saved.shape);
    if (!op.backward || !saved.rstd.defined() || !shape || !wanted[0]) return std::nullopt;
    const Tensor* weight = saved.weight.defined() ? &saved.weight : nullptr;
    if (unfit({&saved.input, &gradient, weight})) return std::nullopt;
    const Problem problem = problem_of_backward(saved.input, *shape, weight, wanted);
    const Answer answer = op.backward->find(problem);
    if (!answer.serves()) return std::nullopt;
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor input = saved.input.contiguous(), dy = gradient.contiguous();
    const auto sum = [&](bool asked) { return asked ? at::empty(*shape, input.options()) : Tensor(); };
    const Gradients found = {at::empty(input.sizes(), input.options()), sum(wanted[1]), sum(wanted[2])};
    const Workspace workspace(answer, problem, input.options());
    const OfBackward memory = {
        dy.const_data_ptr(), input.const_data_ptr(), address_of(saved.weight), address_of(saved.mean),
        address_of(saved.rstd), output_of(found[0]), output_of(found[1]), output_of(found[2]), workspace};
    if (!launch_backward(*op.backward, answer, problem, memory, problem.words[2], problem.words[3])) return std::nullopt;
    return found;
}

// By PyTorch's own function of what was kept, which has derivatives of every order.
inline Gradients torch_backward(const Saved& saved, const Tensor& gradient, std::array<bool, 3> wanted) {
    const bool further = c10::GradMode::is_enabled();
    const at::AutoGradMode recording(true);
    torch::autograd::variable_list of;
    const auto leaf = [&](const Tensor& t, bool asked) {
        if (!t.defined()) return t;
        Tensor found = further ? t.view_as(t) : t.detach().requires_grad_(asked);  // a view: hooks of t run in the outer pass
        if (asked) of.push_back(found);
        return found;
    };
    const Tensor input = leaf(saved.input, wanted[0]), weight = leaf(saved.weight, wanted[1]), bias = leaf(saved.bias, wanted[2]);
    const auto given = [](const Tensor& t) { return t.defined() ? &t : nullptr; };
    const WithoutGil gil;  // compiled autograd holds it, and PyTorch's engine must not be called with it
    const Tensor output = torchs({&input, saved.shape, given(weight), given(bias), saved.eps});
    const auto found = torch::autograd::grad({output}, of, {gradient}, further, further);
    Gradients gradients;
    for (size_t i = 0, next = 0; i < gradients.size(); ++i)
        if (wanted[i]) gradients[i] = found[next++];
    return gradients;
}

// Of a variant where one serves, unless they are to have derivatives themselves.
inline Gradients gradients_of(Operator& op, const Saved& saved, const Tensor& gradient, std::array<bool, 3> wanted) {
    std::optional<Gradients> found;
    if (!c10::GradMode::is_enabled()) found = run_backward(op, saved, gradient, wanted);
    return found ? *found : torch_backward(saved, gradient, wanted);
}

// What autograd calls for the gradients of a call that a variant served; a function of PyTorch's, so that compiled autograd
// can take it up.
struct Differentiable : torch::autograd::Function<Differentiable> {
    static torch::autograd::variable_list backward(
        torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
        const auto kept = context->get_saved_variables();
        auto& op = *reinterpret_cast<Operator*>(context->saved_data["operator"].toInt());
        const Saved saved = {kept[0], kept[1], kept[2], kept[3], kept[4], context->saved_data["shape"].toSymIntVector(),
                             context->saved_data["eps"].toOptional<double>()};
        size_t edge = 0;  // of arguments that are there
        std::array<bool, 3> wanted;
        for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = kept[i].defined() && context->needs_input_grad(edge++);
        const Gradients found = gradients_of(op, saved, gradients[0], wanted);
        return {found.begin(), found.end()};
    }
};

// Calls it with less ado.
struct Node final : torch::autograd::CppNode<Differentiable> {
    Operator* op = nullptr;
    c10::DimVector shape;
    std::optional<double> eps;

    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        if (!gradients[0].defined()) return CppNode::apply(std::move(gradients));
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto kept = ctx_.get_saved_variables();
        const Saved saved = {kept[0], kept[1], kept[2], kept[3], kept[4], {shape.begin(), shape.end()}, eps};
        size_t edge = 0;
        std::array<bool, 3> wanted;
        for (size_t i = 0; i < 3; ++i) wanted[i] = kept[i].defined() && task_should_compute_output(edge++);
        Gradients found = gradients_of(*op, saved, gradients[0], wanted);
        torch::autograd::variable_list given;
        for (size_t i = 0; i < 3; ++i)
            if (kept[i].defined()) given.push_back(std::move(found[i]));
        return given;
    }
};

// `held` keeps it. PyTorch had std::shared_ptr for nodes, and has c10::intrusive_ptr.
template <class Held, class New = Node>
New* new_node(Held& held) {
    if constexpr (std::is_same_v<Held, std::shared_ptr<torch::autograd::Node>>)
        held = Held(new New(), [](auto* node) { deleteNode(node); });
    else held = c10::make_intrusive<New>();
    return static_cast<New*>(held.get());
}

// A call that records gradients, served by a variant. statistics: they are kept, of this or another variant. What
// Function::apply would do, less what such a call does not need: that costs more than the launch.
inline Tensor run_recording(Operator& op, const AnyCall& c, const Call& known, const Chosen& chosen, bool statistics) {
    Result found = run(op, known, chosen);
    if (!found.output.defined()) return torchs(c);
    if (statistics && !found.rstd.defined()) {
        const Result other = run(op, known, choose(op, known, true));
        found.mean = other.mean, found.rstd = other.rstd;
    }
    const auto given = [](const Tensor* t) { return t ? *t : Tensor(); };
    const std::array<Tensor, 3> arguments = {*c.input, given(c.weight), given(c.bias)};
    decltype(torch::autograd::Edge::function) held;
    Node* node = new_node(held);
    torch::autograd::edge_list edges;
    for (const Tensor& t : arguments) {
        node->is_variable_input_.push_back(t.defined());
        if (t.defined()) edges.push_back(torch::autograd::impl::gradient_edge(t));
    }
    node->set_ctx_grad_fn(held);
    node->set_next_edges(std::move(edges));
    node->output_info_.emplace_back(found.output);
    node->ctx_.saved_data["operator"] = reinterpret_cast<std::int64_t>(&op);
    node->ctx_.saved_data["shape"] = c.shape;
    node->ctx_.saved_data["eps"] = c.eps;
    node->ctx_.save_for_backward({arguments[0], arguments[1], arguments[2], found.mean, found.rstd});
    node->save_variables_to_ctx();
    node->op = &op, node->shape = known.shape, node->eps = c.eps;
    torch::autograd::set_history(found.output, held);
    return found.output;
}

// Whether variants serve both passes of a call, of which `forward` is the first.
inline bool trains(Operator& op, const Call& c, const Chosen& forward) {
    const auto asked = [](const Tensor* t) { return t && t->requires_grad(); };
    if (!op.backward || !asked(c.input) || !forward.second.serves()) return false;
    if (!forward.second.gives_more && !choose(op, c, true).second.serves()) return false;
    const std::array<bool, 3> wanted = {true, asked(c.weight), asked(c.bias)};
    return op.backward->find(problem_of_backward(*c.input, c.shape, c.weight, wanted)).serves();
}

// A call that records gradients while a graph is made of it: the operator, with PyTorch's derivative.
struct Traced : torch::autograd::Function<Traced> {
    static Tensor forward(
        torch::autograd::AutogradContext* context, Operator* op, const Tensor& input, const Optional& weight,
        const Optional& bias, const std::vector<c10::SymInt>& shape, std::optional<double> eps) {
        context->save_for_backward({input, weight.value_or(Tensor()), bias.value_or(Tensor())});
        context->saved_data["shape"] = SymIntArrayRef(shape);
        context->saved_data["eps"] = eps;
        const at::AutoDispatchBelowADInplaceOrView below;
        return dispatched(*op, {&input, shape, pointer(weight), pointer(bias), eps});
    }

    static torch::autograd::variable_list backward(
        torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
        const auto kept = context->get_saved_variables();
        const Saved saved = {kept[0], kept[1], kept[2], {}, {}, context->saved_data["shape"].toSymIntVector(),
                             context->saved_data["eps"].toOptional<double>()};
        size_t edge = 0;  // of arguments that are there
        std::array<bool, 3> wanted;
        for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = kept[i].defined() && context->needs_input_grad(edge++);
        Gradients found = torch_backward(saved, gradients[0], wanted);
        return {Tensor(), std::move(found[0]), std::move(found[1]), std::move(found[2]), Tensor(), Tensor()};
    }
};

inline Tensor with_gradients(Operator& op, const AnyCall& c) {
    if (under_transform() || dual(c.input) || dual(c.weight) || dual(c.bias)) return torchs(c);
    if (!is_recorded(c)) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return dispatched(op, c);
    }
    const auto sizes = c10::asIntArrayRefSlowOpt(c.shape);
    if (!sizes || wanted_of_dispatcher(keys_of({c.input, c.weight, c.bias})))
        return op.gradients == ALL
            ? Traced::apply(&op, *c.input, optional(c.weight), optional(c.bias), c.shape.vec(), c.eps) : torchs(c);
    const Call known = {c.input, *sizes, c.weight, c.bias, c.eps};
    if (misfit(known)) return torchs(c);
    const Chosen forward = choose(op, known);
    const bool both = trains(op, known, forward);
    return both || op.gradients == ALL ? run_recording(op, c, known, forward, both) : torchs(c);
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
    PyObject *weight = args[2], *bias = CENTRED ? args[3] : Py_None, *eps = args[ARGUMENTS - 1];
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
    const bool pay = is_recorded(c) && op.gradients != ALL;  // only calls that do are served
    if (pay && !(op.gradients && op.backward)) return to_text("PyTorch: gradients are being recorded");
    const Chosen forward = choose(op, c);
    if (pay && forward.second.serves() && !trains(op, c, forward))
        return to_text("PyTorch: no variant of the backward serves it");
    return to_text(forward.second.in_words());
}

}  // namespace
