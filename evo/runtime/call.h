// Arguments of a call as native_code.py writes them: their types, how they are read from Python, and what expressions ask.
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/Dtype.h>

#include "native.h"

namespace {

using at::Tensor;
const char* const OVERRIDDEN = "a tensor subclass or a torch function mode (such as torch.set_default_device) is involved";
const char* const NO_PLAIN_TENSOR = "an argument is no plain tensor, but a tensor subclass or something else";

// Sizes that a call gives. They are kept here, as many as any tensor has in practice.
struct Ints {
    std::array<std::int64_t, 8> kept{};
    size_t count = 0;
    std::vector<c10::SymInt> symbols;  // in their place where a graph is made for any size, or there are more

    Ints() = default;
    Ints(c10::SymIntArrayRef given) {
        const auto known = c10::asIntArrayRefSlowOpt(given);
        if (known && known->size() <= kept.size()) count = known->size(), std::copy(known->begin(), known->end(), kept.begin());
        else symbols = given.vec();
    }
    operator c10::IntArrayRef() const { return {kept.data(), count}; }
    operator c10::SymIntArrayRef() const {
        return is_symbolic() ? c10::SymIntArrayRef(symbols) : c10::fromIntArrayRefSlow({kept.data(), count});
    }
    bool is_symbolic() const { return !symbols.empty(); }
};
inline bool is_symbolic(const Ints& value) { return value.is_symbolic(); }
inline bool is_symbolic(const std::optional<Ints>& value) { return value && value->is_symbolic(); }

inline bool read_as(PyObject* object, bool& found) {
    found = object == Py_True;
    return PyBool_Check(object);
}

inline bool read_as(PyObject* object, std::int64_t& found) {
    if (!PyLong_CheckExact(object)) return false;
    int beyond = 0;
    found = PyLong_AsLongLongAndOverflow(object, &beyond);
    return !beyond;
}

inline bool read_as(PyObject* object, double& found) {
    if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object)) return false;
    found = PyFloat_AsDouble(object);
    if (!PyErr_Occurred()) return true;
    PyErr_Clear();  // an int that is too large
    return false;
}

inline bool read_as(PyObject* object, c10::ScalarType& found) {
    if (!THPDtype_Check(object)) return false;
    found = reinterpret_cast<THPDtype*>(object)->scalar_type;
    return true;
}

// Equal is not enough: PyTorch refuses 64.0 for 64.
inline bool read_as(PyObject* object, Ints& found) {
    const bool is_list = PyList_CheckExact(object);
    if (!is_list && !PyTuple_Check(object)) return false;
    found.count = static_cast<size_t>(PySequence_Fast_GET_SIZE(object));
    if (found.count > found.kept.size()) return false;
    for (size_t i = 0; i < found.count; ++i)
        if (!read_as(PySequence_Fast_GET_ITEM(object, static_cast<Py_ssize_t>(i)), found.kept[i])) return false;
    return true;
}

template <size_t COUNT>
bool read_as(PyObject* object, std::array<bool, COUNT>& found) {
    if ((!PyList_CheckExact(object) && !PyTuple_Check(object)) || PySequence_Fast_GET_SIZE(object) != COUNT) return false;
    for (size_t i = 0; i < COUNT; ++i)
        if (!read_as(PySequence_Fast_GET_ITEM(object, static_cast<Py_ssize_t>(i)), found[i])) return false;
    return true;
}

template <class Value>
bool read_as(PyObject* object, std::optional<Value>& found) {
    Value value{};
    if (!read_as(object, value)) return false;
    found = value;
    return true;
}

inline const Tensor* pointer(const std::optional<Tensor>& tensor) { return tensor && tensor->defined() ? &*tensor : nullptr; }
inline const Tensor* present(const Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; }
inline std::optional<Tensor> optional(const Tensor* tensor) { return tensor ? std::optional<Tensor>(*tensor) : std::nullopt; }
inline const void* address_of(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
inline void* memory_of(const Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

// An expression has no value: Python would raise an exception.
struct NoValue : std::exception {
    const char* what() const noexcept override { return "an expression of a function's statement has no value"; }
};

// What is asked of an argument that may be None.
inline const Tensor& there(const Tensor* tensor) { return tensor ? *tensor : throw NoValue(); }
template <class Value>
const Value& there(const std::optional<Value>& value) {
    return value ? *value : throw NoValue();
}
inline c10::IntArrayRef sizes_of(const Tensor* tensor) { return tensor ? tensor->sizes() : c10::IntArrayRef(); }
inline c10::IntArrayRef strides_of(const Tensor* tensor) { return tensor ? tensor->strides() : c10::IntArrayRef(); }
inline std::int64_t dim_of(const Tensor* tensor) { return tensor ? tensor->dim() : 0; }

// Of sizes or strides, as Python counts: from the end where `index` is negative.
inline std::int64_t item_of(c10::IntArrayRef all, std::int64_t index) {
    const auto count = static_cast<std::int64_t>(all.size());
    if (index < -count || index >= count) throw NoValue();
    return all[static_cast<size_t>(index < 0 ? index + count : index)];
}

// As Python's % and //, whose results have the sign of `b`, or are rounded down.
template <class Number>
Number floor_modulo(Number a, Number b) {
    if (b == 0) throw NoValue();
    if constexpr (std::is_integral_v<Number>) {
        const Number rest = b == -1 ? 0 : a % b;
        return rest && (rest < 0) != (b < 0) ? rest + b : rest;
    } else {
        const Number rest = std::fmod(a, b);
        return rest ? (rest < 0) != (b < 0) ? rest + b : rest : std::copysign(Number(0), b);
    }
}
template <class Number>
Number floor_divide(Number a, Number b) {
    const Number whole = a - floor_modulo(a, b);
    if constexpr (std::is_integral_v<Number>) return whole / b;
    else return whole / b ? std::round(whole / b) : std::copysign(Number(0), a / b);
}

// Strides of a tensor that is expanded, 0 where it is broadcast; zeros where there is none.
template <size_t AXES>
std::array<std::int64_t, AXES> expanded_strides(const Tensor* tensor, const std::array<std::int64_t, AXES>& whole) {
    std::array<std::int64_t, AXES> found{};
    if (!tensor) return found;
    const auto geometry = at::inferExpandGeometry_dimvector(tensor->sizes(), tensor->strides(), whole);
    std::copy(geometry.strides.begin(), geometry.strides.end(), found.begin());
    return found;
}

inline c10::IntArrayRef part_of(c10::IntArrayRef all, std::optional<std::int64_t> from, std::optional<std::int64_t> to) {
    const auto count = static_cast<std::int64_t>(all.size());
    const auto place = [count](std::int64_t n) { return std::min(std::max<std::int64_t>(n < 0 ? n + count : n, 0), count); };
    const std::int64_t first = place(from.value_or(0)), last = place(to.value_or(count));
    return all.slice(static_cast<size_t>(first), static_cast<size_t>(std::max(last - first, std::int64_t(0))));
}

}  // namespace
