"""A kernel with two templates for one target, each with its own space, and the function that PyTorch code calls: y = 2 x."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_two_templates"]

_KERNEL = '''
from evo.problem.kernel import Argument, Kernel, LaunchPlan
from evo.problem.space import Categorical, Constraint, Ordinal, Space, When

SIMPLE = Space(parameters=(Ordinal(name="unroll", values=(1, 2, 4), why="fewer branches"),), default={"unroll": 2})
OTHER = Space(
    parameters=(
        Ordinal(name="unroll", values=(4, 8), why="fewer branches"),
        Categorical(name="split", values=(False, True), why="two halves", structural=True),
        Ordinal(name="chunk", values=(64, 256), why="a block at a time", when=(When(parameter="split", values=(True,)),)),
    ),
    constraints=(
        Constraint(name="small", holds=lambda p: p["unroll"] < 8 or not p.get("split"), reason="both are too much"),
    ),
    default={"unroll": 8, "split": False, "chunk": 256},
    initial_points=({"unroll": 4, "split": True, "chunk": 64},),
)


def space(target, workload, limits):
    return {"simple": SIMPLE, "other": OTHER}


def plan(target, point, workload):
    return LaunchPlan(threads=1)


KERNEL = Kernel(
    name="doubled",
    dtypes={TARGET: ("float32",)},
    arguments=(Argument(name="x", kind="input", shape=("n",)), Argument(name="y", kind="output", shape=("n",))),
    reference=lambda inputs, workload: {"y": 2 * inputs["x"]},
    workloads={TARGET: ("n=4096,dtype=float32",)},
    space=space,
    plan=plan,
    inactive={TARGET: {"chunk": 0}},
)
'''
_FUNCTION = '''
import torch
from evo.problem.function import Function


def doubled(x):
    return torch.add(x, x)


FUNCTION = Function(
    signature="doubled(Tensor x) -> Tensor",
    original=doubled,
    tensors={"x": "x"},
    sizes={"n": "x.numel()"},
)
'''
_SIMPLE = r"""
extern "C" void doubled(const float* x, float* y, long long n) {
#pragma GCC unroll {{ p.unroll }}
    for (long long i = 0; i < n; ++i) y[i] = 2 * x[i];
}
"""
_OTHER = r"""
extern "C" void doubled(const float* x, float* y, long long n) {
{% if p.split %}
    for (long long first = 0; first < n; first += {{ p.chunk }})
        for (long long i = first; i < n && i < first + {{ p.chunk }}; ++i) y[i] = x[i] + x[i];
{% else %}
#pragma GCC unroll {{ p.unroll }}
    for (long long i = 0; i < n; ++i) y[i] = x[i] * 2;
{% endif %}
}
"""


def write_two_templates(folder: Path, *, target: str = "cpu", suffix: str = "cpp") -> Path:
    """suffix: of the second template, in whose language it is."""
    folder.mkdir(parents=True)
    (folder / "kernel.py").write_text(_KERNEL.replace("TARGET", repr(target)))
    (folder / "function.py").write_text(_FUNCTION)
    (folder / f"{target}.simple.cpp.j2").write_text(_SIMPLE)
    (folder / f"{target}.other.{suffix}.j2").write_text(_OTHER)
    return folder
