// The extension module: its Operator is the launcher of one package, and frontend.cpp says how to call it.
//
// frontend.cpp includes this and defines, in an unnamed namespace:
//
//     const char* const SCHEMA;                                  of the operator, without its namespace
//     void add_kernels(Operator&, torch::Library&);              what the dispatcher is to call for it
//     PyObject* call(Operator&, PyObject* const* args);          the function as Python calls it; None: PyTorch's to do
//     PyObject* explain(Operator&, PyObject* const* args);       which way such a call takes, as a str
//     const Py_ssize_t ARGUMENTS;                                how many both take, all by position
#pragma once

#include <pybind11/pybind11.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "driver.h"

namespace {

namespace py = pybind11;

struct WithoutGil {  // where this thread has it; pybind11's own does more at every call
    PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    ~WithoutGil() { if (state) PyEval_RestoreThread(state); }
};

// Owners of a call's tensors beside Python, to be made with the GIL: a recent PyTorch takes the GIL for every first one.
using Held = std::array<at::Tensor, 4>;

// From problem to what runs it. Problems met before are looked up here; a new one is asked of the package's Dispatch, in
// Python, which chooses a variant, checks its files and loads it. It clears this table with its own, which is never larger.

struct Problem {
    static constexpr size_t MOST = 12;
    std::array<std::int64_t, MOST> words{};  // device (-1: CPU), dtype, sizes
    size_t count = 2;

    Problem(int device, c10::ScalarType dtype, std::initializer_list<std::int64_t> sizes) {
        words[0] = device, words[1] = static_cast<std::int64_t>(dtype);
        for (const std::int64_t n : sizes) words[count++] = n;
    }

    int device() const { return static_cast<int>(words[0]); }
    c10::ScalarType dtype() const { return static_cast<c10::ScalarType>(words[1]); }
    bool operator==(const Problem& other) const { return words == other.words; }
};

struct HashOfProblem {
    size_t operator()(const Problem& p) const {
        std::uint64_t h = 0x9e3779b97f4a7c15u;
        for (size_t i = 0; i < p.count; ++i) {
            h = (h ^ static_cast<std::uint64_t>(p.words[i])) * 0xff51afd7ed558ccdu;
            h ^= h >> 32;
        }
        return static_cast<size_t>(h);
    }
};

// What Dispatch has said of a problem. `text`: the variant, for people, or why there is none.
struct Answer {
    Launch launch;
    int variant = -1;
    std::string text;

    bool serves() const { return variant >= 0; }
};

class Table {
  public:
    // resolve(device, dtype, *sizes): see native.py. retire(variant, device, reason).
    Table(py::object resolve, py::object retire) : resolve_(std::move(resolve)), retire_(std::move(retire)) {}

    std::shared_ptr<const Answer> find(const Problem& problem) {
        {
            const std::shared_lock<std::shared_mutex> reading(state_->mutex);
            if (const auto found = state_->answers.find(problem); found != state_->answers.end()) return found->second;
        }
        return ask(problem);
    }

    void clear() {
        const std::unique_lock<std::shared_mutex> writing(state_->mutex);
        state_->answers.clear();
        ++state_->cleared;
    }

    // Whoever held the lock, and was perhaps changing the answers, is not in this process.
    void after_fork() { state_ = new State; }

    // A variant whose launch failed is not tried again.
    void retire(const Answer& answer, int device, const std::string& reason) {
        const py::gil_scoped_acquire gil;
        try {
            retire_(answer.variant, device, reason);
        } catch (const py::error_already_set&) {  // the call is PyTorch's in any case
        }
        clear();
    }

  private:
    struct State {
        std::shared_mutex mutex;
        std::unordered_map<Problem, std::shared_ptr<const Answer>, HashOfProblem> answers;
        std::uint64_t cleared = 0;
    };

    std::shared_ptr<const Answer> ask(const Problem& problem) {
        const py::gil_scoped_acquire gil;
        const py::error_scope callers;
        std::uint64_t cleared;
        {
            const std::shared_lock<std::shared_mutex> reading(state_->mutex);
            cleared = state_->cleared;
        }
        auto answer = std::make_shared<Answer>();
        bool lasting = false;
        try {
            lasting = read(problem, *answer);
        } catch (const py::error_already_set&) {
            answer->variant = -1, answer->text = "the launcher cannot ask for a variant";
        }
        if (lasting) {
            const std::unique_lock<std::shared_mutex> writing(state_->mutex);
            if (cleared == state_->cleared) state_->answers.emplace(problem, answer);
        }
        return answer;
    }

