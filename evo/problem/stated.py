"""Calls of functions that a kernel.py states: a mistake in one is reported as its author's, with its place."""

from __future__ import annotations

import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo.errors import EvoError, KernelError
from evo.problem.repair import legal_cases
from evo.problem.space import Space
from evo.runtime.manifest import OPERATIONS, quantity

if TYPE_CHECKING:
    from evo.problem.kernel import Argument, Kernel

_DEVICE = ("out of memory", "not enough memory", "CUDA error", "cudaError")
"""Words of a PyTorch error that no author of a kernel is to blame for."""
_HERE = str(Path(__file__).parent)
"""Calls from here are no part of what an author has written."""

_KINDS = ("input", "output", "scalar", "workspace", "structure")
_FIELD_CODES = "PqQiIfdx0123456789 "
_MOST_STRUCTURE_BYTES = 4096
"""All parameters of a CUDA kernel together, before CUDA 12.1."""


def _wrong_ties(kernel: Kernel, output: Argument, name: str, axis: int) -> str:
    """What is wrong with the `ties` of an argument; empty if nothing is."""
    from evo.problem.kernel import INTEGER_BYTES  # which imports this module

    if output.kind != "output" or output.dtype not in INTEGER_BYTES:
        return "is for outputs of integers alone, such as int64"
    shapes = [a.shape for a in kernel.arguments if a.name == name and a.kind == "input" and not a.optional]
    if not shapes or not -len(shapes[0]) <= axis < len(shapes[0]):
        return f"is {(name, axis)}: name an input that is always there, and an axis of its `shape`"
    shape, place = shapes[0], axis % len(shapes[0])
    without = (*shape[:place], *shape[place + 1 :])
    if output.shape == without or (*output.shape[:place], *output.shape[place + 1 :]) == without:
        return ""
    return f"does not fit its shape {output.shape}: that of {name!r}, {shape}, without axis {axis} or with another there"


def _wrong_initial(kernel: Kernel, output: Argument) -> str:
    """What is wrong with the `initial` of an argument; empty if nothing is."""
    if output.kind != "output":
        return "is for outputs alone"
    found = next((a for a in kernel.arguments if a.name == output.initial and a.kind == "input"), None)
    if output.initial == "zeros":
        return ""
    if found is None:
        return f"is {output.initial!r}: write 'zeros', or name an input"
    if (found.shape, found.dtype, found.optional) != (output.shape, output.dtype, output.optional):
        return f"is the input {found.name!r}, whose shape, dtype or `optional` is another"
    return "" if sum(a.initial == found.name for a in kernel.arguments) == 1 else f"is {found.name!r}, as is another's"


def faults_of_arguments(kernel: Kernel) -> Iterator[str]:
    """What is wrong with the arguments as a whole, their kinds, and what their shapes are made of."""
    names = [a.name for a in kernel.arguments]
    for a in kernel.arguments:
        if a.kind not in _KINDS:
            yield f": argument {a.name!r} is of kind {a.kind!r}; there are {', '.join(_KINDS)}"
        if names.count(a.name) > 1:
            yield f": two arguments are called {a.name!r}; give each a name of its own"
        if isinstance(a.shape, str):
            yield f": the shape of argument {a.name!r} is a text; write ({a.shape!r},)"
        for size in (s for s in a.shape if not isinstance(s, str) and (type(s) is not int or s < 1)):
            yield f": the shape of argument {a.name!r} has {size!r}, which is neither a dimension nor a number from 1 on"
    if not kernel.outputs():
        yield ": no argument is an output; give what it computes an Argument of kind 'output'"
    known = {d.name for d in kernel.dimensions} | set(kernel.options)
    for a in kernel.arguments:
        yield from _faults_of_argument(kernel, a, known)


