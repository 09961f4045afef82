"""Kernel: a problem stated as data, with its workloads and its launches. Every `templates/<name>/kernel.py` defines one as
`KERNEL`."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, wraps
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from evo.errors import KernelError, UnknownNameError, UsageError
from evo.problem.data import DATA as DATA  # a kernel.py takes these from here
from evo.problem.data import draw as draw
from evo.problem.space import Space, Value, parse_number, tied
from evo.problem.stated import check_statement, faults_of_arguments
from evo.runtime.manifest import SAME as SAME
from evo.runtime.manifest import LaunchPlan as LaunchPlan

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = MappingProxyType({"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8})
INTEGER_BYTES = MappingProxyType({"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8})
"""Dtypes of outputs that are compared exactly, by the bytes of an element."""
ELEMENT_BYTES = MappingProxyType({**DTYPE_BYTES, **INTEGER_BYTES, "float8_e4m3fn": 1, "float8_e5m2": 1})
"""All dtypes that a tensor may have, by the bytes of an element."""

_V = TypeVar("_V", bound=Value)

FUNCTION_FILES = ("function.py", "frontend.py")
"""Either says what an exported module offers: the statement of its function, or the module itself."""

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

    def dim(self, name: str | int) -> int:
        return name if isinstance(name, int) else dict(self.dims)[name]

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
    far: str = ""
    """Name of the stride or dimension that reaches beyond 2^31 elements (`evo.measure.far`); empty if none does."""


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
    alone: bool = False
    """A multiprocessor holds no two blocks of it at once: it asks for all the shared memory that a block may have."""


@dataclass(frozen=True, kw_only=True)
class LaunchSequence:
    """The launches of one call of a candidate, in order on one stream."""

    launches: tuple[Launch, ...]
    workspace: tuple[tuple[str, int], ...] = ()
    """Elements, by the name of the argument."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an architecture or machine that spaces and launches depend on.

    For CUDA: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
    """

    arch: str
    multiprocessors: int = 1
    """SMs of the GPU, or usable cores of the CPU."""
    threads_per_block: int = 1024
    threads_per_multiprocessor: int = 1536
    registers_per_multiprocessor: int = 65536
    smem_bytes_per_block: int = 0
    """Shared memory with opt-in, not the static 48 KB."""
    smem_bytes_per_multiprocessor: int = 0
    smem_bytes_reserved_per_block: int = 1024
    blocks_per_multiprocessor: int = 24
    cache_bytes: int = 0
    """L2 of the GPU, last-level cache of the CPU."""
    capability: int = 0
    """Compute capability, times ten: 89 of a GPU that is sm_89; 0 of what is no GPU."""


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A size of the problem: its name and the inclusive range a kernel must be right for. batch: it is the first axis of
    tensors whose parts along it are computed each by itself, so that exports can be asked for the same bits in any batch."""

    name: str
    low: int
    high: int
    batch: bool = False


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One parameter of the compiled entry point, in call order.

    `shape` has dimensions and numbers: of an output, which the engine allocates, and of an input whose data are derived. A
    scalar's value comes from the dimension or option of the same name, or is a stride of a tensor. An optional tensor is
    there where the option of its name is on; the entry point gets a null address where it is not. Workspace is memory for
    the launches of one call, of `size(target, point, workload)` elements (none: a null address) from a multiple of 64 bytes
    on; before a call it holds anything or, if `zeroed`, zeros, which are written as a part of the call. `size` gives
    factors, numbers and names of dimensions; one that is not compiled in is named: (4 * point["blocks"], "cols").
    A structure holds the values of `fields`, which lie as `layout` says. It is passed by value on a GPU and by reference on
    a CPU, and is filled at each call.
    """

    name: str
    kind: Literal["input", "output", "scalar", "workspace", "structure"]
    dtype: str = "problem"
    """"problem" (the workload's dtype); "opmath" (what PyTorch computes it in: float64 for that dtype, else float32); a
    fixed one of `ELEMENT_BYTES`; or the name of an option that chooses one of these or "same", which is the workload's
    (`Kernel.choices`), and that is compiled in. Of a scalar "opmath", float32, int32 or int64; of workspace a fixed one. An
    output of `INTEGER_BYTES` is compared exactly, so that integers which follow from rounded numbers, as in quantisation,
    may be off by one and fail."""
    shape: tuple[str | int, ...] = ()
    optional: bool = False
    stride_of: tuple[str, int] | None = None
    """(tensor argument, axis) of which a scalar is the stride, in elements."""
    size: Callable[[str, Mapping[str, Value], Workload], tuple[int | str, ...]] | None = None
    zeroed: bool = False
    initial: str = ""
    """What an output holds before a call, which is written as a part of the call: "zeros", or the name of an input of the
    same shape and dtype, as for what is updated in place. Such an input is no parameter of the entry point. Empty:
    anything."""
    ties: tuple[str, int] | None = None
    """(input, axis): the output holds positions along that axis of that input. Any position is right whose element equals
    that at the reference's position (NaN equals NaN, 0 equals -0), but none twice in a row of positions in which the
    reference has none twice. None: only the reference's positions are right, as where the first of equal elements is asked
    for. The output's shape is that of the input without the axis (argmax), or with another in its place (topk, sort)."""
    layout: str = ""
    """Format of a structure for Python's module `struct`, with the alignment and padding of C: "PPqqf92x"."""
    fields: tuple[str, ...] = ()
    """Values in a structure: arguments (of a tensor its address), dimensions and options that are numbers, by name."""
    alignment: int = 8
    """Alignment of a structure, in bytes, which its size is rounded up to: 64 for a tensor map."""

    def dtype_of(self, workload: Workload) -> str:
        """The dtype it has there."""
        opmath = "float64" if workload.dtype == "float64" else "float32"
        known = {**dict(workload.options), "problem": workload.dtype, "opmath": opmath}
        found = str(known.get(self.dtype, self.dtype))
        return workload.dtype if found == SAME else found

    @property
    def size_bytes(self) -> int:
        """Size of a structure."""
        return -(-struct.calcsize(self.layout) // self.alignment) * self.alignment


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """`allclose(atol, rtol)` against float64, and at most `torch_factor` times PyTorch's own largest error.

    keeps: what is to be as in the reference although these would let it pass. "componentwise": small results beside large
    ones are within `atol` and `rtol`, too. "denormals": results below the smallest normal number are not 0. "overflow": what
    is too large is Inf, not the largest number. "rounding": results of 16 bits are rounded to nearest, not towards 0.
    "zero_sign": where the reference is 0, or -0, so is the result.

    of_sums: the share of the largest result that sums as long as this problem's may lose, beside PyTorch's own error."""

    atol: float
    rtol: float
    torch_factor: float = 2.0
    keeps: tuple[str, ...] = ("overflow", "rounding")
    of_sums: float = 0.0


_KEPT = frozenset({"componentwise", "denormals", "overflow", "rounding", "zero_sign"})

TOLERANCE = MappingProxyType(
    {
        "float16": Tolerance(atol=2e-3, rtol=2e-3, keeps=("denormals", "overflow", "rounding")),
        "bfloat16": Tolerance(atol=1.6e-2, rtol=1.6e-2),
        "float32": Tolerance(atol=5e-5, rtol=1e-5),
        "float64": Tolerance(atol=1e-12, rtol=1e-12),
        "float8_e4m3fn": Tolerance(atol=2**-6, rtol=2**-3, keeps=("rounding",)),
        "float8_e5m2": Tolerance(atol=2**-14, rtol=2**-2, keeps=("rounding",)),
    }
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Least cost of the problem: bytes moved once in and once out, floating-point operations."""

    bytes: int
    flops: int
    rate: float = 1.0
    """Speed of these operations on a GPU, relative to products that are summed in float32."""


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
    targets: tuple[str, ...] = ()
    """Left out: all."""

    def runs_on(self, target: str) -> bool:
        return not self.targets or target in self.targets


def _left_out(*_: object) -> Any:
    """Stands for a function that a statement leaves out, until its kernel has the derived one in its place."""
    raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The problem that templates solve. What is left out is derived from the arguments' shapes, as each field says.

    Texts stand for workloads, and a Space (or a mapping of several) for one that is the same for every workload.
    """

    name: str
    dtypes: Mapping[str, tuple[str, ...]]
    """Dtypes by target."""
    arguments: tuple[Argument, ...]
    """Left out, the scalars behind the tensors: all dimensions (int64), the options that are numbers (opmath, int64)."""
    reference: Callable[[Tensors, Workload], Mapping[str, torch.Tensor]]
    """(inputs, workload): outputs by name, from float64 copies of the inputs."""
    workloads: Mapping[str, tuple[Workload, ...]]
    """Workloads by target, which a search runs when none is named."""
    space: Callable[[str, Workload, Limits], Space]
    """(target, workload, limits): with a legal default. A mapping of names to spaces where a target has several templates,
    TARGET.NAME.SUFFIX.j2: those that are of use there, each with its space. `point["template"]` is then the name."""
    plan: Callable[[str, Mapping[str, Value], Workload], LaunchPlan | tuple[LaunchPlan, ...]]
    """(target, point, workload): launch geometry, for any value of the dimensions that are not compiled in. A tuple:
    launches that follow one another. All their entry points take the same arguments; `entry` is one in every source."""
    takes_sizes: bool = True
    """Whether scalars are derived where `arguments` has none."""
    title: str = ""
    """Left out: the name, as are the entry point's."""
    entry: str = ""
    dimensions: tuple[Dimension, ...] = ()
    """Left out: those of the arguments' shapes, from 1 to 2^31 - 1; the first from 0 where it is not compiled in."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of a workload with their defaults."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Texts that an option may have, by option; one left out may have any."""
    option_min: Mapping[str, float] = field(default_factory=dict)
    """Smallest value of an option that is a number; an option that is left out may have any finite value."""
    compile_time_dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dimensions and options that are compile-time constants, by target. Left out: none is."""
    tolerance: Mapping[str, Tolerance] = field(default_factory=lambda: TOLERANCE)
    """Tolerances by dtype."""
    own_tolerance: Callable[[Workload, str], Tolerance | None] = lambda workload, output: None
    """Tolerance of an output, by name, for which its dtype alone does not decide."""
    inputs: Callable[[Workload, str, torch.Generator], Tensors] = _left_out
    """(workload, data, generator): input tensors by name, in the workload's dtype, on the generator's device. Left out:
    `draw`."""
    data: tuple[str, ...] = DATA
    """Distributions that `inputs` knows; the first is the one timings use. Left out as `inputs` is, "repeated", too, where
    an output is of integers, such as positions: few numbers many times."""
    exact_data: tuple[str, ...] = ()
    """The distributions in `data` for which rounded inputs would pose another problem. Sums of such inputs are exact: no
    rounding on the way explains an error there."""
    cases: Callable[[str, Workload], Sequence[Case]] = _left_out
    """(target, workload): gate inputs for a binary compiled for `workload`. Left out: few and many elements of every free
    dimension, all data, each option off, a misaligned address."""
    neighbours: Callable[[str, Workload], Sequence[Workload]] = _left_out
    """(target, workload): workloads with other compile-time dimensions, for which a finalist's genome is compiled and gated,
    too. Left out: each one less, one more, twice as large and 769; the compiled-in options that are on or off the other way,
    each and all."""
    cost: Callable[[Workload], Cost] = _left_out
    """Left out: every tensor once, and no operations."""
    baselines: tuple[Baseline, ...] = ()
    """Left out, of role "reference": `reference` in the workload's dtype; of role "ceiling", if the cost is left out
    and there are inputs: a copy of as many bytes."""
    same_dtype: Callable[[Tensors, Workload], object] | None = None
    """Outputs in the workload's dtype, whose errors a candidate's may be twice. None: the reference baseline's outputs."""
    inactive: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """Values that a template reads for parameters that are not active at a point, by target."""
    compile_flags: Callable[[str, Mapping[str, Value]], tuple[str, ...]] = lambda target, point: ()
    """(target, point): extra compiler flags a point asks for."""
    memory_order: Callable[[Workload, str], tuple[int, ...]] | None = None
    """(workload, output): an output's axes from the outermost in memory to the innermost. None: in their order."""
    validate: Callable[[Workload], str] = lambda workload: ""
    """Fault of sizes that are each in range, such as a number that has to divide another; empty if there is none."""
    replaces: str = ""
    """The PyTorch function whose signature an export has, e.g. torch.nn.functional.layer_norm."""
    backward_of: str = ""
    """The kernel whose gradients it computes, with which it is exported. Its inputs are inputs of that one, gradients of its
    outputs (dy of y), and its optional outputs."""
    folder: Path = field(default=Path(), compare=False)
    digest: str = field(default="", compare=False)
    """The sha256 over the files that it was loaded from (`evo.problem.loading.kernel_files`)."""
    instead: Mapping[str, tuple[object, object]] = field(default_factory=dict, compare=False, repr=False)
    """Statements that something stands in for (`stand_in`), by field, each with that. `dataclasses.replace` hands
    it on, so that the new kernel goes by the statement where a field is not given anew."""

    def __post_init__(self) -> None:
        before = dict(self.instead)
        object.__setattr__(self, "instead", {})
        for name, (stated, given) in before.items():
            if getattr(self, name) is given:
                object.__setattr__(self, name, stated)
        for name in ("title", "entry"):  # a text that is given anew may be the one that stood there; sources have the entry
            object.__setattr__(self, name, getattr(self, name) or self.name)
        for name, value in self._derived():
            self.stand_in(name, value)
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
        if self.digest:  # it replaces one that was loaded
            check_statement(self)

    def stand_in(self, name: str, value: object) -> None:
        """Puts what is derived, or checked, in the place of what a field states."""
        stated, _ = self.instead.get(name, (getattr(self, name), None))
        object.__setattr__(self, "instead", {**self.instead, name: (stated, value)})
        object.__setattr__(self, name, value)

    def _derived(self) -> Iterator[tuple[str, object]]:
        """Fields that are derived where they are left out, each from those before."""
        from evo.problem import derived

        if self.data is DATA and self.inputs is _left_out and any(a.dtype in INTEGER_BYTES for a in self.outputs()):
            yield "data", (*DATA, "repeated")
        fixed = {target: self.compile_time_dims.get(target, ()) for target in self.dtypes}
        yield "compile_time_dims", fixed
        if not self.dimensions:
            compiled_in = {name for names in fixed.values() for name in names}
            names = list(dict.fromkeys(n for a in self.arguments for n in a.shape if isinstance(n, str)))
            lows = (int(n in compiled_in or n != names[0]) for n in names)
            yield "dimensions", tuple(Dimension(name=n, low=low, high=2**31 - 1) for n, low in zip(names, lows, strict=True))
        if self.takes_sizes and all(a.kind != "scalar" for a in self.arguments):
            sizes = [Argument(name=d.name, kind="scalar", dtype="int64") for d in self.dimensions]
            kinds = {float: "opmath", int: "int64"}  # a bool is neither
            numbers = [(n, kinds[type(v)]) for n, v in self.options.items() if type(v) in kinds]
            yield "arguments", (*self.arguments, *sizes, *(Argument(name=n, kind="scalar", dtype=d) for n, d in numbers))
        if len(self.parameters) < len(self.arguments):
            yield "arguments", (*self.parameters, *(a for a in self.arguments if a not in self.parameters))
        stated = self.space if callable(self.space) else lambda *given, space=self.space: space
        yield "space", wraps(stated)(lambda *given: tied(found) if isinstance(found := stated(*given), Mapping) else found)
        roles, made = {b.role for b in self.baselines}, list[Baseline]()
        if "reference" not in roles:
            made.append(Baseline(name="torch", role="reference", call=MethodType(derived.call_reference, self)))
            if self.same_dtype is None:
                yield "same_dtype", MethodType(derived.in_float32, self)
        if self.cost is _left_out and "ceiling" not in roles and any(a.kind == "input" for a in self.arguments):
            made.append(Baseline(name="copy", role="ceiling", call=MethodType(derived.copy, self)))
        yield "baselines", (*made, *self.baselines)
        for name in ("inputs", "cases", "neighbours", "cost"):
            if getattr(self, name) is _left_out:
                method = MethodType(getattr(derived, name), self)
                yield name, cache(method) if name in ("cases", "neighbours") else method

    def _faults(self) -> Iterator[str]:
        names = {d.name for d in self.dimensions} | set(self.options)
        yield from faults_of_arguments(self)
        for target, fixed in self.compile_time_dims.items():
            for name in set(fixed) - names:
                yield f": `compile_time_dims` of {target!r} names {name!r}, which is neither a dimension nor an option"
        for name, texts in self.choices.items():
            if self.options.get(name) not in texts:
                yield f": `choices` of {name!r} are {', '.join(texts)}, and `options` has no such default"
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
            if a.kind == "input" and not a.shape and {"inputs", "cost"} & self.instead.keys():
                yield f": input {a.name!r} has no shape; give it one, or the kernel its own `inputs` and `cost`"

    @property
    def parameters(self) -> tuple[Argument, ...]:
        """The arguments that entry points take: all but inputs that an output is made to begin as."""
        begun = {a.initial for a in self.arguments}
        return tuple(a for a in self.arguments if a.name not in begun)

    def outputs(self, workload: Workload | None = None) -> tuple[Argument, ...]:
        """Returns the outputs that `workload` asks for; without a workload, all."""
        made = (a for a in self.arguments if a.kind == "output")
        return tuple(a for a in made if workload is None or not a.optional or workload.option(a.name))

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
        for name, texts in self.choices.items():
            if options[name] not in texts:
                raise UnknownNameError(f"{name} of kernel {self.name}", str(options[name]), texts)
        for name, low in self.option_min.items():
            if float(options[name]) < low:
                raise UsageError(f"workload {text!r}: {name} must be {low:g} or more, got {options[name]}")
        found = Workload.of(dims, given["dtype"], options)
        if reason := self.validate(found):
            raise UsageError(f"workload {text!r}: {reason}")
        return found

    def number_of(self, option: str, value: Value) -> int:
        """An option that is compiled in as a number, by which exported packages choose: the place among its choices, else
        0 or 1."""
        return self.choices[option].index(str(value)) if option in self.choices else int(value)

    def example(self, target: str) -> Workload:
        return self.workloads[target][0]

    def check_target(self, target: str) -> None:
        if target not in self.dtypes:
            raise UnknownNameError(f"target of kernel {self.name}", target, self.dtypes)

    def binding(self, target: str, workload: Workload) -> Workload:
        """The part of a workload that a source is compiled for: the dtype, dimensions and options that are compiled in."""
        fixed = self.compile_time_dims[target]
        return Workload(
            dims=tuple((k, v) for k, v in workload.dims if k in fixed),
            dtype=workload.dtype,
            options=tuple((k, v) for k, v in workload.options if k in fixed),
        )

    def plans(
        self, target: str, point: Mapping[str, Value], workload: Workload, built: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[LaunchPlan, ...]:
        """Plans of all launches, in order, each with its entry point. built: `Binary.launch`, which goes before what `plan`
        gives. Raises KernelError if there is none."""
        found = self.plan(target, point, workload)
        plans = (found,) if isinstance(found, LaunchPlan) else found
        if not plans:
            raise KernelError(f"kernel {self.name!r}: `plan` gives no launch at {dict(point)}")
        return tuple(replace(plan, **{"entry": plan.entry or self.entry, **built}) for plan in plans)

    def sequence(
        self,
        target: str,
        point: Mapping[str, Value],
        workload: Workload,
        limits: Limits,
        built: Mapping[str, Any] = MappingProxyType({}),
    ) -> LaunchSequence:
        launches = (
            Launch(
                grid=plan.grid(dict(workload.dims), limits.multiprocessors),
                block=plan.block,
                smem_bytes=plan.smem_bytes,
                cluster=plan.cluster,
                alignment=plan.alignment,
                programmatic=plan.programmatic,
                entry=plan.entry,
            )
            for plan in self.plans(target, point, workload, built)
        )
        sizes = ((a.name, a.size(target, point, workload)) for a in self.arguments if a.size is not None)
        dims = dict(workload.dims)
        elements = tuple((n, math.prod(dims[f] if isinstance(f, str) else f for f in factors)) for n, factors in sizes)
        return LaunchSequence(launches=tuple(launches), workspace=elements)

    @cached_property
    def multiples(self) -> Mapping[str, str]:
        """Maps a dimension to the one that `validate` asks it to be a multiple of."""
        from evo.problem.repair import find_multiples

        return find_multiples(self)

    @property
    def reference_baseline(self) -> Baseline:
        """The baseline that users call today."""
        return next(b for b in self.baselines if b.role == "reference")

    @property
    def ceilings(self) -> tuple[str, ...]:
        """Names of the baselines that are a bound."""
        return tuple(b.name for b in self.baselines if b.role == "ceiling")


def _parse(text: str, name: str, given: str, example: _V) -> _V:
    """A value of the example's type."""
    kind = type(example)
    try:
        if kind is bool:
            return kind({"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[given.lower()])
        value = kind(parse_number(given, kind) if issubclass(kind, int | float) else given)
    except (KeyError, ValueError):
        what = f"{'whole number' if kind is int else kind.__name__} such as {example}"
        digits = ", in digits 0 to 9" if kind in (int, float) else ""
        raise UsageError(f"workload {text!r}: {name} must be a {what}{digits}, got {given!r}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"workload {text!r}: {name} must be finite, such as {example}, got {given!r}")
    return value