    // Whether the answer lasts.
    bool read(const Problem& problem, Answer& answer) {
        py::tuple key(problem.count);
        key[0] = problem.device();
        key[1] = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(problem.dtype())));
        for (size_t i = 2; i < problem.count; ++i) key[i] = problem.words[i];
        const py::object found = resolve_(*key);
        Launch& l = answer.launch;
        const char* text = nullptr;
        int lasting = 0, programmatic = 0;
        unsigned long long function = 0, unaligned = 0, context = 0, alignment = 1;
        if (!PyArg_ParseTuple(
                found.ptr(), "ispKKK(III)IIIpK", &answer.variant, &text, &lasting, &function, &unaligned, &context,
                &l.grid[0], &l.grid[1], &l.grid[2], &l.threads, &l.smem_bytes, &l.cluster, &programmatic, &alignment))
            throw py::error_already_set();
        answer.text = text, l.programmatic = programmatic, l.misaligned = alignment - 1;
        l.function = reinterpret_cast<void*>(function), l.unaligned = reinterpret_cast<void*>(unaligned);
        l.context = reinterpret_cast<void*>(context);
        return lasting;
    }

    py::object resolve_, retire_;
    State* state_ = new State;
};

// Whether the memory of tensors may be handed to a kernel, or only PyTorch can do right by them: frontend.py in C++.

const char* const AUTOCAST = "autocast is enabled";

inline bool plain_memory(const at::Tensor& t) {
    if (!t.has_storage() || t.numel() == 0) return false;
    // A view into a released storage has an address, too: its offset from nothing.
    return t.storage().nbytes() > static_cast<size_t>(t.storage_offset()) * t.itemsize();
}

// What PyTorch's dispatcher would have to do beside calling a kernel and recording gradients; null: nothing.
inline const char* wanted_of_dispatcher(c10::DispatchKeySet keys) {
    static const c10::DispatchKeySet passed =
        c10::autograd_dispatch_keyset | c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::BackendSelect});
    const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
    const c10::DispatchKeySet left = ((keys | local.included_) - local.excluded_) - passed;
    switch (const c10::DispatchKey key = left.highestPriorityTypeId(); key) {
        case c10::DispatchKey::CPU:
        case c10::DispatchKey::CUDA:
            return nullptr;
        case c10::DispatchKey::AutocastCPU:
        case c10::DispatchKey::AutocastCUDA:
            return AUTOCAST;
        case c10::DispatchKey::Negative:
        case c10::DispatchKey::Conjugate:
            return "an argument is a view that negates what it reads";
        case c10::DispatchKey::ZeroTensor:
            return "an argument holds no memory (it is a tensor of zeros that was never filled in)";
        case c10::DispatchKey::Python:
        case c10::DispatchKey::PythonDispatcher:
        case c10::DispatchKey::PythonTLSSnapshot:
        case c10::DispatchKey::PreDispatch:
            return "a torch dispatch mode is active";
        default:
            return "a transform of torch.func or torch.jit.trace is active, or an argument is not laid out as a plain array, or "
                   "on a device that nothing was tuned for";
    }
}

// Whether forward-mode differentiation follows a tensor.
inline bool dual(const at::Tensor* t) { return t && t->_fw_grad(0).defined(); }

inline c10::DispatchKeySet keys_of(std::initializer_list<const at::Tensor*> tensors) {
    c10::DispatchKeySet keys;
    for (const at::Tensor* t : tensors)
        if (t) keys = keys | t->key_set();
    return keys;
}

// As addresses() of frontend.py: why these must not be handed to a kernel, or null. Null pointers are left out; the first
// is not one.
inline const char* unfit(std::initializer_list<const at::Tensor*> tensors) {
    const at::Tensor& first = **tensors.begin();
    if (const char* reason = wanted_of_dispatcher(keys_of(tensors))) return reason;
    for (const at::Tensor* t : tensors) {
        if (!t) continue;
        if (t->scalar_type() != first.scalar_type()) return "the arguments have different dtypes";
        if (t->device() != first.device()) return "the arguments are on different devices";
        if (dual(t)) return "forward-mode differentiation is active";
        if (!plain_memory(*t)) return "an argument holds no memory (it is empty, released or on meta)";
    }
    return nullptr;
}