def _faults_of_argument(kernel: Kernel, a: Argument, names: set[str]) -> Iterator[str]:
    """What is wrong with one argument. names: of dimensions and options."""
    from evo.problem.kernel import ELEMENT_BYTES, SAME  # which imports this module

    tensors = {other.name for other in kernel.arguments if other.kind in ("input", "output")}
    yield from _faults_of_structure(kernel, a)
    if a.stride_of is not None and a.stride_of[0] not in tensors:
        yield f": scalar argument {a.name!r} is a stride of {a.stride_of[0]!r}, which is no tensor argument"
    if a.stride_of is not None and a.dtype != "int64":
        yield f": scalar argument {a.name!r} is of {a.dtype}, but a stride may be 2^31 or more; give it dtype int64"
    if a.kind == "scalar" and a.stride_of is None and a.name not in names:
        yield f": scalar argument {a.name!r} is neither a dimension nor an option"
    if a.kind == "output" and a.optional and a.name not in kernel.options:
        yield f": no option {a.name!r} asks for the optional output of that name"
    if a.kind in ("input", "output") and a.dtype not in ("problem", "opmath", *ELEMENT_BYTES, *kernel.choices):
        known = ", ".join(("problem", "opmath", *ELEMENT_BYTES))
        yield f": {a.kind} {a.name!r} is of dtype {a.dtype!r}, which is none of {known}, and no option in `choices`"
    for text in {*kernel.choices.get(a.dtype, ())} - {*ELEMENT_BYTES, SAME}:
        yield f": option {a.dtype!r} is the dtype of {a.name!r}, and {text!r} is none"
    if a.dtype in kernel.choices and (a.kind not in ("input", "output") or a.ties):
        yield f": {a.kind} {a.name!r} cannot have a dtype that an option chooses"
    for target in kernel.dtypes if a.dtype in kernel.choices else ():
        if a.dtype not in kernel.compile_time_dims[target]:
            yield f": option {a.dtype!r} is the dtype of {a.name!r}; add it to `compile_time_dims` of {target!r}"
    if a.ties is not None and (fault := _wrong_ties(kernel, a, *a.ties)):
        yield f": `ties` of argument {a.name!r} {fault}"
    if a.initial and (fault := _wrong_initial(kernel, a)):
        yield f": `initial` of argument {a.name!r} {fault}"
    if (a.kind == "workspace") != (a.size is not None) or (a.kind == "workspace") < a.zeroed:
        yield f": argument {a.name!r}: every workspace, and nothing else, has a `size`, and may be `zeroed`"
    if a.kind == "workspace" and a.dtype not in ELEMENT_BYTES:
        yield f": workspace {a.name!r} has no fixed dtype such as float32 or int32, but {a.dtype!r}"
    for unknown in {s for s in a.shape if isinstance(s, str)} - names:
        how = "" if unknown.isidentifier() else ": a shape has names and numbers; write a product as several axes"
        yield f": argument {a.name!r} has an unknown dimension {unknown!r}{how}"


def _faults_of_structure(kernel: Kernel, a: Argument) -> Iterator[str]:
    """What is wrong with the parts of a structure in an argument."""
    if not all((a.layout, a.fields)) if a.kind == "structure" else any((a.layout, a.fields)):
        yield f": argument {a.name!r}: every structure, and nothing else, has a `layout` and `fields`"
    elif a.kind == "structure":
        try:
            size = struct.calcsize(a.layout)
            count = len(struct.unpack(a.layout, bytes(size)))
        except struct.error as error:
            yield f": structure {a.name!r} has the layout {a.layout!r}, which is none ({error})"
            return
        if count != len(a.fields) or set(a.layout) - set(_FIELD_CODES) or size > _MOST_STRUCTURE_BYTES:
            yield (
                f": structure {a.name!r} has {len(a.fields)} fields in {size} bytes, and its layout {a.layout!r} is for"
                f" {count}: a layout is of P, q, Q, i, I, f, d and padding x, at most {_MOST_STRUCTURE_BYTES} bytes"
            )
        if a.alignment not in (1 << n for n in range(9)):
            yield f": structure {a.name!r} has alignment {a.alignment}, which is no power of two up to 256"
        known = {b.name for b in kernel.arguments if b.kind != "structure"} | {d.name for d in kernel.dimensions}
        known |= {name for name, value in kernel.options.items() if not isinstance(value, str)}
        if unknown := set(a.fields) - known:
            yield f": structure {a.name!r} has a field {min(unknown)!r}, which is no argument, dimension or option"


def check_statement(kernel: Kernel) -> None:
    """Has each function of a kernel raise KernelError for what its author has got wrong: where it raises, or returns what
    it must not."""
    for what, wrong in _WRONG.items():
        if (stated := getattr(kernel, what)) is not None:
            kernel.stand_in(what, _checked(kernel, f"`{what}`", stated, wrong))


