"""Kernel: a problem stated as data, with its workloads and its launches. Every `templates/<name>/kernel.py` defines one as
`KERNEL`."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from evo.errors import KernelError, UnknownNameError, UsageError
from evo.problem.space import Space, Value
from evo.problem.stated import check_statement, told
from evo.runtime.package import LaunchPlan as LaunchPlan  # a kernel.py takes it from here

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = MappingProxyType({"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8})

DATA = ("normal", "large_mean", "constant", "outlier", "first_outlier", "huge", "tiny", "ramp", "non_finite")
"""Distributions of `draw` that any kernel should be right for."""

_V = TypeVar("_V", bound=Value)

UNFILLED = "# FILL IN: "
"""In a kernel.py that `evo new` has written, before what only its user knows."""

FRONTEND_FILE = "frontend.py"
"""What an exported module offers; copied into it."""

Tensors = Mapping[str, "torch.Tensor | None"]
"""Tensor arguments by name; None for an optional one that is left out."""


@dataclass(frozen=True)
class Workload:
    """A concrete problem: sizes, dtype and options such as weight=True or eps=1e-5. Hashable."""

    dims: tuple[tuple[str, int], ...]
    dtype: str
    options: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, dims: Mapping[str, int], dtype: str, options: Mapping[str, Value] | None = None) -> Workload:
        return cls(tuple(dims.items()), dtype, tuple(sorted((options or {}).items())))

    def dim(self, name: str) -> int:
        return dict(self.dims)[name]

    def option(self, name: str) -> Value:
        return dict(self.options)[name]

    @property
    def key(self) -> str:
        """Text that `Kernel.workload` parses back: rows=4096,cols=4096,dtype=float16[,option=...]"""
        parts = [*self.dims, ("dtype", self.dtype), *self.options]
        return ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in parts)

    def __str__(self) -> str:
        return f"{'x'.join(str(v) for _, v in self.dims)} {self.dtype}"


@dataclass(frozen=True)
class Case:
    """A gate input: a problem and how its data are drawn."""

    name: str
    workload: Workload
    data: str
    """A distribution that `Kernel.inputs` knows; "a+b": every item of the outermost axis has one of the two."""
    offset: int | tuple[int, ...] = 0
    """Elements by which tensors start past an aligned address; of several numbers each in turn, the last for all others."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """CUDA launch geometry and launch attributes of one launch; what they mean is told in LaunchPlan."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int = 0
    cluster: int = 1
    alignment: int = 1
    programmatic: bool = False
    entry: str = ""
    """Empty: what the code was loaded with."""


