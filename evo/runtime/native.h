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
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
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
#include <cstring>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>

#include "choice.h"

namespace {

namespace py = pybind11;

struct WithoutGil {  // where this thread has it; pybind11's own does more at every call
    PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    ~WithoutGil() { if (state) PyEval_RestoreThread(state); }
};

// A structure that an entry point takes: by value on a GPU, by reference on a CPU.
template <size_t BYTES, size_t ALIGNMENT>
struct alignas(ALIGNMENT) Structure {
    unsigned char bytes[BYTES] = {};

    template <class Value>
    void put(size_t at, Value value) { std::memcpy(bytes + at, &value, sizeof value); }
};

template <class Value>
Value passed_on_cpu(const Value& value) { return value; }
template <size_t BYTES, size_t ALIGNMENT>
const void* passed_on_cpu(const Structure<BYTES, ALIGNMENT>& structure) { return &structure; }

// From problem to what runs it. What is right for all problems of one device, dtype and sizes that are compiled in (a
// family) is asked of the package's Dispatch once, in Python, which chooses variants, checks their files and loads them. From
// then on a problem with other sizes is arithmetic: the nearest member as choice.py has it, the grid as package.py has it.
// Where no measurement decides, a race does, which Python holds at the first problem of a bucket.

struct Problem {
    std::array<std::int64_t, 2 + MOST_SIZES> words{};  // device (-1: CPU), dtype, sizes
    size_t count = 2;

    Problem() = default;
    Problem(int device, c10::ScalarType dtype, std::initializer_list<std::int64_t> sizes) {
        words[0] = device, words[1] = static_cast<std::int64_t>(dtype);
        for (const std::int64_t n : sizes) add(n);
    }

    void add(std::int64_t size) {
        TORCH_CHECK(count < words.size(), "a problem has more than ", MOST_SIZES, " sizes");
        words[count++] = size;
    }

    int device() const { return static_cast<int>(words[0]); }
    c10::ScalarType dtype() const { return static_cast<c10::ScalarType>(words[1]); }
    const std::int64_t* sizes() const { return &words[2]; }
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

class Table {
  public:
    // describe(key): Dispatch.family. retire(variant, device, reason). dimensions: see native.py.
    Table(py::object describe, py::object retire, const py::list& dimensions)
        : describe_(std::move(describe)), retire_(std::move(retire)) {
        if (dimensions.size() > MOST_SIZES)
            throw std::runtime_error(
                "the kernel has " + std::to_string(dimensions.size()) + " dimensions and compiled-in options, and the launcher " +
                "takes " + std::to_string(MOST_SIZES));
        for (const py::handle d : dimensions) {
            const auto [low, high, cpu, gpu] = d.cast<std::tuple<std::int64_t, std::int64_t, bool, bool>>();
            dimensions_.push_back({low, high, cpu, gpu});
        }
    }

    Answer find(const Problem& problem) {
        if (const auto family = known(problem)) {
            Answer answer = family->answer(problem.sizes(), problem.count - 2);
            if (answer.undecided)
                if (const auto winner = raced(problem)) answer = winner->answer(problem.sizes());
            if (answer.text) return answer;
        }
        return ask(problem);
    }

    void clear() {
        const std::unique_lock<std::shared_mutex> writing(state_->mutex);
        state_->families.clear();
        state_->raced.clear();
        for (auto& place : state_->unserved) place.second = nullptr;
        ++state_->cleared;
    }

    // Whoever held the lock, and was perhaps changing the families, is not in this process.
    void after_fork() { state_ = new State; }

    // Runs a variant: done (CPU) or enqueued (CUDA) if true; to be done by PyTorch if false. The entry points' arguments in
    // order, addresses as void* or const void*, structures as Structure.
    template <class... Arguments>
    bool run(const Answer& answer, const Problem& problem, Arguments... arguments) {
        const std::uintptr_t addresses = (address(arguments) | ...);
        void* pointers[] = {&arguments...};
        const auto made = [&](const Launch& launch) {
            if (launch.on_cpu()) {
                reinterpret_cast<void (*)(decltype(passed_on_cpu(arguments))...)>(launch.function)(passed_on_cpu(arguments)...);
                return true;
            }
            const Driver* driver = Driver::get();
            const int error = driver ? driver->launch(launch, problem.device(), addresses, pointers) : -1;
            if (error && !Driver::is_of_capture(error))
                retire(answer, problem.device(), driver ? "a launch failed: " + driver->name_of(error) : "no CUDA driver answers");
            return !error;
        };
        if (!made(answer.launch)) return false;
        if (!answer.more) return true;
        for (const Step& step : answer.more->steps) {
            Launch next = step.launch;
            if (!step.grid(problem.sizes(), next.grid) || !made(next)) return false;
        }
        return true;
    }

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
    static std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
    template <class Other>
    static std::enable_if_t<!std::is_pointer_v<Other>, std::uintptr_t> address(const Other&) { return 0; }

