// A function as Python and PyTorch's dispatcher call it: what of the native launcher is the same for all that are stated.
//
// native_code.py writes the rest. Before this: struct Arguments, with its tensors and a visit to all other operands;
// ARGUMENTS, RESULTS, SAVED, SAVED_SIZES, KEPT, HAS_FORMULA, HAS_OPERATOR, MAY_BE_REFUSED, AUTOCAST_CASTS, NAME, SCHEMA and
// Signature. Behind it, declared here: read, misfit, problem_of, run, originals, is_complete, as_promised, formula, is_served_backward,
// run_backward and dispatched; and add_kernels of native.h.
//
// A call has the same result whether or not it records gradients: the same variant is chosen. Gradients follow from the
// result by an operator of PyTorch's, or are those of a variant of the backward kernel, which takes what the forward's
// variant gives beside the result, or where that gives nothing, another one's, that runs beside it. Otherwise they are
// PyTorch's derivative of its own function, which is called again for them.
#pragma once

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/utils/pybind.h>

namespace at::autocast {  // of ATen/autocast_mode.h, which includes every operator of PyTorch's
TORCH_API ScalarType get_autocast_dtype(DeviceType);
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType);
}  // namespace at::autocast

namespace {

using Results = std::array<Tensor, RESULTS>;
using Outputs = std::array<Tensor, RESULTS + SAVED>;  // the results, and what the backward takes, where that is asked for
using Tensors = decltype(std::declval<const Arguments&>().tensors());
constexpr size_t TENSORS = std::tuple_size_v<Tensors>;
using Gradients = std::array<Tensor, TENSORS>;
using Wanted = std::array<bool, TENSORS>;  // gradients

const char* read(PyObject* const*, Arguments&);
const char* misfit(const Arguments&);
Problem problem_of(const Arguments&);
Outputs run(Table&, const Arguments&, const Problem&, const Answer&);
Results originals(const Arguments&);
bool is_complete(const Arguments&);
Tensor as_promised(const Arguments&, size_t number, const Tensor& result);
Tensor formula(const Arguments&, const Tensor& gradient, const Tensor& result);
bool is_served_backward(Operator&, const Arguments&, const Wanted&);
Gradients run_backward(
    Operator&, const Arguments&, const torch::autograd::variable_list& gradients, const Tensor* kept, const Wanted&);
Results dispatched(const Operator&, const Arguments&);

// Results as the dispatcher has them, and back.
inline Results many(Tensor result) { return {std::move(result)}; }
template <class... Each>
Results many(std::tuple<Each...> results) {
    return std::apply([](auto&&... each) { return Results{std::move(each)...}; }, std::move(results));
}
inline auto one(Results results) {
    if constexpr (RESULTS == 1) return std::move(results[0]);
    else return std::tuple_cat(std::move(results));
}

inline Tensor like(const Tensor& result, Tensor promised) {
    return result.strides().equals(promised.strides()) ? result : promised.copy_(result);
}

template <class Value>
py::object to_object(const Value& value) {
    if constexpr (std::is_same_v<Value, const Tensor*>) {
        return value ? py::reinterpret_steal<py::object>(THPVariable_Wrap(*value)) : py::none();
    } else if constexpr (std::is_same_v<Value, c10::ScalarType>) {
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(value)));
    } else if constexpr (std::is_same_v<Value, Ints>) {
        const c10::SymIntArrayRef all = value;
        py::tuple found(all.size());
        for (size_t i = 0; i < all.size(); ++i) found[i] = py::cast(all[i]);
        return found;
    } else {
        return py::cast(value);
    }
}
template <class Value>
py::object to_object(const std::optional<Value>& value) {
    return value ? to_object(*value) : py::none();
}

template <class... Values>
Results by_python(const Values&... values) {
    const py::gil_scoped_acquire gil;
    const py::object found = (*python_original)(to_object(values)...);
    Results results;
    for (size_t i = 0; i < RESULTS; ++i) {
        const py::object each = RESULTS == 1 ? found : found[py::int_(i)];
        if (i && each.is_none()) continue;  // it was not asked for
        TORCH_CHECK(THPVariable_Check(each.ptr()), "the function that is stood in for gives something else than tensors");
        results[i] = THPVariable_Unpack(each.ptr());
    }
    return results;
}

