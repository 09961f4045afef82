"""Expressions of a statement: each means in C++ what it means in Python, or is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evo.problem.function import Function
from evo.problem.kernel import Argument
from evo.runtime import native
from evo.runtime.expression import CodeError, in_cpp, in_python, locals_of
from evo.runtime.function import _CONSTANTS
from evo.runtime.native_code import native_code
from evo.runtime.statement import Bound

FUNCTION = Function(
    signature=(
        "f(Tensor x, Tensor? w, float scale, int n, int? dim, float? eps, int[] shape, ScalarType? dtype,"
        " bool flag, bool? maybe, bool[2] wanted) -> Tensor"
    ),
    original="torch.add",
    tensors={"x": "x"},
    sizes={"count": "x.numel()"},
    fits={'it is not "right" \\ é': "flag or not flag"},
)
X = torch.arange(24.0).view(2, 3, 4)
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (X, None, 0.25, -7, None, None, (3, 4), None, True, None, (True, False)),
    (X.mT, torch.ones(4), 2.5, 7, -1, 1e-3, (2, 4, 3), torch.float32, False, True, (False, True)),
    (torch.tensor(1.0), torch.ones(2, 2), -1.5, 0, 0, 0.0, (), torch.float64, False, False, (True, True)),
)
EXPRESSIONS = (
    # Numbers of several types.
    "max(scale, 1e-6)", "min(scale, n)", "max(n, 2, scale)", "min(n, 3, 5)", "max(flag, n)", "scale if flag else n",
    "n if n else 5", "-scale * 2 + n", "-n", "-flag + n", "n * 1.5", "1e400", "-1e400 < scale", "1e-5", "flag + flag",
    # Division rounds down, and the rest has the divisor's sign.
    "n // 2", "n % 2", "n // -2", "n % -2", "scale // 0.4", "scale % 0.4", "scale // -0.4", "scale % -0.4",
    "n // 0.5", "n % 0.3", "2 // n", "2 % n", "2.0 // n", "dim % x.ndim", "-1 % x.ndim",
    "9223372036854775807 // -1", "-scale // n",
    # What may be None.
    "dim == -1", "dim != -1", "-1 == dim", "dim in (-1, x.ndim - 1)", "dim not in (-1, 0)", "eps == 0",
    "dim == n", "eps == dim", "dtype == x.dtype", "dtype != torch.float64", "w.shape != shape", "dim < 0",
    "dim + 1", "0.0 if eps is None else eps", "dim is None", "dim is not None and dim < 0", "w is None", "n is None",
    "flag is not None", "not dim", "maybe and flag", "flag or maybe", "not maybe", "1 if maybe else 2", "1 if dim else 2",
    "w.ndim", "w.shape == (4,)", "w.dtype == torch.float32", "w.numel()", "w.stride(0)",
    # Sizes.
    "x.shape[-1]", "x.shape[2]", "x.shape[-len(shape):] == shape", "x.shape[:-1]", "x.shape[5:]", "x.shape == (2, 3, 4)",
    "(1, n)", "shape if flag else (n, 2)", "(n, 2) if flag else (n, 2, 3)", "x.shape[1:] == shape != (2,)", "prod(x.shape)",
    "prod(())", "len((1, n))", "(5, 6)[1]", "x.stride(-1)", "x.shape[n]", "expands(shape, (1, 3, 4))",
    # Conditions.
    "not n", "not scale", "not flag", "0 < n < 10", "0 < n > scale", "n == 7 == dim", "flag and wanted[0]", "wanted[-1]",
    "n in (7, 0.25)", "n not in ()", "scale != scale", "x.is_contiguous()", "x.data_ptr() % 16 == 0", "x.data_ptr() - n > 0",
    "x.is_cuda", "since(1, 2)", "backend('math')", "flag == 1", "len(wanted)",
)  # fmt: skip
REFUSED = (
    "eps or 1e-5", "n and flag", "flag is True", "dtype is torch.float32", "x == w", "not x",
    "not x.shape", "x.shape < shape", "x.shape == 3", "dtype == 3", "x.shape + shape", "x.shape[::2]", "wanted[n]",
    "wanted[2]", "max(shape)", "max(n)", "prod(n)", "len(x)", "backend('fast')", "since(2.7)", "x.numel(1)", "x.stride()",
    "max(n, key=n)", "n if flag else shape", "None",
    "(n, 0.5)", "n == None", "x.is_contiguous(n)", "9223372036854775808", "n in shape", "+n", "~n", "n ** 2",
    "n / 2", "len()", "(1, *shape)", "dtype < dtype", "x.len(shape)", "numel()", "torch", "x", "not dtype",
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_would_mean_something_else_or_nothing_is_refused(text: str) -> None:
    with pytest.raises(CodeError):
        in_cpp(text, FUNCTION.parameters, "int", "int[]", "float", "bool", "ScalarType")


def test_sizes_that_may_be_none_equal_no_others_then() -> None:
    parameters = Function(
        signature="f(Tensor x, int[]? sizes) -> Tensor", original="torch.add", tensors={"x": "x"}, sizes={"n": "x.numel()"}
    ).parameters
    code = "(a.sizes_ && (*a.x_).sizes() == c10::IntArrayRef(there(a.sizes_)))"
    assert in_cpp("x.shape == sizes", parameters) == code
    assert in_cpp("x.shape != sizes", parameters) == f"!{code}"


def _in_python(text: str, args: tuple[Any, ...]) -> Any:
    """The value, or None where there is none."""
    space = {"torch": torch, **_CONSTANTS, **dict(zip(FUNCTION.parameters, args, strict=True))}
    try:
        exec("\n".join(locals_of([text])), space)
        return eval(in_python(text), space)
    except (ArithmeticError, AttributeError, IndexError, TypeError):
        return None


_PROBE = """
namespace {
PyObject* shown(bool value) { return PyBool_FromLong(value); }
PyObject* shown(int value) { return PyLong_FromLongLong(value); }
PyObject* shown(std::int64_t value) { return PyLong_FromLongLong(value); }
PyObject* shown(double value) { return PyFloat_FromDouble(value); }
PyObject* shown(c10::IntArrayRef value) {
    PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(value.size()));
    for (size_t i = 0; i < value.size(); ++i) PyTuple_SET_ITEM(found, i, PyLong_FromLongLong(value[i]));
    return found;
}
template <size_t COUNT> PyObject* shown(const std::array<std::int64_t, COUNT>& value) {
    return shown(c10::IntArrayRef(value));
}
template <class Function> PyObject* shown_or_none(Function function) {
    try { return function(); } catch (const NoValue&) { Py_RETURN_NONE; }
}
}
extern "C" __attribute__((visibility("default"))) PyObject* values(PyObject* args) {
    Arguments a;
    if (const char* reason = read(PySequence_Fast_ITEMS(args), a)) return PyUnicode_FromString(reason);
    PyObject* found = PyList_New(0);
    %s
    return found;
}
"""


@pytest.fixture(scope="module")
def in_cpp_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[Any, ...]], list[Any]]:
    """The values of all EXPRESSIONS in C++."""
    arguments = [Argument(name=n, kind=k, shape=("count",)) for n, k in (("x", "input"), ("y", "output"))]
    nothing = {"choices": {}, "options": {}, "dimensions": [], "compile_time_dims": {}}
    kernel = SimpleNamespace(arguments=arguments, parameters=arguments, **nothing)
    code = native_code(Bound(FUNCTION, kernel), SimpleNamespace(dimensions=[{"name": "count"}]))  # type: ignore[arg-type]
    shown = (f"shown_or_none([&] {{ return shown({in_cpp(text, FUNCTION.parameters)}); }})" for text in EXPRESSIONS)
    code += _PROBE % "\n    ".join(f"PyList_Append(found, {text});" for text in shown)
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    native._build(library, code, [Path(native.__file__).parent])
    values = ctypes.PyDLL(str(library)).values
    values.argtypes, values.restype = [ctypes.py_object], ctypes.py_object
    return lambda args: values(args)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ARGUMENTS)))
def test_an_expression_has_the_same_value_in_both_launchers(
    in_cpp_of: Callable[[tuple[Any, ...]], list[Any]], number: int
) -> None:
    args = ARGUMENTS[number]
    theirs, wrong = in_cpp_of(args), []
    assert len(theirs) == len(EXPRESSIONS)
    for text, value in zip(EXPRESSIONS, theirs, strict=True):
        right = _in_python(f"not not ({text})" if text in _CONDITIONS else text, args)
        right = tuple(right) if isinstance(right, torch.Size) else right
        if value != right and not (isinstance(value, float) and isnan(value) and isnan(right)):
            wrong.append((text, right, value))
    assert wrong == []


_CONDITIONS = ("maybe and flag", "flag or maybe")
"""Of what may be None, whose value is a bool in C++."""
