// scaled_dot_product_attention as Python and PyTorch's dispatcher call it: frontend.py in C++, with gradients. See
// runtime/native.h.
//
// The forward pass is a variant's, or PyTorch's where none serves. For the backward pass PyTorch computes its own forward
// pass again, and differentiates that. The operator takes what variants may serve: four dimensions, no dropout.
#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "runtime/native.h"

namespace {

using at::Tensor;
using Scale = std::optional<double>;
using Mask = std::optional<Tensor>;
using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Mask&, bool, Scale, bool);

const char* const NAME = "scaled_dot_product_attention";
const char* const SCHEMA =
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, "
    "float? scale=None, bool enable_gqa=False) -> Tensor";
const Py_ssize_t ARGUMENTS = 8;
constexpr double LOWEST_SCALE = 1e-6, HIGHEST_SCALE = 1e6;
constexpr std::int64_t DENSEST_STRIDE = 8;  // see frontend.py

struct Arguments {
    const Tensor *query, *key, *value, *mask;  // null: none
    bool is_causal;
    Scale scale;
    bool enable_gqa;
    double dropout = 0.0;

    bool additive() const { return mask && mask->scalar_type() != at::kBool; }
};

const Tensor* given(const Mask& mask) { return mask && mask->defined() ? &*mask : nullptr; }

Mask copied(const Tensor* mask) { return mask ? Mask(*mask) : std::nullopt; }

Tensor torch_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, bool is_causal, Scale scale,
    bool enable_gqa) {
    return at::scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, scale, enable_gqa);
}

Tensor left_to_torch(const Arguments& a) {
    return at::scaled_dot_product_attention(
        *a.query, *a.key, *a.value, copied(a.mask), a.dropout, a.is_causal, a.scale, a.enable_gqa);
}

// Whether the caller has left PyTorch but one way: no plain mathematics to fall back on, or nothing else.
bool backend_chosen() {
    const at::Context& c = at::globalContext();
    const bool fused = c.userEnabledFlashSDP() || c.userEnabledMemEfficientSDP() || c.userEnabledCuDNNSDP();
    return !(c.userEnabledMathSDP() && fused);
}

// Of scores, and so of masks that are not broadcast.
std::array<std::int64_t, 4> scores_of(const Arguments& a) {
    return {a.query->size(0), a.query->size(1), a.query->size(2), a.key->size(2)};
}

// Why no variant can serve with this mask; null if one may.
const char* misfit_of_mask(const Arguments& a) {
    if (a.is_causal) return "attn_mask and is_causal exclude each other";
    if (a.mask->device() != a.query->device()) return "attn_mask is on another device";
    if (const char* reason = unfit({a.mask})) return reason;
    // Variants read such a one, but slowly; of added ones PyTorch's read what is not there.
    if (a.mask->is_cuda() && reinterpret_cast<std::uintptr_t>(a.mask->const_data_ptr()) % 16 && !a.additive())
        return "attn_mask starts between vectors";
    if (a.additive() && a.mask->scalar_type() != a.query->scalar_type())
        return "attn_mask is neither boolean nor of the dtype of query";
    if (a.mask->dim() < 2 || !at::is_expandable_to(a.mask->sizes(), scores_of(a)))
        return "the shape of attn_mask does not fit those of query and key";
    return nullptr;
}