inline bool any_recorded(const Arguments& a) {
    if (!c10::GradMode::is_enabled()) return false;
    for (const Tensor* t : a.tensors())
        if (t && t->requires_grad()) return true;
    return false;
}

inline bool any_dual(const Arguments& a) {
    for (const Tensor* t : a.tensors())
        if (dual(t)) return true;
    return false;
}

inline c10::DispatchKeySet all_keys(const Arguments& a) {
    c10::DispatchKeySet keys;
    for (const Tensor* t : a.tensors())
        if (t) keys = keys | t->key_set();
    return keys;
}

template <size_t COUNT>
Results results_of(std::array<Tensor, COUNT> outputs) {
    if constexpr (COUNT == RESULTS) return outputs;
    Results results;
    std::move(outputs.begin(), outputs.begin() + RESULTS, results.begin());
    return results;
}

// Undefined where it is left to PyTorch. Records no gradient.
inline Results run(Operator& op, const Arguments& a) {
    const Problem problem = problem_of(a);
    const Answer answer = op.table.find(problem);
    return answer.serves() ? results_of(run(op.table, a, problem, answer)) : Results();
}

// The operator below autograd. Its results have the layout that the module's _fake promises.
inline Results forward(Operator& op, const Arguments& a) {
    if (!misfit(a))
        if (Results found = run(op, a); found[0].defined()) return found;
    Results found = originals(a);
    for (size_t i = 0; i < RESULTS; ++i)
        if (found[i].defined()) found[i] = as_promised(a, i, found[i]);
    return found;
}

// Has floating-point tensors, of which the first is one, all be of the widest of their dtypes, if need be as copies.
inline void in_one_dtype(Tensors& given, std::array<Tensor, TENSORS>& copies) {
    c10::ScalarType wide = given[0]->scalar_type();
    for (const Tensor* t : given)
        if (t && t->is_floating_point()) wide = c10::promoteTypes(wide, t->scalar_type());
    for (size_t i = 0; i < TENSORS; ++i)
        if (given[i] && given[i]->is_floating_point()) copies[i] = given[i]->to(wide), given[i] = &copies[i];
}

// PyTorch's derivative of its own function, which has derivatives of every order. kept: the tensors of the call.
inline Gradients torch_backward(
    const Arguments& call, torch::autograd::variable_list& kept, const torch::autograd::variable_list& gradients,
    const Wanted& wanted) {
    const bool further = c10::GradMode::is_enabled();  // the gradients are to be differentiated, too
    const at::AutoGradMode recording(true);
    torch::autograd::variable_list leaves, of, from;
    Arguments a = call;
    Tensors given;
    for (size_t i = 0; i < TENSORS; ++i) {
        // A view: hooks of the tensor run in the outer pass.
        if (kept[i].defined()) kept[i] = further ? kept[i].view_as(kept[i]) : kept[i].detach().requires_grad_(wanted[i]);
        if (wanted[i]) leaves.push_back(kept[i]);
        given[i] = kept[i].defined() ? &kept[i] : nullptr;
    }
    const WithoutGil gil;  // compiled autograd holds it, and PyTorch's engine must not be called with it
    std::array<Tensor, TENSORS> copies;
    if (MAY_BE_REFUSED) in_one_dtype(given, copies);
    a.set_tensors(given);
    const Results results = originals(a);
    for (size_t i = 0; i < RESULTS; ++i)
        if (gradients[i].defined()) of.push_back(results[i].to(gradients[i].scalar_type())), from.push_back(gradients[i]);
    const auto each = torch::autograd::grad(of, leaves, from, std::nullopt, further, /*allow_unused=*/true);
    Gradients found;
    for (size_t i = 0, next = 0; i < TENSORS; ++i)
        if (wanted[i]) found[i] = each[next++];
    return found;
}

