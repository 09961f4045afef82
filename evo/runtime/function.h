// A function as Python and PyTorch's dispatcher call it: what of the native launcher is the same for all that are stated.
//
// native_code.py writes the rest. Before this: struct Arguments, with its tensors and a visit to all other operands; ARGUMENTS, RESULTS, HAS_FORMULA, HAS_OPERATOR, AUTOCAST_CASTS, NAME, SCHEMA and Signature. Behind it, declared here: read,
// misfit, problem_of, run, originals, is_complete, as_promised, formula and dispatched; and add_kernels of native.h.
//
// A call has the same result whether or not it records gradients. These are PyTorch's derivative of its own function, which
// is called again for them, or follow from the result by an operator of PyTorch's.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace {

using Results = std::array<Tensor, RESULTS>;
using Tensors = decltype(std::declval<const Arguments&>().tensors());
constexpr size_t TENSORS = std::tuple_size_v<Tensors>;

const char* read(PyObject* const*, Arguments&);
const char* misfit(const Arguments&);
Problem problem_of(const Arguments&);
Results run(Operator&, const Arguments&, const Problem&, const Answer&);
Results originals(const Arguments&);
bool is_complete(const Arguments&);
Tensor as_promised(const Arguments&, size_t number, const Tensor& result);
Tensor formula(const Arguments&, const Tensor& gradient, const Tensor& result);
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
        py::tuple found(value.size());
        for (size_t i = 0; i < value.size(); ++i) found[i] = value.kept[i];
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

// Undefined where it is left to PyTorch. Records no gradient.
inline Results run(Operator& op, const Arguments& a) {
    const Problem problem = problem_of(a);
    const Answer answer = op.table.find(problem);
    return answer.serves() ? run(op, a, problem, answer) : Results();
}

// The operator below autograd. Its results have the layout that the module's _fake promises.
inline Results forward(Operator& op, const Arguments& a) {
    if (!misfit(a))
        if (Results found = run(op, a); found[0].defined()) return found;
    Results found = originals(a);
    for (size_t i = 0; i < RESULTS; ++i) found[i] = as_promised(a, i, found[i]);
    return found;
}

// Other operands than tensors, as autograd keeps them.
inline std::vector<c10::IValue> packed(Arguments a) {
    std::vector<c10::IValue> found;
    a.visit([&found](const auto& value) {
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, Ints>) found.emplace_back(c10::IntArrayRef(value));
        else if constexpr (std::is_same_v<Value, c10::ScalarType>) found.emplace_back(static_cast<std::int64_t>(value));
        else found.emplace_back(value);
    });
    return found;
}

inline void unpack(const c10::ArrayRef<c10::IValue> kept, Arguments& a) {
    size_t next = 0;
    a.visit([&](auto& value) {
        using Value = std::decay_t<decltype(value)>;
        const c10::IValue& one = kept[next++];
        if constexpr (std::is_same_v<Value, Ints>) value = Ints(one.toIntVector());
        else if constexpr (std::is_same_v<Value, c10::ScalarType>) value = static_cast<c10::ScalarType>(one.toInt());
        else if constexpr (std::is_same_v<Value, std::optional<c10::ScalarType>>)
            value = one.isNone() ? Value() : Value(static_cast<c10::ScalarType>(one.toInt()));
        else if constexpr (std::is_same_v<Value, std::optional<double>>) value = one.toOptional<double>();
        else if constexpr (std::is_same_v<Value, std::optional<std::int64_t>>) value = one.toOptional<std::int64_t>();
        else if constexpr (std::is_same_v<Value, double>) value = one.toDouble();
        else if constexpr (std::is_same_v<Value, bool>) value = one.toBool();
        else value = one.toInt();
    });
}

// A call that records gradients, of which a variant may give the results.
struct Differentiable : torch::autograd::Function<Differentiable> {
    using Context = torch::autograd::AutogradContext;

    template <class... Given>
    static torch::autograd::variable_list forward(Context* context, Operator* op, const Arguments& a, const Given&...) {
        torch::autograd::variable_list kept;
        for (const Tensor* t : a.tensors()) kept.push_back(t ? *t : Tensor());
        const at::AutoDispatchBelowADInplaceOrView below;
        const Results found = dispatched(*op, a);
        if (HAS_FORMULA) kept.push_back(found[0]);
        context->save_for_backward(kept);
        context->saved_data["operands"] = c10::ivalue::Tuple::create(packed(a));
        return {found.begin(), found.end()};
    }

    static torch::autograd::variable_list backward(Context* context, const torch::autograd::variable_list& gradients) {
        torch::autograd::variable_list kept = context->get_saved_variables(), found(2 + TENSORS);
        Arguments a;
        unpack(context->saved_data["operands"].toTupleRef().elements().asArrayRef(), a);
        Tensors given;
        for (size_t i = 0; i < TENSORS; ++i) given[i] = kept[i].defined() ? &kept[i] : nullptr;
        a.set_tensors(given);
        if (HAS_FORMULA) {
            found[2] = formula(a, gradients[0], kept[TENSORS]);
            return found;
        }
        const bool further = c10::GradMode::is_enabled();  // the gradients are to be differentiated, too
        const at::AutoGradMode recording(true);
        torch::autograd::variable_list wanted, of;
        for (size_t i = 0, edge = 0; i < TENSORS; ++i) {  // edges are of tensors that are there
            if (!given[i] || !context->needs_input_grad(edge++)) continue;
            // A view: hooks of the tensor run in the outer pass.
            kept[i] = further ? kept[i].view_as(kept[i]) : kept[i].detach().requires_grad_();
            wanted.push_back(kept[i]);
        }
        const WithoutGil gil;  // compiled autograd holds it, and PyTorch's engine must not be called with it
        const Results results = originals(a);
        for (size_t i = 0; i < RESULTS; ++i)
            if (gradients[i].defined()) of.push_back(results[i]);
        torch::autograd::variable_list from;
        for (const Tensor& gradient : gradients)
            if (gradient.defined()) from.push_back(gradient);
        const auto each = torch::autograd::grad(of, wanted, from, std::nullopt, further);
        for (size_t i = 0, edge = 0, next = 0; i < TENSORS; ++i)
            if (given[i] && context->needs_input_grad(edge++)) found[2 + i] = each[next++];
        return found;
    }
};

template <size_t... I>
Results recording(Operator& op, const Arguments& a, std::index_sequence<I...>) {
    const auto tensors = a.tensors();
    const auto found = Differentiable::apply(&op, a, optional(tensors[I])...);
    Results results;
    std::copy(found.begin(), found.end(), results.begin());
    return results;
}

inline Results with_gradients(Operator& op, const Arguments& a) {
    if (under_transform() || any_dual(a)) return originals(a);
    if (!any_recorded(a)) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return dispatched(op, a);
    }
    // What no variant serves is PyTorch's with its own gradients, which need nothing computed twice.
    if (!wanted_of_dispatcher(all_keys(a)))
        if (misfit(a) || !op.table.find(problem_of(a)).serves()) return originals(a);
    return recording(op, a, std::make_index_sequence<TENSORS>());
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
auto prepared(Arguments a, Use use) {
    const char* reason = misfit(a);
    if (reason != AUTOCAST || AUTOCAST_CASTS != LOWER) return use(a, reason);
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
        if (any_recorded(a) && !op.gradients) return "PyTorch: gradients are being recorded";
        return op.table.find(problem_of(a)).in_words();
    }));
}

}  // namespace