// Why no variant can serve, whichever there are; null if one may. Does not ask whether gradients are recorded.
const char* misfit(const Arguments& a) {
    if (a.dropout != 0.0) return "there is dropout";
    if (backend_chosen()) return "a back end was chosen (torch.nn.attention.sdpa_kernel, torch.backends.cuda)";
    if (const char* reason = unfit({a.query, a.key, a.value})) return reason;
    if (a.query->dim() != 4 || a.key->dim() != 4 || a.value->dim() != 4)
        return "query, key or value has not four dimensions";
    const c10::IntArrayRef q = a.query->sizes(), k = a.key->sizes();
    if (k[0] != q[0] || k[3] != q[3] || !a.value->sizes().equals(k)) return "the shapes of query, key and value do not fit";
    if (q[1] != k[1] && !(a.enable_gqa && q[1] % k[1] == 0))
        return "key has other heads than query, and they are not asked to share";
    if (a.is_causal && q[2] != k[2])  // PyTorch's mask starts at the first key, the variants' ends at the last
        return "a causal mask over unequal lengths";
    if (a.scale && !(LOWEST_SCALE <= *a.scale && *a.scale <= HIGHEST_SCALE)) return "scale is not a number from 1e-6 to 1e6";
    for (const Tensor* t : {a.query, a.key, a.value}) {
        const c10::IntArrayRef s = t->strides();
        if (s[3] != 1 || s[0] % DENSEST_STRIDE || s[1] % DENSEST_STRIDE || s[2] % DENSEST_STRIDE)
            return "a tensor's last dimension is not dense, or its rows start between vectors";
    }
    return a.mask ? misfit_of_mask(a) : nullptr;
}

Problem problem_of(const Arguments& a) {
    const at::Device device = a.query->device();
    const c10::IntArrayRef q = a.query->sizes(), k = a.key->sizes();
    return {device.is_cpu() ? -1 : device.index(), a.query->scalar_type(),
            {q[0], q[1], k[1], q[2], k[2], q[3], a.is_causal, false, a.mask != nullptr, a.additive()}};  // no lse
}

// Undefined where it is left to PyTorch. Records no gradient.
Tensor run(Operator& op, const Arguments& a) {
    const Problem problem = problem_of(a);
    const auto answer = op.table.find(problem);
    if (!answer.serves()) return {};
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor output = at::empty_like(*a.query);  // its axes in the order of the query's, as PyTorch has it
    const void *q = a.query->const_data_ptr(), *k = a.key->const_data_ptr(), *v = a.value->const_data_ptr();
    const void* mask = a.mask ? a.mask->const_data_ptr() : nullptr;
    std::array<std::int64_t, 4> m{};  // strides of the mask, 0 where it is broadcast
    if (a.mask) {
        const auto whole = at::inferExpandGeometry_dimvector(a.mask->sizes(), a.mask->strides(), scores_of(a));
        std::copy(whole.strides.begin(), whole.strides.end(), m.begin());
    }
    void *o = output.mutable_data_ptr(), *lse = nullptr;
    const auto& n = problem.words;  // after device and dtype: the sizes
    const c10::IntArrayRef sq = a.query->strides(), sk = a.key->strides(), sv = a.value->strides(), so = output.strides();
    const bool done = op.table.run(
        answer, problem, q, k, v, mask, o, lse, n[2], n[3], n[4], n[5], n[6], n[7],
        static_cast<float>(a.scale.value_or(0.0)), sq[0], sq[1], sq[2], sk[0], sk[1], sk[2], sv[0], sv[1], sv[2], so[0],
        so[1], so[2], m[0], m[1], m[2], m[3]);
    return done ? output : Tensor();
}

// The operator below autograd. Its result has the layout that _fake of frontend.py promises.
Tensor forward(
    Operator& op, const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, bool is_causal, Scale scale,
    bool enable_gqa) {
    TORCH_CHECK(
        query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.size(0) == key.size(0) &&
            query.size(3) == key.size(3) && value.sizes().equals(key.sizes()),
        "this operator takes query, key and value of [batch, heads, length, head_dim] and one head_dim");
    const Arguments a = {&query, &key, &value, given(mask), is_causal, scale, enable_gqa};
    if (!misfit(a))
        if (Tensor output = run(op, a); output.defined()) return output;
    const Tensor output = left_to_torch(a);
    const Tensor promised = at::empty_like(query);
    return output.strides().equals(promised.strides()) ? output : promised.copy_(output);
}