inline bool recorded(std::initializer_list<const at::Tensor*> tensors) {
    if (!c10::GradMode::is_enabled()) return false;
    for (const at::Tensor* t : tensors)
        if (t && t->requires_grad()) return true;
    return false;
}

// Whether a transform of torch.func is being applied, at whatever level.
inline bool under_transform() {
    return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// The operator, and the extension module that makes it.

struct Operator;
extern const char* const SCHEMA;
extern const Py_ssize_t ARGUMENTS;
void add_kernels(Operator&, torch::Library&);
PyObject* call(Operator&, PyObject* const*);
PyObject* explain(Operator&, PyObject* const*);

// Of one package. Never destroyed: the dispatcher refers to it.
struct Operator {
    Table table;
    std::atomic<bool> gradients{false};  // whether calls that record gradients are served, too
    torch::Library definitions;
    std::string name;
    std::optional<c10::OperatorHandle> handle;

    // Raises for a namespace that has one.
    Operator(const std::string& space, py::object resolve, py::object retire)
        : table(std::move(resolve), std::move(retire)),
          definitions(torch::Library::FRAGMENT, space, std::nullopt, __FILE__, __LINE__) {
        const std::string schema = SCHEMA;
        name = space + "::" + schema.substr(0, schema.find('('));
        definitions.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
        handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
        add_kernels(*this, definitions);
    }

    // Runs a variant: done (CPU) or enqueued (CUDA) if true; nothing ran if false. One address an argument.
    template <class... Arguments>
    bool run(const Answer& answer, int device, std::uintptr_t addresses, Arguments... arguments) {
        if (answer.launch.on_cpu()) {
            reinterpret_cast<void (*)(Arguments...)>(answer.launch.function)(arguments...);
            return true;
        }
        const Driver* driver = Driver::get();
        void* pointers[] = {&arguments...};
        const int error = driver ? driver->launch(answer.launch, device, addresses, pointers) : -1;
        if (error && !Driver::is_of_capture(error))
            table.retire(answer, device, driver ? "a launch failed: " + driver->name_of(error) : "no CUDA driver answers");
        return !error;
    }
};

template <class Signature>
c10::TypedOperatorHandle<Signature> dispatched(const Operator& op) {
    return op.handle->typed<Signature>();
}

template <class Function>
void add_kernel(torch::Library& library, const char* name, Function function, std::initializer_list<c10::DispatchKey> keys) {
    for (const c10::DispatchKey key : keys) library.impl(name, torch::dispatch(key, torch::CppFunction(function)));
}

// What profilers see of a call that does not go through the dispatcher.
#define EVO_RECORD(op) RECORD_FUNCTION((op).name, c10::ArrayRef<const c10::IValue>())

// A tensor that is no subclass's, or null. Parameters are plain.
inline const at::Tensor* plain_tensor(PyObject* object) {
    return THPVariable_CheckExact(object) ? &THPVariable_Unpack(object) : nullptr;
}

inline bool overridden() { return at::impl::torch_function_mode_enabled(); }

inline PyObject* to_text(const std::string& text) {
    return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

template <PyObject* (*FUNCTION)(Operator&, PyObject* const*)>
PyObject* checked(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    if (count != ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "%zd arguments are wanted, by position, not %zd", ARGUMENTS, count);
        return nullptr;
    }
    return FUNCTION(*static_cast<Operator*>(PyCapsule_GetPointer(self, nullptr)), args);
    END_HANDLE_TH_ERRORS
}

// A function for Python that is as cheap to call as any can be: pybind11's own are not.
template <PyObject* (*FUNCTION)(Operator&, PyObject* const*)>
py::object bound(Operator& op) {
    static PyMethodDef method = {
        "call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&checked<FUNCTION>)), METH_FASTCALL, nullptr};
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, py::capsule(&op).ptr()));
}

}  // namespace

PYBIND11_MODULE(evo_native, module) {
    using Kept = std::unique_ptr<Operator, py::nodelete>;
    py::class_<Operator, Kept>(module, "Operator", py::module_local())
        .def(py::init<std::string, py::object, py::object>())
        .def_property_readonly("call", &bound<call>)
        .def_property_readonly("explain", &bound<explain>)
        .def("clear", [](Operator& op) { op.table.clear(); })
        .def("after_fork", [](Operator& op) { op.table.after_fork(); })
        .def("serve_gradients", [](Operator& op, bool wanted) { op.gradients = wanted; });
}
