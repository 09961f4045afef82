"""Calls of a function by which its variants are judged, as the kernel itself has them: its cases, inputs and reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import cycle
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .expression import in_python, locals_of
from .package import Package
from .statement import Bound, Function
from .tolerance import as_outputs

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_ELEMENTS = 1 << 24
"""Largest number of elements that a tensor of a case may have."""


def bits_of(results: Tensor | Iterable[Tensor | None]) -> list[Tensor]:
    """The bits of results, which can be compared where these are NaN."""
    every = (results,) if isinstance(results, Tensor) else results
    return [t.contiguous().view(_BITS[t.element_size()]) for t in every if t is not None]


class Judge:
    """What the module of a function offers to trials, `check` and `bench`: see __init__.py. Problems of the kernel become
    calls of the function, and calls problems, by its statement."""

    def __init__(self, package: Package, bound: Bound, module: ModuleType) -> None:
        self._package, self._bound, self._module = package, bound, module
        self._kernel, self._function, self._parameters = bound.kernel, bound.function, bound.function.parameters
        self._problem_of = _evaluator(bound)

    # -- from a problem to a call -----------------------------------------------------------------------------------

    def timed(self, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
        """Arguments of a call of these sizes. Raises ValueError where no call has them."""
        workload = self._workload({**sizes, **self._function.timed}, dtype)
        args = self._call_of(workload, self._kernel.data[0], torch.Generator(device).manual_seed(seed))
        if args is None:
            raise ValueError(f"no call of {self._function.name} is the problem {workload.key}")
        return args

    def served_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes, changed into such as the kernel takes where they restrict each other."""
        repair = import_module(type(self._kernel).__module__.rpartition(".")[0] + ".repair")  # of the engine, or its copy
        compiled_in = {name for v in self._package.variants for name in v.fixed}
        workload = self._workload(sizes, getattr(torch, self._package.variants[0].dtype))
        found = repair.repaired(self._kernel, workload, pinned=compiled_in, about=())
        right = dict(sizes) if found is None else {**sizes, **dict(found.dims)}
        return {**right, **{name: eval(text, dict(right)) for name, text in self._function.served.items()}}

    def cases(
        self, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device, seed: int
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The kernel's own cases for a variant of these sizes, as far as calls of the function are such problems; some of
        them laid out otherwise in memory; and some that are left to PyTorch."""
        workload = self._workload(sizes, dtype)
        generator = torch.Generator(device).manual_seed(seed)
        layouts, usual = cycle(_LAYOUTS.items()), None
        for case in self._kernel.cases(device.type, workload):
            if case.far or max(self._elements(case.workload), default=0) > _MOST_ELEMENTS:
                continue
            args = self._call_of(case.workload, case.data, generator)
            if args is None:
                continue
            offset = case.offset if isinstance(case.offset, int) else case.offset[0]
            if offset:
                args = tuple(_shifted(arg, offset) for arg in args)
            yield case.name, args
            usual = usual or args
            name, arranged = next(layouts)
            other = arranged(args[0]) if usual is not args and case.data == self._kernel.data[0] else None
            if other is not None and self._same_problem(args, (other, *args[1:])):
                yield f"{case.name}, {name}", (other, *args[1:])

    def _elements(self, workload: Any) -> Iterator[int]:
        dims = dict(workload.dims)
        for a in self._kernel.arguments:
            if a.kind in ("input", "output") and a.shape:
                yield prod(dims.get(size, size) for size in a.shape)

    def _workload(self, sizes: Mapping[str, int], dtype: torch.dtype) -> Any:
        """The kernel's problem of these sizes, among which are the options that are compiled in."""
        kernel = self._kernel
        dims = {d.name: sizes[d.name] for d in kernel.dimensions}
        options = {
            n: v if n not in sizes else kernel.choices[n][sizes[n]] if n in kernel.choices else type(v)(sizes[n])
            for n, v in kernel.options.items()
        }
        like = next(w for found in kernel.workloads.values() for w in found)
        return type(like).of(dims, str(dtype).removeprefix("torch."), options)

    def _call_of(self, workload: Any, data: str, generator: torch.Generator) -> tuple[Any, ...] | None:
        """Arguments, by position, of a call that is this problem; None where none is."""
        if "+" in data:
            return None
        inputs = self._kernel.inputs(workload, data, generator)
        options = dict(workload.options)
        chosen = (a for a in self._kernel.arguments if a.dtype in options)
        dtypes = {a.dtype: getattr(torch, a.dtype_of(workload)) for a in chosen}
        problem = {**dict(workload.dims), **options, **dtypes}
        argument = {a: k for k, a in self._function.tensors.items()}
        found = []
        for name, parameter in self._parameters.items():
            if name in argument:
                found.append(inputs[argument[name]])
            elif name in self._function.call:
                found.append(eval(self._function.call[name], {"torch": torch, **problem}))  # the statement's own
            elif name in problem:
                found.append(problem[name])
            elif parameter.default is not None:
                found.append(eval(parameter.default, {"torch": torch}))
            else:
                raise ValueError(f"`call` of the function says nothing of argument {name!r}")
        args = tuple(found)
        sizes, found_options = self._problem_of(args)
        same = {**dict(workload.options), **found_options} == dict(workload.options) and sizes == dict(workload.dims)
        return args if same and self._asks_for_the_same(workload) else None

    def _asks_for_the_same(self, workload: Any) -> bool:
        """Whether the function has a result for each output that a problem asks for, but for what its backward takes, and an
        argument for each input."""
        wanted = {a.name for a in self._kernel.outputs(workload)} - {*self._function.saved}
        needed = {name for name in self._bound.results if not self._bound.is_optional(name)}
        given = {a.name for a in self._kernel.arguments if a.kind == "input" and a.optional and workload.option(a.name)}
        return needed <= wanted <= {*self._bound.results} and given <= {*self._function.tensors}

    def _same_problem(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        return bool(self._problem_of(one) == self._problem_of(other))

    def by_variant(self, loaded: Any) -> dict[Any, Any]:
        """A table for `served`, in which one variant serves every problem."""
        order = [d["name"] for d in self._package.dimensions]

        class Calls(dict[Any, Any]):
            def __missing__(self, key: tuple[Any, ...]) -> Any:
                sizes = dict(zip(order, map(int, key[2:]), strict=True))
                return self.setdefault(key, loaded.call(sizes, lambda *failed: None, ""))

        return Calls()

    def large_batch(
        self, batch: str, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device, seed: int
    ) -> tuple[int, tuple[Any, ...]]:
        """The size of a batch that is no other size of a problem and makes no tensor too large, and a call of it. batch: the
        dimension; sizes: of the problem. Raises ValueError as `timed` does."""
        others = {n: size for n, size in sizes.items() if n != batch}
        most = max(t.numel() for t in self.timed({**others, batch: 1}, dtype, device, seed) if isinstance(t, Tensor))
        few_enough = (n for n in (523, 67, 23, 5) if n * most <= _MOST_ELEMENTS >> 2 and n not in others.values())
        number = next(few_enough, 3)
        return number, self.timed({**others, batch: number}, dtype, device, seed)

    def same_in_any_batch(
        self, batch: str, loaded: Any, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> bool:
        """Whether parts of a batch have the same bits in other batches, as a variant computes them. batch: the dimension."""
        table = self.by_variant(loaded)
        number, args = self.large_batch(batch, sizes, dtype, device, 0)

        def bits(*args: Any) -> list[Tensor]:
            found = self._module.served(table, *args)
            if found is None:
                raise ValueError("a variant does not serve a problem like its own")
            return bits_of(found)

        def is_same(first: int, end: int, copied: bool) -> bool:
            parts = [
                (t[first:end].clone() if copied else t[first:end])
                if isinstance(t, Tensor) and t.ndim and len(t) == number else t for t in args
            ]  # fmt: skip
            return all(torch.equal(one[first:end], other) for one, other in zip(whole, bits(*parts), strict=True))

        with torch.no_grad():
            whole = bits(*args)
            parts = [(0, 1), (1, number), (number - 1, number), (1, max(2, number // 2))]
            return all(is_same(*part, copied) for part in parts for copied in (False, True))

    # -- from a call to what is right ---------------------------------------------------------------------------------

    def exact(self, *args: Any) -> Any:
        """The kernel's reference of float64 copies, for a call that is one of its problems; else PyTorch's own result."""
        if isinstance(self._module._choose(_Anything(), *args), str):
            own = self._module._original(*args)
            return own.double() if isinstance(own, Tensor) and own.is_floating_point() else own
        inputs, workload = self._problem(args)
        wide = {k: t.double() if t is not None and t.is_floating_point() else t for k, t in inputs.items()}
        found = self._results(self._kernel.reference(wide, workload), workload, args)
        return found[0] if len(found) == 1 else found

    def ties(self, *args: Any) -> dict[int, tuple[Tensor, int]]:
        """The elements and the axis of which any equal one will do, by the place of a result that holds positions."""
        stated = {a.name: a.ties for a in self._kernel.outputs() if a.ties is not None}
        if not stated or isinstance(self._module._choose(_Anything(), *args), str):
            return {}
        inputs: dict[str, Any] = self._problem(args)[0]
        places = {i: stated[name] for i, name in enumerate(self._bound.results) if name in stated}
        return {i: (inputs[name], axis) for i, (name, axis) in places.items()}

    def comparable(self, *args: Any) -> Any:
        """The result whose error ours may be twice: PyTorch's, or where it has no such function, the kernel's `same_dtype`.
        They are given aligned copies, since from other tensors some of PyTorch's own kernels compute wrong results."""
        args = tuple(t.clone() if isinstance(t, Tensor) and t.data_ptr() % 16 else t for t in args)
        own, same_dtype = self._module._original(*args), self._kernel.same_dtype
        if self._function.path or same_dtype is None or isinstance(self._module._choose(_Anything(), *args), str):
            return own
        inputs, workload = self._problem(args)
        found = self._results(same_dtype(inputs, workload), workload, args)
        every = own if isinstance(own, tuple) else (own,)
        made = tuple(like if t is None else t.to(like.dtype) for t, like in zip(found, every, strict=True))
        return made[0] if isinstance(own, Tensor) else made

    def _problem(self, args: tuple[Any, ...]) -> tuple[dict[str, Tensor | None], Any]:
        """The kernel's inputs and the workload of a call."""
        function, inputs = self._function, dict[str, Tensor | None]()
        given = dict(zip(self._parameters, args, strict=True))
        sizes, options = self._problem_of(args)
        for a in self._kernel.arguments:
            if a.kind == "input":
                t = given[function.tensors[a.name]] if a.name in function.tensors else None
                if t is not None and (whole := function.expanded.get(function.tensors[a.name])):
                    t = t.expand(self._value(whole, args))
                inputs[a.name] = t.reshape([sizes.get(n, n) for n in a.shape]) if t is not None and a.shape else t
        dtype = self._value(self._bound.problem_dtype, args)
        workload = self._workload(sizes, dtype)
        every = {**dict(workload.options), **options}
        return inputs, type(workload).of(sizes, workload.dtype, {n: every[n] for n in self._kernel.options})

    def _results(self, outputs: Any, workload: Any, args: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        """Outputs of the kernel in the form of the function's results; None for one that is not asked for or not made."""
        given, found = dict(zip(self._parameters, args, strict=True)), list[Tensor | None]()
        asked = self._kernel.outputs(workload)
        made, names = as_outputs(asked, outputs), {a.name for a in asked}
        for name, form in self._bound.results.items():
            shape = given[form].shape if form in self._function.given_tensors else self._value(form, args)
            found.append(made[name].reshape(shape) if name in names & made.keys() else None)
        return tuple(found)

    def _value(self, expression: str, args: tuple[Any, ...]) -> Any:
        return _compiled(self._function, {"value": expression})(*args)["value"]


class _Anything(dict[Any, Any]):
    """A table that has something for every problem."""

    def __missing__(self, key: object) -> int:
        return 0


def _evaluator(bound: Bound) -> Callable[[tuple[Any, ...]], tuple[dict[str, int], dict[str, Any]]]:
    """From arguments by position to dimensions and options."""
    function, fixed = bound.function, {n for names in bound.kernel.compile_time_dims.values() for n in names}
    choosing = {n: bound.size(n) for n in bound.kernel.choices if n in bound.options and n in fixed}
    sizes, options = _compiled(function, bound.sizes), _compiled(function, {**bound.options, **choosing})
    optional = {k: a for k, a in function.tensors.items() if function.parameters[a].optional}
    order = [*function.parameters]

    def found(args: tuple[Any, ...]) -> tuple[dict[str, int], dict[str, Any]]:
        there = {k: args[order.index(a)] is not None for k, a in optional.items()}
        of_call = {**there, **options(*args)}
        of_call |= {name: bound.kernel.choices[name][of_call[name]] for name in choosing}
        return sizes(*args), of_call

    return found


def _compiled(function: Function, texts: Mapping[str, str]) -> Callable[..., dict[str, Any]]:
    """A function of the arguments that gives the values of expressions, by name."""
    lines = [f"    {line}" for line in locals_of(texts.values())]
    made = ", ".join(f"{key!r}: {in_python(text)}" for key, text in texts.items())
    code = "\n".join([f"def found({', '.join(function.parameters)}):", *lines, f"    return {{{made}}}"])
    space: dict[str, Any] = {"torch": torch, "prod": prod}
    exec(code, space)
    result: Callable[..., dict[str, Any]] = space["found"]
    return result


def _shifted(value: Any, offset: int) -> Any:
    """A tensor with the same values, so many elements past an aligned address; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    memory = value.new_empty(value.numel() + offset)[offset:].view(value.shape)
    return memory.copy_(value)


def _leading_axes(t: Tensor) -> Tensor | None:
    first = t.shape[0] if t.ndim else 0
    return t.reshape(2, first // 2, *t.shape[1:]) if first > 2 and first % 2 == 0 else None


_LAYOUTS: Mapping[str, Callable[[Tensor], Tensor | None]] = {
    "transposed in memory": lambda t: t.mT.contiguous().mT if t.ndim > 1 else None,
    "every other element": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2] if t.ndim else None,
    "another leading axis": _leading_axes,
    "rows with gaps": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]] if t.ndim > 1 else None,
}
"""Tensors of the same elements, by how they lie in memory; None where one cannot lie so."""