struct Differentiable : torch::autograd::Function<Differentiable> {
    static Tensor forward(
        torch::autograd::AutogradContext* context, const c10::TypedOperatorHandle<Signature>& op, const Tensor& query,
        const Tensor& key, const Tensor& value, const Mask& mask, bool is_causal, Scale scale, bool enable_gqa) {
        context->save_for_backward({query, key, value, mask.value_or(Tensor())});
        context->saved_data["is_causal"] = is_causal;
        context->saved_data["scale"] = scale;
        context->saved_data["enable_gqa"] = enable_gqa;
        const at::AutoDispatchBelowADInplaceOrView below;
        return op.call(query, key, value, mask, is_causal, scale, enable_gqa);
    }

    static torch::autograd::variable_list backward(
        torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
        const bool again = c10::GradMode::is_enabled();  // the gradients are to be differentiated, too
        const c10::AutoGradMode recording(true);
        torch::autograd::variable_list inputs = context->get_saved_variables(), wanted, found(8);
        const size_t count = inputs[3].defined() ? 4 : 3;
        for (size_t i = 0; i < count; ++i) {
            if (!again) inputs[i] = inputs[i].detach().requires_grad_(context->needs_input_grad(i));
            if (context->needs_input_grad(i)) wanted.push_back(inputs[i]);
        }
        auto& data = context->saved_data;
        const WithoutGil gil;  // compiled autograd holds it, and PyTorch's engine must not be called with it
        const Tensor output = torch_attention(
            inputs[0], inputs[1], inputs[2], copied(inputs[3].defined() ? &inputs[3] : nullptr), data["is_causal"].toBool(),
            data["scale"].toOptional<double>(), data["enable_gqa"].toBool());
        const auto each = torch::autograd::grad({output}, wanted, {gradients[0]}, std::nullopt, again);
        for (size_t i = 0, next = 0; i < count; ++i)
            if (context->needs_input_grad(i)) found[i + 1] = each[next++];
        return found;
    }
};

Tensor with_gradients(
    Operator& op, const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, bool is_causal, Scale scale,
    bool enable_gqa) {
    const Arguments a = {&query, &key, &value, given(mask), is_causal, scale, enable_gqa};
    if (under_transform() || dual(&query) || dual(&key) || dual(&value) || dual(a.mask))
        return left_to_torch(a);
    const auto self = dispatched<Signature>(op);
    if (!recorded({&query, &key, &value, a.mask})) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return self.call(query, key, value, mask, is_causal, scale, enable_gqa);
    }
    // What no variant serves is PyTorch's with its own gradients, which need nothing computed twice.
    if (!wanted_of_dispatcher(keys_of({&query, &key, &value, a.mask})))
        if (misfit(a) || !op.table.find(problem_of(a)).serves()) return left_to_torch(a);
    return Differentiable::apply(self, query, key, value, mask, is_causal, scale, enable_gqa);
}

// As PyTorch's autocast treats its own: in the lower precision.
Tensor lowered(const Tensor& t) {
    const c10::DeviceType device = t.device().type();
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device);
}

Mask lowered(const Mask& mask) { return given(mask) ? Mask(lowered(*mask)) : std::nullopt; }

Tensor with_autocast(
    Operator& op, const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, bool is_causal, Scale scale,
    bool enable_gqa) {
    const c10::impl::ExcludeDispatchKeyGuard done(c10::autocast_dispatch_keyset);
    return dispatched<Signature>(op).call(
        lowered(query), lowered(key), lowered(value), lowered(mask), is_causal, scale, enable_gqa);
}