def call_stated(kernel: Kernel, what: str, function: Callable[..., Any], *given: Any) -> Any:
    """The result of a kernel's function. Raises KernelError in place of the function's exceptions."""
    try:
        return function(*given)
    except (EvoError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if any(said in str(error) for said in _DEVICE):
            raise
        raise told(kernel.folder, f"{what} raises", error) from error


def told(folder: Path, what: str, error: BaseException) -> KernelError:
    """The error for what the code in a kernel's folder has raised, with where it was, and the way there if it has
    steps."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if not f.filename.startswith(("<", _HERE))]
    own = [f for f in frames if _is_own(Path(f.filename), folder)] or frames[-1:]
    where = f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else folder / "kernel.py"
    if isinstance(error, SyntaxError) and error.filename:
        where = error.filename
    raised = f"{type(error).__name__}: {error}".rstrip(": ")
    way = () if [f.name for f in own] == ["<module>"] else traceback.format_list(own)
    return KernelError("".join((f"{where}: {what} {raised}\n", *way)).rstrip())


def _is_own(path: Path, folder: Path) -> bool:
    """Whether a file belongs to the kernel. Kernels of a family share files in folders beside them whose names begin with an
    underscore."""
    return path.is_relative_to(folder) or (path.parent.parent == folder.parent and path.parent.name.startswith("_"))


def mistake(kernel: Kernel, what: str, function: object, fault: str) -> KernelError:
    """The error for a function of a kernel that returns what it must not."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    code = getattr(function, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}" if code else str(kernel.folder / "kernel.py")
    return KernelError(f"{where}: {what} {fault}")


def _checked(kernel: Kernel, what: str, stated: Callable[..., Any], wrong: Callable[..., str]) -> Callable[..., Any]:
    @wraps(stated)
    def checked(*given: Any) -> Any:
        found = call_stated(kernel, what, stated, *given)
        if isinstance(found, Iterator):
            found = list(found)
        if fault := wrong(kernel, found, *given):
            raise mistake(kernel, what, stated, fault)
        if what == "`cases`":
            target, workload = given
            return legal_cases(kernel, target, workload, found)
        return found

    return checked


def _sequence_of(kind: str, *, some: bool) -> Callable[..., str]:
    def wrong(kernel: Kernel, found: Any, *given: Any) -> str:
        if not isinstance(found, Sequence) or isinstance(found, str) or any(type(x).__name__ != kind for x in found):
            return f"must return a sequence of {kind}s, and returns {_shown(found)}"
        return f"returns no {kind}" if some and not found else ""

    return wrong


def _wrong_inputs(kernel: Kernel, found: Any, workload: Any, *given: Any) -> str:
    if not isinstance(found, Mapping):
        return f"must return a mapping of input tensors by name, and returns {_shown(found)}"
    for a in (a for a in kernel.arguments if a.kind == "input"):
        tensor = found.get(a.name)
        if fault := _wrong_tensor(a, tensor, workload):
            return fault
        # One of the workload's dtype may be another, such as a mask of bool, for which an option may stand.
        if a.dtype != "problem" and tensor is not None and str(tensor.dtype) != (stated := f"torch.{a.dtype_of(workload)}"):
            return f"returns {a.name!r} as {tensor.dtype} for {workload.key}, where {stated} is stated"
    return ""


def wrong_outputs(kernel: Kernel, found: Mapping[str, Any], workload: Any, *, complete: bool) -> str:
    """Fault of outputs by name; empty if there is none. Some may be missing, unless `complete`."""
    for a in kernel.outputs(workload):
        if complete and found and a.name not in found:
            return f"returns {', '.join(map(repr, found))}, and no {a.name!r}"
        if complete or a.name in found:
            tensor = found.get(a.name)
            if fault := _wrong_tensor(a, tensor, workload) or _wrong_dtype(a, tensor, workload):
                return fault
    return "" if found else "returns no output"


def _wrong_dtype(output: Any, tensor: Any, workload: Any) -> str:
    """Floating-point results may be of another precision than is stated, integers of another size, if they fit."""
    import torch

    stated, given = getattr(torch, output.dtype_of(workload)), tensor.dtype
    name, returned = f"{stated}".removeprefix("torch."), f"{given}".removeprefix("torch.")
    if given.is_complex or given.is_floating_point != stated.is_floating_point:
        other = "problem" if given.is_floating_point or given.is_complex else returned
        where = f"returns {output.name!r} as {returned} for {workload.key}, where {name} is stated"
        return f"{where}: state dtype={other!r} for it, or convert it, as by .to({stated})"
    if stated.is_floating_point or given in (stated, torch.bool) or not tensor.numel():
        return ""
    low, high = (0, 1) if stated is torch.bool else (torch.iinfo(stated).min, torch.iinfo(stated).max)
    whole = tensor.long()
    beyond = [n for n in map(int, (whole.min(), whole.max())) if not low <= n <= high]
    return f"returns {beyond[0]} in {output.name!r} for {workload.key}, which no {name} is, as is stated" if beyond else ""


def _wrong_tensor(argument: Any, tensor: Any, workload: Any) -> str:
    if tensor is None and argument.optional and argument.kind == "input":
        return ""
    if not hasattr(tensor, "stride"):
        return f"returns no tensor for {argument.name!r}, but {_shown(tensor)}"
    shape = [workload.dim(name) for name in argument.shape]
    if (shape or argument.kind == "output") and list(tensor.shape) != shape:
        return f"returns {argument.name!r} of shape {list(tensor.shape)} for {workload.key}, where {shape} is stated"
    return ""


def _wrong_cost(kernel: Kernel, found: Any, workload: Any) -> str:
    if type(found).__name__ != "Cost":
        return f"must return a Cost, and returns {_shown(found)}"
    for name in ("bytes", "flops", "rate"):
        value: Any = getattr(found, name)
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not 0 <= value <= sys.float_info.max:
            return f"returns a Cost for {workload.key} whose {name} is {_shown(value)}, which is no number of 0 or more"
    if not found.rate:
        return f"returns {found} for {workload.key}: at a rate of 0 it never ends"
    if not found.bytes and not found.flops and all(size for _, size in workload.dims):
        return f"returns {found} for {workload.key}: what moves no byte takes no time"
    return ""


def _wrong_plan(kernel: Kernel, found: Any) -> str:
    plans = found if isinstance(found, tuple | list) else (found,)
    if not all(type(plan).__name__ == "LaunchPlan" for plan in plans):
        return f"must return a LaunchPlan or a tuple of them, and returns {_shown(found)}"
    known = {*OPERATIONS, *(d.name for d in kernel.dimensions)}
    for text, size in (tile for plan in plans for tile in plan.tiles):
        try:
            unknown = next((n for n in quantity(text) if isinstance(n, str) and n not in known), None)
        except ValueError as error:
            return f"returns a LaunchPlan with the tiles {error}"
        if unknown or type(size) is not int or size < 1:
            why = f"{unknown!r} is no dimension" if unknown else "their size must be a whole number of 1 or more"
            return f"returns a LaunchPlan with the tiles ({text!r}, {size!r}): {why}"
    return ""


def _wrong_tolerance(found: Any) -> str:
    right = found is None or type(found).__name__ == "Tolerance"
    return "" if right else f"must return a Tolerance or None, and returns {_shown(found)}"


def _is(kind: type, what: str) -> Callable[..., str]:
    def wrong(kernel: Kernel, found: Any, *given: Any) -> str:
        return "" if isinstance(found, kind) else f"must return {what}, and returns {_shown(found)}"

    return wrong


def _shown(found: object) -> str:
    return (text if len(text := repr(found)) <= 60 else f"{text[:57]}...") if found is not None else "None"


_WRONG: dict[str, Callable[..., str]] = {
    **dict.fromkeys(("reference", "same_dtype"), lambda *given: ""),
    "plan": lambda kernel, found, *given: _wrong_plan(kernel, found),
    "compile_flags": _sequence_of("str", some=False),
    "own_tolerance": lambda kernel, found, *given: _wrong_tolerance(found),
    "inputs": _wrong_inputs,
    "cases": _sequence_of("Case", some=True),
    "neighbours": _sequence_of("Workload", some=False),
    "space": _is(Space, "a Space"),
    "cost": _wrong_cost,
    "validate": _is(str, "a text, empty for what is right"),
}
"""Faults of the result of a kernel's function for its arguments, by function; empty if there is none."""
