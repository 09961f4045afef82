// The extension module: attach() makes an Operator of a package, which frontend.cpp says how to call.
//
// frontend.cpp defines, in an unnamed namespace:
//
//     const char* const SCHEMA;                                  of the operator, without its namespace
//     void add_kernels(Operator&, torch::Library&);              what the dispatcher is to call for it
//     PyObject* call(Operator&, PyObject* const* args);          the function as Python calls it; None: PyTorch's to do
//     PyObject* explain(Operator&, PyObject* const* args);       which way such a call takes, as a str
//     constexpr Py_ssize_t ARGUMENTS;                            how many both take, all by position
#pragma once

#include <Python.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <optional>
#include <string>

#include "table.h"
#include "tensors.h"

namespace {

// Of one package. Never destroyed: the dispatcher refers to it.
struct Operator {
    Table table;
    std::atomic<bool> gradients{false};  // whether calls that record gradients are served, too
    torch::Library definitions;
    std::string name;
    std::optional<c10::OperatorHandle> handle;

    Operator(const std::string& space, PyObject* resolve, PyObject* retire);

    // Runs a variant: done (CPU) or enqueued (CUDA) if true; nothing ran if false. One address an argument.
    template <class... Arguments>
    bool run(const Answer& answer, int device, std::uintptr_t addresses, Arguments... arguments) {
        if (answer.launch.on_cpu()) {
            reinterpret_cast<void (*)(Arguments...)>(answer.launch.function)(arguments...);
            return true;
        }
        const Driver* driver = Driver::get();
        if (!driver) return false;
        void* pointers[] = {&arguments...};
        const int error = driver->launch(answer.launch, device, addresses, pointers);
        if (error && !Driver::is_of_capture(error))
            table.retire(answer, device, "a launch failed: " + driver->name_of(error));
        return !error;
    }
};

extern const char* const SCHEMA;
void add_kernels(Operator&, torch::Library&);
PyObject* call(Operator&, PyObject* const*);
PyObject* explain(Operator&, PyObject* const*);

inline Operator::Operator(const std::string& space, PyObject* resolve, PyObject* retire)
    : table(resolve, retire), definitions(torch::Library::FRAGMENT, space, std::nullopt, __FILE__, __LINE__) {
    const std::string schema = SCHEMA;
    name = space + "::" + schema.substr(0, schema.find('('));
    definitions.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
    handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
    add_kernels(*this, definitions);
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

struct PyOperator {
    PyObject_HEAD
    Operator* op;
};

template <PyObject* (*FUNCTION)(Operator&, PyObject* const*), Py_ssize_t COUNT>
PyObject* checked(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    if (count != COUNT) {
        PyErr_Format(PyExc_TypeError, "%zd arguments are wanted, by position, not %zd", COUNT, count);
        return nullptr;
    }
    return FUNCTION(*reinterpret_cast<PyOperator*>(self)->op, args);
    END_HANDLE_TH_ERRORS
}

inline PyObject* clear(PyObject* self, PyObject*) {
    reinterpret_cast<PyOperator*>(self)->op->table.clear();
    Py_RETURN_NONE;
}

inline PyObject* after_fork(PyObject* self, PyObject*) {
    reinterpret_cast<PyOperator*>(self)->op->table.after_fork();
    Py_RETURN_NONE;
}

inline PyObject* has_driver(PyObject*, PyObject*) { return PyBool_FromLong(Driver::get() != nullptr); }

inline PyObject* serve_gradients(PyObject* self, PyObject* wanted) {
    const int truth = PyObject_IsTrue(wanted);
    if (truth < 0) return nullptr;
    reinterpret_cast<PyOperator*>(self)->op->gradients = truth;
    Py_RETURN_NONE;
}

// Called with the GIL. A namespace that is known keeps its operator, and asks the new caller from now on.
inline PyObject* attach_with(PyTypeObject* type, PyObject* args) {
    HANDLE_TH_ERRORS
    static std::map<std::string, Operator*> known;
    const char* space;
    PyObject *resolve, *retire;
    if (!PyArg_ParseTuple(args, "sOO", &space, &resolve, &retire)) return nullptr;
    Operator*& op = known[space];
    const bool is_new = !op;
    if (op)
        op->table.connect(resolve, retire), op->gradients = false;
    else
        op = new Operator(space, resolve, retire);
    PyOperator* object = PyObject_New(PyOperator, type);
    if (!object) return nullptr;
    object->op = op;
    return Py_BuildValue("(Ni)", object, static_cast<int>(is_new));
    END_HANDLE_TH_ERRORS
}

template <Py_ssize_t ARGUMENTS>
PyTypeObject* operator_type() {
    static PyMethodDef methods[] = {
        {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&checked<call, ARGUMENTS>)), METH_FASTCALL, nullptr},
        {"explain", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&checked<explain, ARGUMENTS>)), METH_FASTCALL, nullptr},
        {"clear", clear, METH_NOARGS, nullptr},
        {"after_fork", after_fork, METH_NOARGS, nullptr},
        {"serve_gradients", serve_gradients, METH_O, nullptr},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyType_Slot slots[] = {{Py_tp_methods, methods}, {0, nullptr}};
    static PyType_Spec spec = {"evo_native.Operator", sizeof(PyOperator), 0, Py_TPFLAGS_DEFAULT, slots};
    static PyTypeObject* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    return type;
}

}  // namespace

// attach(namespace, resolve, retire) -> (Operator, whether the namespace is new)
#define EVO_MODULE(ARGUMENTS)                                                                              \
    static PyObject* attach(PyObject*, PyObject* args) {                                                   \
        PyTypeObject* type = operator_type<ARGUMENTS>();                                              \
        return type ? attach_with(type, args) : nullptr;                                              \
    }                                                                                                      \
    PyMODINIT_FUNC PyInit_evo_native() {                                                                   \
        static PyMethodDef functions[] = {{"attach", attach, METH_VARARGS, nullptr},                       \
                                          {"has_driver", has_driver, METH_NOARGS, nullptr},                \
                                          {nullptr, nullptr, 0, nullptr}};                                 \
        static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "evo_native", nullptr, -1, functions,      \
                                         nullptr, nullptr, nullptr, nullptr};                              \
        return PyModule_Create(&definition);                                                               \
    }