void add_kernels(Operator& op, torch::Library& library) {
    const auto bound = [&op](auto function) {
        return [&op, function](
                   const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, bool is_causal,
                   Scale scale, bool enable_gqa) {
            return function(op, query, key, value, mask, is_causal, scale, enable_gqa);
        };
    };
    add_kernel(library, NAME, bound(forward), {c10::DispatchKey::CompositeExplicitAutograd});
    add_kernel(library, NAME, bound(with_gradients), {c10::DispatchKey::Autograd});
    add_kernel(library, NAME, bound(with_autocast), {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
    add_kernel(library, NAME, torch_attention, {c10::DispatchKey::FuncTorchBatched});
}

bool is_number(PyObject* object) { return PyFloat_CheckExact(object) || PyLong_CheckExact(object); }

// The call in Python's arguments, or why they cannot be read as one. Does not look into the tensors.
const char* read(PyObject* const* args, Arguments& a) {
    if (!is_number(args[4])) return "there is dropout";
    if (!PyBool_Check(args[5]) || !PyBool_Check(args[7])) return "is_causal or enable_gqa is not a bool";
    if (args[6] != Py_None && !is_number(args[6])) return "scale is not a number from 1e-6 to 1e6";
    if (overridden()) return "a tensor subclass or a torch function mode (such as torch.set_default_device) is involved";
    a.query = plain_tensor(args[0]), a.key = plain_tensor(args[1]), a.value = plain_tensor(args[2]);
    a.mask = args[3] != Py_None ? plain_tensor(args[3]) : nullptr;
    if (!a.query || !a.key || !a.value || (!a.mask && args[3] != Py_None))
        return "an argument is no plain tensor, but a tensor subclass or something else";
    a.is_causal = args[5] == Py_True, a.enable_gqa = args[7] == Py_True;
    a.dropout = PyFloat_AsDouble(args[4]);
    if (args[6] != Py_None) a.scale = PyFloat_AsDouble(args[6]);
    if (PyErr_Occurred()) {  // an int that is too large
        PyErr_Clear();
        return "scale is not a number from 1e-6 to 1e6";
    }
    return nullptr;
}

// Tensors of a call under autocast, in the precision they are to have.
struct Lowered {
    Tensor query, key, value;
    Mask mask;

    explicit Lowered(Arguments& a)
        : query(lowered(*a.query)), key(lowered(*a.key)), value(lowered(*a.value)), mask(lowered(copied(a.mask))) {
        a.query = &query, a.key = &key, a.value = &value, a.mask = given(mask);
    }
};

// use(a, reason): with autocast seen to; reason: why PyTorch is to do it, or null.
template <class Use>
auto prepared(Arguments a, Use use) {
    const char* reason = misfit(a);
    if (reason != AUTOCAST) return use(a, reason);
    const Lowered tensors(a);
    const c10::impl::ExcludeDispatchKeyGuard done(c10::autocast_dispatch_keyset);
    return use(a, misfit(a));
}

PyObject* call(Operator& op, PyObject* const* args) {
    Arguments a;
    if (read(args, a)) Py_RETURN_NONE;
    const Held held{{*a.query, *a.key, *a.value, a.mask ? *a.mask : Tensor()}};
    Tensor output;
    {
        const WithoutGil gil;
        output = prepared(a, [&op](const Arguments& a, const char* reason) {
            const bool records = recorded({a.query, a.key, a.value, a.mask});
            Tensor own;
            if (!reason && !records) {
                EVO_RECORD(op);
                own = run(op, a);
            }
            if (own.defined()) return own;
            return !reason && records && op.gradients
                ? with_gradients(op, *a.query, *a.key, *a.value, copied(a.mask), a.is_causal, a.scale, a.enable_gqa)
                : left_to_torch(a);
        });
    }
    return THPVariable_Wrap(std::move(output));
}

PyObject* explain(Operator& op, PyObject* const* args) {
    Arguments a;
    if (const char* reason = read(args, a)) return to_text(std::string("PyTorch: ") + reason);
    return to_text(prepared(a, [&op](const Arguments& a, const char* reason) -> std::string {
        if (reason) return std::string("PyTorch: ") + reason;
        if (recorded({a.query, a.key, a.value, a.mask}) && !op.gradients) return "PyTorch: gradients are being recorded";
        return op.table.find(problem_of(a)).in_words();
    }));
}

}  // namespace