@dataclass(frozen=True, kw_only=True)
class LaunchSequence:
    """What one call of a candidate does: launches, in order on one stream."""

    launches: tuple[Launch, ...]
    workspace: tuple[tuple[str, int], ...] = ()
    """Elements, by the name of the argument."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an architecture or machine offers, as far as spaces and launches depend on it.

    For CUDA: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
    """

    arch: str
    multiprocessors: int = 1
    """SMs of the GPU, or usable cores of the CPU."""
    threads_per_block: int = 1024
    threads_per_multiprocessor: int = 1536
    registers_per_multiprocessor: int = 65536
    smem_bytes_per_block: int = 0
    """With opt-in, not the static 48 KB."""
    smem_bytes_per_multiprocessor: int = 0
    smem_bytes_reserved_per_block: int = 1024
    blocks_per_multiprocessor: int = 24
    cache_bytes: int = 0
    """L2 of the GPU, last-level cache of the CPU."""

    @property
    def capability(self) -> int:
        """89 for sm_89 and sm_89a; 0 where the architecture is no GPU."""
        found = re.match(r"(?:sm|compute)_(\d+)", self.arch)
        return int(found.group(1)) if found else 0


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A size of the problem: its name and the inclusive range a kernel must be right for."""

    name: str
    low: int
    high: int


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One parameter of the compiled entry point, in call order.

    `shape` names dimensions: of an output, which the engine allocates, and of an input whose data are derived. A scalar's
    value comes from the dimension or option of the same name, or is a stride of a tensor argument. An optional tensor is
    there where the option of its name is on; the entry point gets a null address where it is not. Workspace is memory for
    the launches of one call, of `size(target, point, workload)` elements (none: a null address) from a multiple of 64 bytes
    on; before a call it holds anything or, if `zeroed`, zeros, which are written as a part of the call. `size` gives
    factors, numbers and names of dimensions; one that is not compiled in is named: (4 * point["blocks"], "cols").
    """

    name: str
    kind: Literal["input", "output", "scalar", "workspace"]
    dtype: str = "problem"
    """"problem" (the workload's dtype); "opmath" (what PyTorch computes it in: float64 for that dtype, else float32); or a
    fixed one. Of a scalar "opmath", float32, int32 or int64; of workspace a fixed one."""
    shape: tuple[str, ...] = ()
    optional: bool = False
    stride_of: tuple[str, int] | None = None
    """(tensor argument, axis) of which a scalar is the stride, in elements."""
    size: Callable[[str, Mapping[str, Value], Workload], tuple[int | str, ...]] | None = None
    zeroed: bool = False

    def dtype_of(self, workload: Workload) -> str:
        """The dtype it has there."""
        opmath = "float64" if workload.dtype == "float64" else "float32"
        return {"problem": workload.dtype, "opmath": opmath}.get(self.dtype, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """`allclose(atol, rtol)` against float64, and at most `torch_factor` times PyTorch's own largest error.

    keeps: what is to be as in the reference although these would let it pass. "componentwise": small results beside large
    ones are within `atol` and `rtol`, too. "denormals": results below the smallest normal number are not 0. "overflow": what
    is too large is Inf, not the largest number. "rounding": results of 16 bits are rounded to nearest, not towards 0.
    "zero_sign": where the reference is 0, or -0, so is the result."""

    atol: float
    rtol: float
    torch_factor: float = 2.0
    keeps: tuple[str, ...] = ("overflow", "rounding")


_KEPT = frozenset({"componentwise", "denormals", "overflow", "rounding", "zero_sign"})

TOLERANCE = MappingProxyType(
    {
        "float16": Tolerance(atol=2e-3, rtol=2e-3, keeps=("denormals", "overflow", "rounding")),
        "bfloat16": Tolerance(atol=1.6e-2, rtol=1.6e-2),
        "float32": Tolerance(atol=5e-5, rtol=1e-5),
        "float64": Tolerance(atol=1e-12, rtol=1e-12),
    }
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the problem needs at least: bytes moved once in and once out, floating-point operations."""

    bytes: int
    flops: int
    rate: float = 1.0
    """How fast a GPU may do these operations, over products that are summed in float32."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Something to compare with.

    role "reference": what users call today; speed-ups are against it. "ceiling": not the same work, but a
    bound (a copy). "peer": another implementation.
    `call(inputs, workload)` returns its output tensor(s); it must not touch the inputs.
    """

    name: str
    role: Literal["reference", "ceiling", "peer"]
    call: Callable[[Tensors, Workload], object]
    targets: tuple[str, ...] = ("cuda", "cpu")


def _derived(*_: object) -> Any:
    """Stands for what is derived where it is left out."""
    raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The problem that templates solve. What is left out is derived from the arguments' shapes, as each field says.

    Texts stand for workloads, and a Space for one that is the same for every workload.
    """

    name: str
    dtypes: Mapping[str, tuple[str, ...]]
    """By target."""
    arguments: tuple[Argument, ...]
    """Left out, the scalars behind the tensors: all dimensions (int64), the options that are numbers (opmath, int64)."""
    reference: Callable[[Tensors, Workload], Mapping[str, torch.Tensor]]
    """(inputs, workload): outputs by name, from float64 copies of the inputs."""
    workloads: Mapping[str, tuple[Workload, ...]]
    """By target: what a search runs when none is named."""
    space: Callable[[str, Workload, Limits], Space]
    """(target, workload, limits): with a legal default."""
    plan: Callable[[str, Mapping[str, Value], Workload], LaunchPlan | tuple[LaunchPlan, ...]]
    """(target, point, workload): launch geometry, for any value of the dimensions that are not compiled in. A tuple:
    launches that follow one another. All their entry points take the same arguments; `entry` is one in every source."""
    title: str = ""
    """Left out: the name, as are the entry point's."""
    entry: str = ""
    dimensions: tuple[Dimension, ...] = ()
    """Left out: those of the arguments' shapes, from 1 to 2^31 - 1; the first from 0 where it is not compiled in."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of a workload with their defaults."""
    option_min: Mapping[str, float] = field(default_factory=dict)
    """By option that is a number: the smallest value it may have; those left out may have any finite one."""
    compile_time_dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By target: dimensions and options that are compile-time constants. Left out: none is."""
    tolerance: Mapping[str, Tolerance] = field(default_factory=lambda: TOLERANCE)
    """By dtype."""
    own_tolerance: Callable[[Workload, str], Tolerance | None] = lambda workload, output: None
    """Of an output, by name, whose dtype alone does not say it."""
    inputs: Callable[[Workload, str, torch.Generator], Tensors] = _derived
    """(workload, data, generator): input tensors by name, in the workload's dtype, on the generator's device. Left out:
    `draw`."""
    data: tuple[str, ...] = DATA
    """Distributions that `inputs` knows; the first is the one timings use."""
    exact_data: tuple[str, ...] = ()
    """Those whose results a rounding of the inputs changes by any amount, and whose arithmetic is exact: results are compared
    as if no rounding on the way explained a difference."""
    cases: Callable[[str, Workload], Sequence[Case]] = _derived
    """(target, workload): gate inputs for a binary compiled for `workload`. Left out: few and many elements of every free
    dimension, all data, each option off, a misaligned address."""
    neighbours: Callable[[str, Workload], Sequence[Workload]] = _derived
    """(target, workload): workloads with other compile-time dimensions, for which a finalist's genome is compiled and gated,
    too. Left out: each one less, one more, twice as large and 769; the compiled-in options that are on or off the other way,
    each and all."""
    cost: Callable[[Workload], Cost] = _derived
    """Left out: every tensor once, and no operations."""
    baselines: tuple[Baseline, ...] = ()
    """Left out, of role "reference": `reference` in the workload's dtype; of role "ceiling", if the cost is left out:
    a copy of as many bytes."""
    same_dtype: Callable[[Tensors, Workload], object] | None = None
    """What a candidate's errors may be twice of: outputs in the workload's dtype. None: the reference baseline's."""
    inactive: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """By target: what a template reads for a parameter that is not active at a point."""
    compile_flags: Callable[[str, Mapping[str, Value]], tuple[str, ...]] = lambda target, point: ()
    """(target, point): extra compiler flags a point asks for."""
    memory_order: Callable[[Workload, str], tuple[int, ...]] | None = None
    """(workload, output): an output's axes from the outermost in memory to the innermost. None: in their order."""
    validate: Callable[[Workload], str] = lambda workload: ""
    """What is wrong with sizes that are each in range, such as a number that has to divide another; empty if nothing is."""
    replaces: str = ""
    """The PyTorch function whose signature an export has, e.g. torch.nn.functional.layer_norm."""
    backward_of: str = ""
    """The kernel whose gradients it computes, with which it is exported. Its inputs are inputs of that one, gradients of its
    outputs (dy of y), and its optional outputs."""
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        for name, value in self._left_out():
            object.__setattr__(self, name, value)
        for fault in self._faults():
            raise KernelError(f"kernel {self.name!r}{fault}")
        try:
            workloads = {
                target: tuple(self.workload(target, w) if isinstance(w, str) else w for w in found)
                for target, found in self.workloads.items()
            }
        except UsageError as error:
            known = ", ".join(d.name for d in self.dimensions)
            raise KernelError(f"kernel {self.name!r}: in `workloads`: {error} (its dimensions: {known})") from None
        object.__setattr__(self, "workloads", workloads)

    def _left_out(self) -> Iterator[tuple[str, object]]:
        """What is derived, by field, each from those before."""
        yield "title", self.title or self.name
        yield "entry", self.entry or self.name
        fixed = {target: self.compile_time_dims.get(target, ()) for target in self.dtypes}
        yield "compile_time_dims", fixed
        if not self.dimensions:
            compiled_in = {name for names in fixed.values() for name in names}
            names = list(dict.fromkeys(n for a in self.arguments for n in a.shape))
            lows = (int(n in compiled_in or n != names[0]) for n in names)
            yield "dimensions", tuple(Dimension(name=n, low=low, high=2**31 - 1) for n, low in zip(names, lows, strict=True))
        if all(a.kind != "scalar" for a in self.arguments):
            sizes = [Argument(name=d.name, kind="scalar", dtype="int64") for d in self.dimensions]
            kinds = {float: "opmath", int: "int64"}  # a bool is neither
            numbers = [(n, kinds[type(v)]) for n, v in self.options.items() if type(v) in kinds]
            yield "arguments", (*self.arguments, *sizes, *(Argument(name=n, kind="scalar", dtype=d) for n, d in numbers))
        for name, derived in (("inputs", _inputs), ("cases", _cases), ("neighbours", _neighbours), ("cost", _cost)):
            if getattr(self, name) is _derived:
                yield name, partial(derived, self)
        if isinstance(space := self.space, Space):
            yield "space", lambda target, workload, limits: space
        roles = {b.role for b in self.baselines}
        made = [Baseline(name="torch", role="reference", call=self.reference)] if "reference" not in roles else []
        if made and self.same_dtype is None:
            yield "same_dtype", partial(_in_float32, self.reference)
        if isinstance(self.cost, partial) and "ceiling" not in roles:
            made.append(Baseline(name="copy", role="ceiling", call=partial(_copy, self)))
        yield "baselines", (*made, *self.baselines)

    def _faults(self) -> Iterator[str]:
        names = {d.name for d in self.dimensions} | set(self.options)
        tensors = {a.name for a in self.arguments if a.kind in ("input", "output")}
        for a in self.arguments:
            if a.kind not in ("input", "output", "scalar", "workspace"):
                yield f": argument {a.name!r} is of kind {a.kind!r}; there are input, output, scalar and workspace"
            if isinstance(a.shape, str):
                yield f": the shape of argument {a.name!r} is a text; write ({a.shape!r},)"
            if a.stride_of is not None and a.stride_of[0] not in tensors:
                yield f": scalar argument {a.name!r} is a stride of {a.stride_of[0]!r}, which is no tensor argument"
            if a.kind == "scalar" and a.stride_of is None and a.name not in names:
                yield f": scalar argument {a.name!r} is neither a dimension nor an option"
            if a.kind == "output" and a.optional and a.name not in self.options:
                yield f": no option {a.name!r} asks for the optional output of that name"
            if a.kind == "output" and a.dtype not in {"problem", "opmath", *DTYPE_BYTES}:
                yield f": output {a.name!r} is of {a.dtype}, but what is compared must be floating-point"
            if (a.kind == "workspace") != (a.size is not None) or (a.kind == "workspace") < a.zeroed:
                yield f": argument {a.name!r}: every workspace, and nothing else, has a `size`, and may be `zeroed`"
            if a.kind == "workspace" and a.dtype not in {*DTYPE_BYTES, "int32", "int64"}:
                yield f": workspace {a.name!r} has no fixed dtype such as float32 or int32, but {a.dtype!r}"
            for unknown in set(a.shape) - names:
                yield f": argument {a.name!r} has an unknown dimension {unknown!r}"
        for target, fixed in self.compile_time_dims.items():
            for name in set(fixed) - names:
                yield f": `compile_time_dims` of {target!r} names {name!r}, which is neither a dimension nor an option"
        for name in set(self.option_min) - set(self.options):
            yield f": `option_min` names {name!r}, which is not one of its options"
        for unknown in {k for t in self.tolerance.values() for k in t.keeps} - _KEPT:
            yield f": a tolerance keeps {unknown!r}, which is none of {', '.join(sorted(_KEPT))}"
        for target, dtypes in self.dtypes.items():
            if not self.workloads.get(target):
                yield f": no workload of target {target!r}; give `workloads` one"
            for dtype in set(dtypes) - set(DTYPE_BYTES):
                yield f": dtype {dtype!r} of target {target!r} is none of {', '.join(DTYPE_BYTES)}"
            for dtype in set(dtypes) - set(self.tolerance):
                yield f": no tolerance for {dtype} of target {target!r}"
        for a in self.arguments:
            if a.kind == "input" and not a.shape and any(isinstance(f, partial) for f in (self.inputs, self.cost)):
                yield f": input {a.name!r} has no shape; give it one, or the kernel its own `inputs` and `cost`"

    def outputs(self, workload: Workload) -> tuple[Argument, ...]:
        """Those that `workload` asks for."""
        made = (a for a in self.arguments if a.kind == "output")
        return tuple(a for a in made if not a.optional or workload.option(a.name))

    def baseline(self, name: str) -> Baseline:
        for b in self.baselines:
            if b.name == name:
                return b
        raise UnknownNameError("baseline", name, [b.name for b in self.baselines])

    def workload(self, target: str, text: str) -> Workload:
        """Parses rows=4096,cols=8192,dtype=float16[,option=value].

        Raises UnknownNameError or UsageError, saying which part is wrong and what is expected.
        """
        self.check_target(target)
        known = {d.name: d for d in self.dimensions}
        given: dict[str, str] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = (s.strip() for s in part.partition("="))
            if not equals or not value:
                raise UsageError(f"workload {text!r}: {part!r} is not name=value")
            if name not in known and name not in self.options and name != "dtype":
                raise UnknownNameError(f"workload part of kernel {self.name}", name, [*known, "dtype", *self.options])
            if name in given:
                raise UsageError(f"workload {text!r} gives {name!r} twice")
            given[name] = value
        missing = [n for n in (*known, "dtype") if n not in given]
        if missing:
            first = self.workloads[target][0]
            example = f"; e.g. {first.key}" if isinstance(first, Workload) else ""
            raise UsageError(f"workload {text!r} lacks {', '.join(missing)}{example}")
        dims = {name: _parse(text, name, given[name], d.low) for name, d in known.items()}
        for name, d in known.items():
            if not d.low <= dims[name] <= d.high:
                raise UsageError(
                    f"workload {text!r}: {name} must be {d.low:,} to {d.high:,}, got {dims[name]:,}"
                )
        if given["dtype"] not in self.dtypes[target]:
            raise UnknownNameError(f"dtype of kernel {self.name} on {target}", given["dtype"], self.dtypes[target])
        options = {n: _parse(text, n, given[n], v) if n in given else v for n, v in self.options.items()}
        for name, low in self.option_min.items():
            if float(options[name]) < low:
                raise UsageError(f"workload {text!r}: {name} must be {low:g} or more, got {options[name]}")
        found = Workload.of(dims, given["dtype"], options)
        if reason := self.validate(found):
            raise UsageError(f"workload {text!r}: {reason}")
        return found

    def example(self, target: str) -> Workload:
        return self.workloads[target][0]

    def check_target(self, target: str) -> None:
        if target not in self.dtypes:
            raise UnknownNameError(f"target of kernel {self.name}", target, self.dtypes)

    def binding(self, target: str, workload: Workload) -> Workload:
        """What a source is compiled for: the dtype, and those of the dimensions and options that are compiled in."""
        fixed = self.compile_time_dims[target]
        return Workload(
            dims=tuple((k, v) for k, v in workload.dims if k in fixed),
            dtype=workload.dtype,
            options=tuple((k, v) for k, v in workload.options if k in fixed),
        )

    def plans(self, target: str, point: Mapping[str, Value], workload: Workload) -> tuple[LaunchPlan, ...]:
        """Of all launches, in order; each names its entry point. Raises KernelError if there is none."""
        found = self.plan(target, point, workload)
        plans = (found,) if isinstance(found, LaunchPlan) else found
        if not plans:
            raise KernelError(f"kernel {self.name!r}: `plan` gives no launch at {dict(point)}")
        return tuple(replace(plan, entry=plan.entry or self.entry) for plan in plans)

    def sequence(self, target: str, point: Mapping[str, Value], workload: Workload, limits: Limits) -> LaunchSequence:
        launches = (
            Launch(
                grid=plan.grid(dict(workload.dims), limits.multiprocessors),
                block=(plan.threads, 1, 1),
                smem_bytes=plan.smem_bytes,
                cluster=plan.cluster,
                alignment=plan.alignment,
                programmatic=plan.programmatic,
                entry=plan.entry,
            )
            for plan in self.plans(target, point, workload)
        )
        sizes = ((a.name, a.size(target, point, workload)) for a in self.arguments if a.size is not None)
        dims = dict(workload.dims)
        elements = tuple((n, math.prod(dims[f] if isinstance(f, str) else f for f in factors)) for n, factors in sizes)
        return LaunchSequence(launches=tuple(launches), workspace=elements)

    @property
    def reference_baseline(self) -> Baseline:
        """What users call today."""
        return next(b for b in self.baselines if b.role == "reference")

    @property
    def ceilings(self) -> tuple[str, ...]:
        """Names of the baselines that are a bound."""
        return tuple(b.name for b in self.baselines if b.role == "ceiling")

    @property
    def digest(self) -> str:
        """See `kernel_digest`."""
        return kernel_digest(self.folder)


# -- what a statement leaves out ----------------------------------------------------------------------------------

_MANY = 9 << 20
"""Elements of the tensors of a case of many."""


def draw(data: str, rows: int, cols: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """[rows, cols] for a kernel that works on rows, of the distribution named: one for each way in which such kernels break.
    `dtype` is what the values are to be rounded to; they are float64 for that, else float32."""
    import torch

    half, device, wide = dtype == torch.float16, generator.device, torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=wide, generator=generator, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=wide, generator=generator, device=device)

    def spot() -> tuple[torch.Tensor, torch.Tensor]:
        column = torch.randint(0, cols, (rows,), generator=generator, device=device)
        return torch.arange(rows, device=device), column

    def end_or_spot() -> tuple[torch.Tensor, torch.Tensor]:
        row, column = spot()
        turn = (row + torch.randint(0, 3, (), generator=generator, device=device)) % 3
        column[turn == 0], column[turn == 1] = cols - 1, 0
        return row, column

    x = normal(rows, cols)
    if data == "normal":  # every row its own mean and scale: no fixed statistics fit
        x = x * torch.exp(2 * uniform(rows, 1) - 1) + 4 * normal(rows, 1)
    elif data == "large_mean":
        x = x + 1000
    elif data == "tight":  # standard deviation of a hundredth at mean 1000
        x = x * 0.01 + 1000
    elif data == "constant":
        x = normal(rows, 1).expand(rows, cols) * 3
    elif data == "outlier":  # one, and a second in every other row
        x[spot()] = 300.0
        row, column = spot()
        x[row[1::2], column[1::2]] = -300.0
    elif data == "first_outlier":
        x[:, 0] = 1000.0
    elif data == "huge":  # as large as the squares of a whole row allow: their sum is a tenth of what float32 holds
        x = (2 * uniform(rows, cols) - 1) * (65000.0 if half else (2e37 / cols) ** 0.5)
    elif data == "tiny":
        x = x * 1e-4
    elif data == "denormal":  # of the problem's dtype: flushing them to zero loses the row
        x = x * (torch.finfo(dtype).smallest_normal / 4)
    elif data == "needle":  # nearly all of a row's variance in one element: the last, the first or any
        # Equal elements beside it would all be rounded the same way, and the errors of an honest sum add up.
        row, column = end_or_spot()
        x = x / 16 + (4 * uniform(rows, 1) - 2)
        x[row, column] += 48 + 32 * uniform(rows)
    elif data == "permuted":  # the elements of one row, in another order in each
        order = uniform(rows, cols).argsort(dim=1)
        x = (x[:1] * 2 + torch.linspace(-3, 5, cols, device=device)).expand(rows, cols).gather(1, order)
    elif data == "ramp":  # sorted values: order matters to running sums
        x = torch.linspace(-3, 5, cols, device=device).expand(rows, cols) + normal(rows, 1)
    elif data == "non_finite":  # in turn: a row with NaN, with Inf, with -Inf, of -Inf alone, and a clean one
        row, column = end_or_spot()
        for turn, value in enumerate((float("nan"), float("inf"), -float("inf"))):
            x[row[turn::5], column[turn::5]] = value
        x[3::5] = -float("inf")
    else:
        raise KernelError(f"no distribution is named {data!r}; a kernel with data of its own needs its own `inputs`")
    return x


def _inputs(kernel: Kernel, workload: Workload, data: str, generator: torch.Generator) -> Tensors:
    """Tensors of the most axes are of the distribution named, along their last axis; others are far from 1 and 0, so that
    ignoring them shows, and with outliers some are large."""
    import torch

    made: dict[str, torch.Tensor | None] = {}
    axes = max(len(a.shape) for a in kernel.arguments if a.kind == "input")
    for a in (a for a in kernel.arguments if a.kind == "input"):
        made[a.name] = None
        if not a.optional or workload.option(a.name):
            dtype, shape = getattr(torch, a.dtype_of(workload)), _shape(a, workload)
            if len(shape) == axes:
                values = draw(data, math.prod(shape[:-1]), shape[-1], dtype, generator).reshape(shape)
            else:
                wide = torch.promote_types(dtype, torch.float32)
                values = 1 + 0.5 * torch.randn(shape, dtype=wide, generator=generator, device=generator.device)
                values[..., ::8] *= 32 if data == "outlier" else 1
            made[a.name] = values.to(dtype).contiguous()
    return made


def _shape(argument: Argument, workload: Workload) -> list[int]:
    return [workload.dim(name) for name in argument.shape]


def _cases(kernel: Kernel, target: str, workload: Workload) -> list[Case]:
    """Few elements each, but for one. All dimensions that are not compiled in have other sizes than the workload's."""
    compiled_in, first = kernel.compile_time_dims[target], kernel.data[0]
    free = [d for d in kernel.dimensions if d.name not in compiled_in]
    own, options, found = dict(workload.dims), dict(workload.options), dict[tuple[object, ...], Case]()
    few = {d.name: min(own[d.name], 509 if place else 67) for place, d in enumerate(free)}

    def add(data: str, changed: Mapping[str, Value], offset: int = 0) -> bool:
        """changed: dimensions and options that are others. Whether there is such a problem."""
        dims = {n: int(changed.get(n, few.get(n, size))) for n, size in own.items()}
        made = Workload.of(dims, workload.dtype, {n: changed.get(n, v) for n, v in options.items()})
        if not all(d.low <= dims[d.name] <= d.high for d in free) or kernel.validate(made):
            return False
        what = [f"{n}={value}" for n, value in changed.items()] + ([f"offset={offset}"] if offset else [])
        found.setdefault((data, made, offset), Case(" ".join([data, *what]), made, data, offset))
        return True

    for data in kernel.data:
        add(data, {})
    for d in free:
        for size in (0, 1, 3, 17, 64, 127, 769, 1025) if d is not free[0] else (0, 1):
            add(first, {d.name: size})
    others: list[tuple[str, dict[str, Value], int]] = [(first, {}, 1)]
    for name, value in options.items():
        if name not in compiled_in and isinstance(value, bool):
            others.append((first, {name: not value}, 0))
        elif name not in compiled_in and isinstance(value, float):
            others.append(("tiny" if "tiny" in kernel.data else first, {name: 4 * value or 0.5}, 0))
    # A gate's time goes by the number of cases: more sizes of the first dimension come along with what else is another.
    for size, other in zip_longest((3, 17, 64, 127) if free else (), others):
        data, changed, offset = other or (first, {}, 0)
        if size is None or not add(data, {free[0].name: size, **changed}, offset):
            add(data, changed, offset)
    if free:  # more than a persistent grid takes at once, and no whole number of its steps
        name, elements = free[0].name, max(math.prod(_shape(a, workload)) for a in kernel.arguments if a.kind != "scalar")
        many = max(1, own[name] * _MANY // max(1, elements))
        add(first, {name: (many if target == "cuda" else min(own[name], many)) | 1})
    return list(found.values())


def _neighbours(kernel: Kernel, target: str, workload: Workload) -> list[Workload]:
    compiled_in = [d for d in kernel.dimensions if d.name in kernel.compile_time_dims[target]]
    own = dict(workload.dims)
    few = {d.name: min(own[d.name], max(d.low, 67)) for d in kernel.dimensions if d not in compiled_in}
    options = dict(workload.options)
    others = {n: not v for n, v in workload.options if isinstance(v, bool) and n in kernel.compile_time_dims[target]}
    near = [
        Workload.of({**own, **few, d.name: size}, workload.dtype, options)
        for d in compiled_in
        for size in dict.fromkeys((own[d.name] - 1, own[d.name] + 1, own[d.name] + 8, 2 * own[d.name], 769))
        if d.low <= size <= d.high and size != own[d.name]
    ]
    switched = [others, *({n: v} for n, v in others.items())] if others else []
    near += [Workload.of({**own, **few}, workload.dtype, {**options, **other}) for other in switched]
    return [w for w in dict.fromkeys(near) if not kernel.validate(w)]


def _in_float32(reference: Callable[[Tensors, Workload], object], inputs: Tensors, workload: Workload) -> object:
    """In 16 bits throughout, as the reference would compute there, no kernel does."""
    halves = {n: t for n, t in inputs.items() if t is not None and t.is_floating_point() and t.itemsize == 2}
    return reference({**inputs, **{n: t.float() for n, t in halves.items()}}, workload)


def _cost(kernel: Kernel, workload: Workload) -> Cost:
    import torch

    inputs = [a for a in kernel.arguments if a.kind == "input" and (not a.optional or workload.option(a.name))]
    tensors = (*inputs, *kernel.outputs(workload))
    each = ((getattr(torch, a.dtype_of(workload)), math.prod(_shape(a, workload))) for a in tensors)
    return Cost(bytes=sum(dtype.itemsize * elements for dtype, elements in each), flops=0)


_SMALL = 1 / 64
"""Of the largest input's bytes: one of fewer is left out of a copy."""


def _copy(kernel: Kernel, inputs: Tensors, workload: Workload) -> torch.Tensor:
    """Reads and writes as many bytes as the cost says, as far as the large inputs go: a call for a small one costs more than
    its bytes, and torch.cat copies bytes one by one."""
    import torch

    left, parts = kernel.cost(workload).bytes // 2, list[torch.Tensor]()
    largest = max(t.nbytes for t in inputs.values() if t is not None)
    for tensor in (t for t in inputs.values() if t is not None and t.nbytes >= _SMALL * largest):
        parts.append(tensor.flatten().view(torch.uint8)[:left])
        left -= len(parts[-1])
    copy = parts[0].new_empty(sum(map(len, parts)))
    for into, part in zip(copy.split([len(part) for part in parts]), parts, strict=True):
        into.copy_(part)
    return copy


def kernel_digest(folder: Path) -> str:
    """sha256 over what decides a search: the folder's Python files and templates, and the folders that kernels share, whose
    names start with an underscore; but for the export's frontend, and the .py and .h in _shared, which frontends share. The
    kernel need not be loaded for that, and may lie anywhere."""
    kept = {".py", ".j2", ".cu", ".cpp", ".cuh", ".h"}
    of_frontends = {*template_root().glob("_shared/*.py"), *template_root().glob("_shared/*.h")}
    files = [*folder.rglob("*"), *(p for p in template_root().glob("_*/**/*") if p not in of_frontends)]
    digest = hashlib.sha256()
    files = [p for p in files if p.suffix in kept and p.stem != Path(FRONTEND_FILE).stem]
    for name, content in sorted((p.name, p.read_bytes()) for p in files):
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


def _parse(text: str, name: str, given: str, example: _V) -> _V:
    """A value of the example's type."""
    kind = type(example)
    try:
        if kind is bool:
            return kind({"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[given.lower()])
        value = kind(given)
    except (KeyError, ValueError):
        what = "whole number" if kind is int else kind.__name__
        raise UsageError(f"workload {text!r}: {name} must be a {what} such as {example}, got {given!r}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"workload {text!r}: {name} must be finite, such as {example}, got {given!r}")
    return value


def template_root() -> Path:
    """The folder of kernels: beside the installed package, else in the checkout."""
    here = Path(__file__).resolve().parent.parent
    installed = here / "_assets" / "templates"
    return installed if installed.is_dir() else here.parent / "templates"


def kernel_names() -> list[str]:
    return sorted(p.parent.name for p in template_root().glob("*/kernel.py"))


def names_near(name: str) -> list[str]:
    """Kernels that may be meant: the shipped ones, and the folders beside the one that is named."""
    return [*kernel_names(), *(str(p.parent) for p in Path(name).parent.glob("*/kernel.py"))]


def find_kernel(name: str) -> Path:
    """The folder of a kernel, by its name or by a path to it.

    Raises UnknownNameError if there is none, KernelError for a folder that is no kernel's.
    """
    if (Path(name) / "kernel.py").is_file():
        return Path(name).resolve()
    if name in kernel_names():
        return template_root() / name
    if Path(name).is_dir():
        raise KernelError(
            f"{name} is a folder, but no kernel's: it has no kernel.py; a kernel is a folder with kernel.py, which states"
            " the problem, and a template for each target, such as cuda.cu.j2 or cpu.cpp.j2 (docs/writing-a-kernel.md)"
        )
    raise UnknownNameError("kernel", name, names_near(name))


def unfilled(path: Path) -> list[tuple[int, str]]:
    """(line, what) of all that a kernel.py still lacks."""
    lines = enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    return [(number, line.partition(UNFILLED)[2].strip()) for number, line in lines if UNFILLED in line]


_loaded: dict[Path, Kernel] = {}


def load_kernel(name: str) -> Kernel:
    """The `KERNEL` of templates/<name>/kernel.py, or of the folder that `name` is a path to.

    Raises UnknownNameError, or KernelError if there is no such file or it does not state a problem.
    """
    folder = find_kernel(name)
    if folder in _loaded:
        return _loaded[folder]
    path = folder / "kernel.py"
    if missing := unfilled(path):
        places = "; ".join(f"line {line}, {what}" for line, what in missing)
        raise KernelError(f"{path} is not complete: {places} (write each, and delete its comment {UNFILLED.strip()!r})")
    # The folder is imported as a package of a private name, so that kernel.py can be split: from .space import ...
    # It holds the folders that kernels of a family share, too: from ._norm import ...
    package = f"_evo_kernel_{folder.name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    places_of_modules = [str(folder), str(template_root())]
    spec = importlib.util.spec_from_file_location(package, path, submodule_search_locations=places_of_modules)
    if spec is None or spec.loader is None:
        raise KernelError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    try:
        spec.loader.exec_module(module)
    except KernelError:
        raise
    except (Exception, SystemExit) as error:
        raise told(folder, "fails on import:", error) from error
    kernel = getattr(module, "KERNEL", None)
    if not isinstance(kernel, Kernel):
        raise KernelError(f"{path} must define KERNEL = evo.problem.kernel.Kernel(...)")
    object.__setattr__(kernel, "folder", folder)
    check_statement(kernel)
    _loaded[folder] = kernel
    return kernel