// call: less its tensors, which are the first of those that were kept, before the results that a formula or a backward
// kernel takes, and what else that takes. gradients: undefined for a result that nothing was computed from. wants(i): whether
// a gradient is wanted of the i-th tensor that is there.
template <class Wants>
Gradients gradients_of(
    Operator& op, Arguments& call, torch::autograd::variable_list kept, const torch::autograd::variable_list& gradients,
    Wants wants) {
    if (std::none_of(gradients.begin(), gradients.end(), [](const Tensor& t) { return t.defined(); })) return {};
    Tensors given;
    Wanted wanted{};
    for (size_t i = 0, edge = 0; i < TENSORS; ++i) {
        given[i] = kept[i].defined() ? &kept[i] : nullptr;
        if (given[i]) wanted[i] = wants(edge++);
    }
    call.set_tensors(given);
    if (HAS_FORMULA) return {formula(call, gradients[0], kept[TENSORS])};
    if (op.backward && wanted[0] && (!SAVED || kept.back().defined()) && !c10::GradMode::is_enabled())
        if (Gradients found = run_backward(op, call, gradients, &kept[TENSORS], wanted); found[0].defined()) return found;
    return torch_backward(call, kept, gradients, wanted);
}

using Context = torch::autograd::AutogradContext;

// Other operands than tensors, as autograd keeps them. Not in one list: compiled autograd takes no list within another.
inline void keep_operands(const Operator* op, const Arguments& a, Context& context) {
    context.saved_data["operator"] = reinterpret_cast<std::int64_t>(op);
    int number = 0;
    Arguments::visit(a, [&](const auto& value) {
        using Value = std::decay_t<decltype(value)>;
        c10::IValue& kept = context.saved_data[std::to_string(number++)];
        if constexpr (std::is_same_v<Value, Ints>) kept = c10::SymIntArrayRef(value);
        else if constexpr (std::is_same_v<Value, c10::ScalarType>) kept = static_cast<std::int64_t>(value);
        else kept = value;
    });
}

inline Operator& kept_operands(Context& context, Arguments& a) {
    int number = 0;
    Arguments::visit(a, [&](auto& value) {
        using Value = std::decay_t<decltype(value)>;
        const c10::IValue& kept = context.saved_data[std::to_string(number++)];
        if constexpr (std::is_same_v<Value, Ints>) value = Ints(kept.toSymIntVector());
        else if constexpr (std::is_same_v<Value, c10::ScalarType>) value = static_cast<c10::ScalarType>(kept.toInt());
        else if constexpr (std::is_same_v<Value, std::optional<c10::ScalarType>>)
            value = kept.isNone() ? Value() : Value(static_cast<c10::ScalarType>(kept.toInt()));
        else if constexpr (std::is_same_v<Value, std::optional<Ints>>)
            value = kept.isNone() ? Value() : Value(Ints(kept.toSymIntVector()));
        else value = kept.to<Value>();
    });
    return *reinterpret_cast<Operator*>(context.saved_data["operator"].toInt());
}

// A call that records gradients, of which a variant may give the results: one that PyTorch makes a graph of, and what
// autograd, also when it is compiled, calls for the gradients of any.
struct Differentiable : torch::autograd::Function<Differentiable> {
    template <class... Given>
    static torch::autograd::variable_list forward(Context* context, Operator* op, const Arguments& a, const Given&...) {
        torch::autograd::variable_list kept;
        for (const Tensor* t : a.tensors()) kept.push_back(t ? *t : Tensor());
        const at::AutoDispatchBelowADInplaceOrView below;
        const Results found = dispatched(*op, a);
        for (const size_t i : KEPT) kept.push_back(found[i]);
        kept.resize(kept.size() + SAVED);
        context->save_for_backward(kept);
        context->set_materialize_grads(false);
        keep_operands(op, a, *context);
        return {found.begin(), found.end()};
    }

    static torch::autograd::variable_list backward(Context* context, const torch::autograd::variable_list& gradients) {
        Arguments a;
        Operator& op = kept_operands(*context, a);
        const auto wants = [context](size_t edge) { return context->needs_input_grad(edge); };
        const Gradients each = gradients_of(op, a, context->get_saved_variables(), gradients, wants);
        torch::autograd::variable_list found(2);  // of the operator and the arguments
        found.insert(found.end(), each.begin(), each.end());
        return found;
    }
};

