"""A frontend that is written by hand, in Python and C++, for a function that cannot be stated."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evo.export import find_exporter
from evo.problem.loading import template_root
from tests.export.exports import request_for
from tests.runtime.conftest import Importer

pytestmark = pytest.mark.slow

FRONTEND = """
import sys

import torch

from . import PACKAGE
from ._shared.rows import rows_of
from .runtime import Dispatch, Native, addresses

__all__ = ["also_serve", "build", "explain", "softmax"]
_call = None


def softmax(input):
    output = _call(input) if _call is not None else served(DISPATCH, input)
    return ORIGINAL(input) if output is None else output


def explain(input):
    if NATIVE.explain is not None:
        return NATIVE.explain(input)
    found = _choose(DISPATCH, input)
    return f"PyTorch: {found}" if isinstance(found, str) else f"{found.variant}{found.how}, Python launcher"


def ORIGINAL(input):
    return torch.nn.functional.softmax(input, -1)


def _choose(table, input):
    at = addresses(input)
    return at if isinstance(at, str) else table[-1, input.dtype, *rows_of(input)]


def served(table, input):
    found, output = _choose(table, input), torch.empty_like(input)
    return None if isinstance(found, str) or not found(*addresses(input), output.data_ptr(), *found.sizes) else output


def _use(native):
    global _call
    _call = native.call


SUBJECT = softmax
DISPATCH = Dispatch(PACKAGE, sys.modules[__name__])
NATIVE = Native(DISPATCH, "softmax", torch.empty_like, _use)
also_serve, build = DISPATCH.also_serve, NATIVE.build
"""
ROWS = "def rows_of(input):\n    return input.numel() // input.shape[-1], input.shape[-1]\n"
ROWS_H = "inline std::int64_t cols_of(const at::Tensor& t) { return t.size(-1); }\n"
NATIVE = """
#include <ATen/ops/empty_like.h>
#include <ATen/ops/softmax.h>

#include "runtime/native.h"
#include "_shared/rows.h"

namespace {

const char* const SCHEMA = "softmax(Tensor input) -> Tensor";
const Py_ssize_t ARGUMENTS = 1;

Problem problem_of(const at::Tensor& x) { return {-1, x.scalar_type(), {x.numel() / cols_of(x), cols_of(x)}}; }

void add_kernels(Operator& op, torch::Library& library) {
    const auto torchs = [](const at::Tensor& x) { return at::softmax(x, -1); };
    add_kernel(library, "softmax", torchs, {c10::DispatchKey::CompositeExplicitAutograd});
}

PyObject* call(Operator& op, PyObject* const* args) {
    const at::Tensor* x = plain_tensor(args[0]);
    if (!x || unfit({x})) Py_RETURN_NONE;
    const Problem problem = problem_of(*x);
    const Answer answer = op.table.find(problem);
    if (!answer.serves()) Py_RETURN_NONE;
    const at::Tensor y = at::empty_like(*x);
    const void* in = x->const_data_ptr();
    void* out = y.mutable_data_ptr();
    if (!op.table.run(answer, problem, in, out, problem.words[2], problem.words[3])) Py_RETURN_NONE;
    return THPVariable_Wrap(y);
}

PyObject* explain(Operator& op, PyObject* const* args) {
    const at::Tensor* x = plain_tensor(args[0]);
    return to_text(x && !unfit({x}) ? op.table.find(problem_of(*x)).in_words() : "PyTorch: no plain tensor");
}

}  // namespace
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export of softmax for CPUs, by a frontend of its own."""
    kernel, out = tmp_path / "softmax", tmp_path / "softmax_by_hand"
    shutil.copytree(template_root() / "softmax", kernel)
    (kernel / "function.py").unlink()
    (kernel / "_shared").mkdir()
    files = {"frontend.py": FRONTEND, "frontend.cpp": NATIVE, "_shared/rows.py": ROWS, "_shared/rows.h": ROWS_H}
    for name, text in files.items():
        (kernel / name).write_text(text)
    made = request_for("cpu", "native", out, "rows=64,cols=96,dtype=float32", kernel=str(kernel))
    find_exporter("module").export(replace(made, kernel=str(kernel)))
    assert files.keys() <= {p.relative_to(out).as_posix() for p in out.rglob("*")}
    return out


def test_both_launchers_serve_it(folder: Path, use: Importer, natively: Importer) -> None:
    x = torch.randn(5, 96)
    for importer, launcher in ((use, "Python"), (natively, "native")):
        module = importer(folder)
        assert module.explain(x).startswith("variant 0 ")
        assert module.explain(x).endswith("Python launcher") is (launcher == "Python")
        torch.testing.assert_close(module.softmax(x), torch.softmax(x, -1))
        assert module.explain(x.double()).startswith("PyTorch: nothing was tuned for float64")
        torch.testing.assert_close(module.softmax(x.double()), torch.softmax(x.double(), -1))


def test_what_keeps_its_launcher_from_being_built_is_said(folder: Path, use: Importer, cache: Path) -> None:
    source, module = folder / "frontend.cpp", use(folder)
    for name in ("frontend.cpp", "_shared/rows.h"):
        text = (folder / name).read_text()
        (folder / name).write_text(f"{text}// a line more\n")
        with pytest.raises(RuntimeError, match=f"cannot be built: {name} is not the file that was exported"):
            module.build()
        (folder / name).write_text(text)
    source.unlink()
    with pytest.raises(RuntimeError, match="this package has none"):
        module.build()
    assert not [*cache.glob("*.so"), *cache.glob("evo-build-*")]