    using Known = std::shared_ptr<const Family>;
    using Winner = std::shared_ptr<const Member>;
    static constexpr size_t MOST_RACED = 4096;

    struct State {
        std::shared_mutex mutex;
        std::unordered_map<Problem, Known, HashOfProblem> families;  // those with members: as many as have code
        std::array<std::pair<Problem, Known>, 1024> unserved;        // the others, of which there is no end, by their hash
        std::unordered_map<Problem, Winner, HashOfProblem> raced;    // by bucket
        std::uint64_t cleared = 0;

        std::pair<Problem, Known>& place(const Problem& common) {
            return unserved[HashOfProblem()(common) % unserved.size()];
        }
    };

    // Less the sizes that are not compiled in, of which at most their bucket is left. False if one of these is out of range.
    bool reduce(Problem& problem, bool bucketed = false) const {
        for (size_t i = 0; i < dimensions_.size(); ++i) {
            const Dimension& d = dimensions_[i];
            std::int64_t& size = problem.words[i + 2];
            if (problem.device() < 0 ? d.fixed_on_cpu : d.fixed_on_gpu) continue;
            if (size < d.low || size > d.high) return false;
            size = bucketed ? bucket_of(size, Member::log_of(size)) : 0;
        }
        return true;
    }

    Known known(Problem problem) {
        if (!reduce(problem)) return nullptr;
        const std::shared_lock<std::shared_mutex> reading(state_->mutex);
        if (const auto found = state_->families.find(problem); found != state_->families.end()) return found->second;
        const auto& place = state_->place(problem);
        return place.first == problem ? place.second : nullptr;
    }

    Winner raced(Problem problem) {
        if (!reduce(problem, true)) return nullptr;
        const std::shared_lock<std::shared_mutex> reading(state_->mutex);
        const auto found = state_->raced.find(problem);
        return found == state_->raced.end() ? nullptr : found->second;
    }

    Answer ask(const Problem& problem) {
        const py::gil_scoped_acquire gil;
        const py::error_scope callers;
        std::uint64_t cleared;
        {
            const std::shared_lock<std::shared_mutex> reading(state_->mutex);
            cleared = state_->cleared;
        }
        Answer answer;
        Known family;
        Winner winner;
        try {
            std::tie(answer.text, family, winner) = read(problem);
        } catch (const std::exception&) {
            answer.text = std::make_shared<const std::string>("the launcher cannot ask for a variant");
        }
        Problem common = problem, bucket = problem;
        if (!family || !reduce(common) || !reduce(bucket, true)) return answer;
        {
            const std::unique_lock<std::shared_mutex> writing(state_->mutex);
            if (cleared == state_->cleared) {
                if (!family->members.empty()) state_->families.insert_or_assign(common, family);
                else state_->place(common) = {common, family};
                if (winner && state_->raced.size() >= MOST_RACED) state_->raced.erase(state_->raced.begin());
                if (winner) state_->raced.insert_or_assign(bucket, winner);
            }
        }
        Answer found = family->answer(problem.sizes(), problem.count - 2);
        if (found.undecided && winner) found = winner->answer(problem.sizes());
        return found.text ? found : answer;
    }

    // How this problem is served, in words; what lasts of that, or null; what a race decided, or null.
    std::tuple<Text, Known, Winner> read(const Problem& problem) {
        py::tuple key(problem.count);
        key[0] = problem.device();
        key[1] = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(problem.dtype())));
        for (size_t i = 2; i < problem.count; ++i) key[i] = problem.words[i];
        const py::tuple found = describe_(key);
        const Text text = text_of(found[0]);
        if (found[1].is_none()) return {text, nullptr, nullptr};
        auto family = std::make_shared<Family>();
        const auto read_member = [&](const py::handle& record) { return member(record.cast<py::tuple>(), problem.count - 2); };
        for (const py::handle each : found[1]) family->members.push_back(read_member(each));
        if (family->members.empty()) family->text = text;
        family->races = found[2].cast<bool>();
        return {text, family, found[3].is_none() ? nullptr : std::make_shared<const Member>(read_member(found[3]))};
    }

    static Text text_of(const py::handle& words) { return std::make_shared<const std::string>(words.cast<std::string>()); }