template <size_t... I>
Results traced(Operator& op, const Arguments& a, std::index_sequence<I...>) {
    const auto tensors = a.tensors();
    const auto found = Differentiable::apply(&op, a, optional(tensors[I])...);
    Results results;
    std::copy(found.begin(), found.end(), results.begin());
    return results;
}

// Calls it with less ado.
struct Node final : torch::autograd::CppNode<Differentiable> {
    Operator* op = nullptr;
    Arguments call;  // whose tensors are kept beside it

    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto kept = ctx_.get_saved_variables();
        const auto wants = [this](size_t edge) { return task_should_compute_output(edge); };
        Arguments a = call;
        Gradients found = gradients_of(*op, a, kept, gradients, wants);
        torch::autograd::variable_list given;
        for (size_t i = 0; i < TENSORS; ++i)
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

// Less those that the backward takes, the sizes of a call that gives it.
inline Problem saving(Problem problem) {
    for (const size_t i : SAVED_SIZES) problem.words[2 + i] = 1;
    return problem;
}

// Whether variants serve both passes of a call, of which `forward` is the first.
inline bool trains(Operator& op, const Arguments& a, const Problem& problem, const Answer& forward) {
    const auto tensors = a.tensors();
    if (!op.backward || !forward.serves() || !tensors[0]->requires_grad()) return false;
    if (SAVED && !forward.gives_more && !op.table.find(saving(problem)).serves()) return false;
    Wanted wanted;
    for (size_t i = 0; i < TENSORS; ++i) wanted[i] = tensors[i] && tensors[i]->requires_grad();
    return is_served_backward(op, a, wanted);
}

// A call that records gradients, served by a variant if such a call is. What Function::apply would do, less what the call
// does not need: that costs more than the launch.
inline Results run_recording(Operator& op, const Arguments& a) {
    const Problem problem = problem_of(a);
    const Answer answer = op.table.find(problem);
    const bool both = trains(op, a, problem, answer);
    if (!answer.serves() || !(both || op.gradients == ALL)) return originals(a);
    Outputs outputs = run(op.table, a, problem, answer);
    if (!outputs[0].defined()) return originals(a);
    if (SAVED && both && !outputs.back().defined()) {
        const Problem other = saving(problem);
        const Answer gives = op.table.find(other);
        if (gives.serves()) {
            Outputs more = run(op.table, a, other, gives);
            std::move(more.begin() + RESULTS, more.end(), outputs.begin() + RESULTS);
        }
    }
    decltype(torch::autograd::Edge::function) held;
    Node* node = new_node(held);
    torch::autograd::edge_list edges;
    torch::autograd::variable_list kept;
    edges.reserve(TENSORS), kept.reserve(TENSORS + KEPT.size() + SAVED);
    node->is_variable_input_ = {false, false};  // as of Differentiable::apply
    for (const Tensor* t : a.tensors()) {
        node->is_variable_input_.push_back(t);
        if (t) edges.push_back(torch::autograd::impl::gradient_edge(*t));
        kept.push_back(t ? *t : Tensor());
    }
    node->set_ctx_grad_fn(held);
    node->set_next_edges(std::move(edges));
    Results results;
    for (size_t i = 0; i < RESULTS; ++i) {
        results[i] = outputs[i];
        node->output_info_.emplace_back(results[i]);
        torch::autograd::set_history(results[i], held);
    }
    for (const size_t i : KEPT) kept.push_back(results[i]);
    kept.insert(kept.end(), outputs.begin() + RESULTS, outputs.end());
    keep_operands(&op, a, node->ctx_);
    node->ctx_.save_for_backward(std::move(kept));
    node->ctx_.set_materialize_grads(false);
    node->save_variables_to_ctx();
    node->op = &op, node->call = a;
    return results;
}

inline Results with_gradients(Operator& op, const Arguments& a) {
    if (under_transform() || any_dual(a)) return originals(a);
    if (!any_recorded(a)) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return dispatched(op, a);
    }
    if (a.is_symbolic() || wanted_of_dispatcher(all_keys(a)))
        return op.gradients == ALL ? traced(op, a, std::make_index_sequence<TENSORS>()) : originals(a);
    // What no variant serves is PyTorch's with its own gradients, which need nothing computed twice.
    return misfit(a) ? originals(a) : run_recording(op, a);
}

