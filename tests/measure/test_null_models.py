"""A gate that a kernel without any idea of the problem could pass would be worth nothing: for every kernel there is."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch

from evo.measure.gate import Gate
from evo.problem.kernel import Case, Kernel, Tensors, Workload
from evo.problem.loading import kernel_names, load_kernel
from evo.runtime.tolerance import Expected, compare
from evo.targets import find_target

_MOST_ELEMENTS = 1 << 20
"""Larger cases are left out: they are there for launch geometry."""

PROBLEMS = [
    pytest.param(name, target, dtype, id=f"{name}-{target}-{dtype}")
    for name in kernel_names()
    for target, dtypes in load_kernel(name).dtypes.items()
    for dtype in dtypes
]


def zeros(inputs: Tensors, expected: Expected) -> torch.Tensor:
    return torch.zeros_like(expected.reference)


def mean(inputs: Tensors, expected: Expected) -> torch.Tensor:
    finite = expected.reference[expected.finite]
    return torch.full_like(expected.reference, float(finite.mean()) if finite.numel() else 0.0)


def shuffled(inputs: Tensors, expected: Expected) -> torch.Tensor:
    order = torch.randperm(expected.reference.numel(), generator=torch.Generator().manual_seed(1))
    return expected.reference.flatten()[order].view(expected.reference.shape)


def an_input(inputs: Tensors, expected: Expected) -> torch.Tensor | None:
    same = (t for t in inputs.values() if t is not None and t.shape == expected.reference.shape)
    return next(same, None)


NULL_MODELS = (zeros, mean, shuffled, an_input)


class _Problem:
    """The cases of a kernel for a small workload, with data and references on the CPU."""

    def __init__(self, name: str, target: str, dtype: str) -> None:
        self.kernel: Kernel = load_kernel(name)
        example = self.kernel.example(target)
        dims = {n: min(size, 256) for n, size in example.dims}
        workload = Workload.of(dims, dtype, dict(example.options))
        self.dtype = getattr(torch, dtype)
        self.gate = Gate(self.kernel, target, find_target("cpu").open(), seed=3)
        self.cases = [c for c in self.kernel.cases(target, workload) if self._size(c) <= _MOST_ELEMENTS]
        self.main = self.kernel.cases(target, workload)[0]

    def _size(self, case: Case) -> int:
        """Elements of its largest output."""
        outputs = self.kernel.outputs(case.workload)
        return max(prod(case.workload.dim(name) for name in output.shape) for output in outputs)

    def reasons(self, model: Callable[[Tensors, Expected], torch.Tensor | None], case: Case) -> list[str] | None:
        """Why each output that the model has something for is refused, "" if it is not; None if it has for none."""
        prepared = self.gate.prepare(case)
        outputs = [(e, model(prepared.trials[0].inputs, e)) for e in prepared.trials[0].expected]
        return [compare(o.to(self._dtype_of(e)), e)[1] for e, o in outputs if o is not None] or None

    def _dtype_of(self, expected: Expected) -> torch.dtype:
        argument = next(a for a in self.kernel.arguments if a.name == expected.name)
        dtype: torch.dtype = getattr(torch, argument.dtype_of(self.main.workload))
        return dtype


@pytest.mark.parametrize(("name", "target", "dtype"), PROBLEMS)
def test_cases_refuse_every_null_model_and_none_refuses_the_reference(name: str, target: str, dtype: str) -> None:
    """The main case always does. Not all others: the mean of a single element is right, and rows without variance are
    their bias."""
    tried = _Problem(name, target, dtype)
    assert tried.main in tried.cases
    for model in NULL_MODELS:
        reasons = tried.reasons(model, tried.main)
        assert reasons is None or all(reasons), model.__name__
        verdicts = [reasons for case in tried.cases if (reasons := tried.reasons(model, case)) is not None]
        refused = sum(all(reasons) for reasons in verdicts)
        assert 2 * refused >= len(verdicts), f"{model.__name__}: {refused} of {len(verdicts)}"
    for case in tried.cases:
        assert not any(tried.reasons(lambda inputs, e: e.reference, case) or [""]), case.name