    static Member member(const py::tuple& record, size_t sizes) {
        Member m;
        for (size_t i = 0; i < sizes; ++i) m.add_size(record[i].cast<std::int64_t>());
        const auto told = [&](size_t i) { return py::len(record[i]) ? text_of(record[i]) : nullptr; };
        m.slower = told(sizes), m.text = told(sizes + 1);
        m.variant = record[sizes + 2].cast<int>(), m.measured = record[sizes + 4].cast<bool>(), m.gives_more = record[sizes + 5].cast<bool>();
        if (record[sizes + 3].is_none()) return m;
        const auto code = record[sizes + 3].cast<py::tuple>();  // Function.described
        const auto context = reinterpret_cast<void*>(code[0].cast<std::uintptr_t>());
        const auto launches = code[2].cast<py::tuple>();
        m.first = step(context, launches[0].cast<py::tuple>());
        auto more = std::make_shared<More>();
        for (size_t i = 1; i < launches.size(); ++i) more->steps.push_back(step(context, launches[i].cast<py::tuple>()));
        using Piece = std::tuple<std::int64_t, std::vector<size_t>, bool>;
        for (const auto& [bytes, dimensions, zeroed] : code[1].cast<std::vector<Piece>>())
            more->workspace.push_back({bytes, dimensions, zeroed});
        if (!more->steps.empty() || !more->workspace.empty()) m.more = more;
        return m;
    }

    static Step step(void* context, const py::tuple& code) {
        const auto pointer = [&](size_t i) { return reinterpret_cast<void*>(code[i].cast<std::uintptr_t>()); };
        Step s;
        Launch& l = s.launch;
        l.function = pointer(0), l.unaligned = pointer(1), l.context = context;
        const auto block = code[2].cast<std::array<unsigned, 3>>();
        std::copy(block.begin(), block.end(), l.block);
        l.smem_bytes = code[3].cast<unsigned>(), l.cluster = code[4].cast<unsigned>();
        l.programmatic = code[5].cast<bool>(), l.misaligned = code[6].cast<std::uintptr_t>() - 1;
        s.tiles = code[7].cast<std::vector<std::pair<Quantity, std::int64_t>>>();
        s.blocks_per_tile = code[8].cast<std::int64_t>(), s.most_blocks = code[9].cast<std::int64_t>();
        s.axes = code[10].cast<bool>();
        return s;
    }

    py::object describe_, retire_;
    std::vector<Dimension> dimensions_;
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

py::object* python_original = nullptr;  // the function that is stood in for, where it is no operator of PyTorch's

enum { NONE, PAY, ALL };  // calls that record gradients that are served, as in native.py

// Of one package. Never destroyed: the dispatcher refers to it.
struct Operator {
    Table table;
    std::unique_ptr<Table> backward;  // of the package within this one that computes gradients; null: there is none
    std::atomic<int> gradients{NONE};
    torch::Library definitions;
    std::string name;
    std::optional<c10::OperatorHandle> handle;

    // Raises for a namespace that has one.
    Operator(const std::string& space, py::object describe, py::object retire, const py::list& dimensions)
        : table(std::move(describe), std::move(retire), dimensions),
          definitions(torch::Library::FRAGMENT, space, std::nullopt, __FILE__, __LINE__) {
        const std::string schema = SCHEMA;
        name = space + "::" + schema.substr(0, schema.find('('));
        definitions.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
        handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
        add_kernels(*this, definitions);
    }
};

// Memory for a call's workspace arguments, in order. It is to live until the call was made.
class Workspace {
  public:
    Workspace(const Answer& answer, const Problem& problem, const at::TensorOptions& like) {
        if (!answer.more) return;
        for (const More::Piece& piece : answer.more->workspace) {
            std::int64_t bytes = piece.bytes;
            for (const size_t dimension : piece.dimensions) bytes *= problem.sizes()[dimension];
            const at::TensorOptions options = like.dtype(at::kByte);
            if (!bytes) tensors_.emplace_back();
            else tensors_.push_back(piece.zeroed ? at::zeros({bytes}, options) : at::empty({bytes}, options));
        }
    }
    void* operator[](size_t i) const {
        return i < tensors_.size() && tensors_[i].defined() ? tensors_[i].mutable_data_ptr() : nullptr;
    }

  private:
    std::vector<at::Tensor> tensors_;
};

inline void each(Operator& op, void (Table::*change)()) {
    (op.table.*change)();
    if (op.backward) ((*op.backward).*change)();
}

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
        .def(py::init<std::string, py::object, py::object, py::list>())
        .def_property_readonly("call", &bound<call>)
        .def_property_readonly("explain", &bound<explain>)
        .def("clear", [](Operator& op) { each(op, &Table::clear); })
        .def("after_fork", [](Operator& op) { each(op, &Table::after_fork); })
        .def(
            "use_backward",
            [](Operator& op, py::object describe, py::object retire, const py::list& dimensions) {
                op.backward = std::make_unique<Table>(std::move(describe), std::move(retire), dimensions);
            })
        .def("use_original", [](Operator&, py::object function) { python_original = new py::object(std::move(function)); })
        .def("serve_gradients", [](Operator& op, int which) { op.gradients = which; });
}