// Tensors of a call under autocast, in the precision that it has them in.
struct Cast {
    std::array<Tensor, TENSORS> tensors;

    explicit Cast(Arguments& a) {
        Tensors given = a.tensors();
        for (size_t i = 0; i < TENSORS; ++i) {
            if (!given[i]) continue;
            const c10::DeviceType device = given[i]->device().type();
            const c10::ScalarType dtype = AUTOCAST_CASTS == FLOAT32 ? at::kFloat : at::autocast::get_autocast_dtype(device);
            tensors[i] = at::autocast::cached_cast(dtype, *given[i], device);
            given[i] = &tensors[i];
        }
        a.set_tensors(given);
    }
};

inline Results with_autocast(Operator& op, Arguments a) {
    if (AUTOCAST_CASTS == ORIGINALS) return originals(a);
    const c10::impl::ExcludeDispatchKeyGuard done(c10::autocast_dispatch_keyset);
    if (AUTOCAST_CASTS == FLOAT32 && !a.tensors()[0]->is_cuda()) return dispatched(op, a);  // the CPU's leaves it alone
    const Cast cast(a);
    return dispatched(op, a);
}

// use(a, reason): with autocast seen to; reason: why PyTorch is to do it, or null.
template <class Use>
auto prepared(const Arguments& given, Use use) {
    const char* reason = misfit(given);
    if (reason != AUTOCAST || AUTOCAST_CASTS != LOWER) return use(given, reason);
    Arguments a = given;
    const Cast cast(a);
    const c10::impl::ExcludeDispatchKeyGuard done(c10::autocast_dispatch_keyset);
    return use(a, misfit(a));
}

inline PyObject* to_python(Results results) {
    if (!results[0].defined()) Py_RETURN_NONE;
    if constexpr (RESULTS == 1) return THPVariable_Wrap(std::move(results[0]));
    PyObject* found = PyTuple_New(RESULTS);
    for (size_t i = 0; i < RESULTS; ++i) PyTuple_SET_ITEM(found, static_cast<Py_ssize_t>(i), THPVariable_Wrap(std::move(results[i])));
    return found;
}

// None: PyTorch's function is to be called in Python.
PyObject* call(Operator& op, PyObject* const* args) {
    Arguments a;
    if (read(args, a)) Py_RETURN_NONE;
    std::array<Tensor, TENSORS> held;  // owners beside Python, made with the GIL: a recent PyTorch takes it for a first one
    const auto tensors = a.tensors();
    for (size_t i = 0; i < TENSORS; ++i)
        if (tensors[i]) held[i] = *tensors[i];
    Results results;
    {
        const WithoutGil gil;
        results = prepared(a, [&op](const Arguments& a, const char* reason) {
            const bool records = any_recorded(a);
            Results own;
            if (!reason && !records) {
                EVO_RECORD(op);
                own = run(op, a);
            }
            if (own[0].defined()) return own;
            if (!reason && records && op.gradients) return with_gradients(op, a);
            return HAS_OPERATOR && is_complete(a) ? originals(a) : own;
        });
    }
    return to_python(std::move(results));
}

PyObject* explain(Operator& op, PyObject* const* args) {
    Arguments a;
    if (const char* reason = read(args, a)) return to_text(std::string("PyTorch: ") + reason);
    return to_text(prepared(a, [&op](const Arguments& a, const char* reason) -> std::string {
        if (reason) return std::string("PyTorch: ") + reason;
        const bool pays = any_recorded(a) && op.gradients != ALL;  // only such are served
        if (pays && !(op.gradients && op.backward)) return "PyTorch: gradients are being recorded";
        const Problem problem = problem_of(a);
        const Answer found = op.table.find(problem);
        if (pays && found.serves() && !trains(op, a, problem, found)) return "PyTorch: no variant of the backward serves it";
        return found.in_words();
    }));
}

}  // namespace
