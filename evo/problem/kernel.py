"""Kernel: a problem stated as data, with its workloads and its launches. Every `templates/<name>/kernel.py` defines one as
`KERNEL`."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeVar

from evo.errors import KernelError, UnknownNameError, UsageError
from evo.problem.space import Space, Value
from evo.runtime.package import LaunchPlan as LaunchPlan  # a kernel.py takes it from here

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = MappingProxyType({"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8})

_V = TypeVar("_V", bound=Value)

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
    """A distribution that `Kernel.inputs` knows."""
    offset: int = 0
    """Elements by which every tensor starts past an aligned address."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """CUDA launch geometry and launch attributes of one launch; what they mean is told in LaunchPlan."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int = 0
    cluster: int = 1
    alignment: int = 1
    programmatic: bool = False


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

    `shape` names dimensions and is only used for outputs, which the engine allocates. A scalar's value comes
    from the dimension or option of the same name, or is a stride of a tensor argument. An optional output is asked for
    by the option of its name; the entry point gets a null address where it is not.
    """

    name: str
    kind: Literal["input", "output", "scalar"]
    dtype: str = "problem"
    """"problem" (the workload's dtype), or a fixed one: float32, int64."""
    shape: tuple[str, ...] = ()
    optional: bool = False
    stride_of: tuple[str, int] | None = None
    """(tensor argument, axis) of which a scalar is the stride, in elements."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """`allclose(atol, rtol)` against float64, and at most `torch_factor` times PyTorch's own largest error."""

    atol: float
    rtol: float
    torch_factor: float = 2.0


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


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The problem that templates solve.

    reference(inputs, workload): outputs by name in float64, from float64 copies of the inputs.
    inputs(workload, data, generator): input tensors by name, in the workload's dtype, on the generator's
        device; `data` names a distribution.
    cases(target, workload): gate inputs for a binary specialised for `workload`.
    neighbours(target, workload): workloads with other specialised dimensions, for which a finalist's genome is
        compiled and gated too.
    space(target, workload, limits): the search space with a legal default.
    plan(target, point, workload): launch geometry, for any value of the dimensions that are not specialised.
    compile_flags(target, point): extra compiler flags a point asks for.
    memory_order(workload, output): an output's axes from the outermost in memory to the innermost.
    validate(workload): what is wrong with sizes that are each in range, such as a number that has to divide another;
        empty if nothing is.
    """

    name: str
    title: str
    entry: str
    dimensions: tuple[Dimension, ...]
    dtypes: Mapping[str, tuple[str, ...]]
    """By target."""
    options: Mapping[str, Value]
    """Options of a workload with their defaults."""
    compile_time_dims: Mapping[str, tuple[str, ...]]
    """By target: dimensions and options that are compile-time constants."""
    arguments: tuple[Argument, ...]
    tolerance: Mapping[str, Tolerance]
    """By dtype."""
    reference: Callable[[Tensors, Workload], Mapping[str, torch.Tensor]]
    inputs: Callable[[Workload, str, torch.Generator], Tensors]
    data: tuple[str, ...]
    """Distributions that `inputs` knows; the first is the one timings use."""
    cases: Callable[[str, Workload], Sequence[Case]]
    neighbours: Callable[[str, Workload], Sequence[Workload]]
    cost: Callable[[Workload], Cost]
    baselines: tuple[Baseline, ...]
    workloads: Mapping[str, tuple[Workload, ...]]
    """By target: what a search runs when none is named."""
    space: Callable[[str, Workload, Limits], Space]
    plan: Callable[[str, Mapping[str, Value], Workload], LaunchPlan]
    inactive: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """By target: what a template reads for a parameter that is not active at a point."""
    same_dtype: Callable[[Tensors, Workload], object] | None = None
    """What a candidate's errors may be twice of: outputs in the workload's dtype. None: the reference baseline's."""
    own_tolerance: Callable[[Workload], Tolerance | None] = lambda workload: None
    """For all outputs of a workload whose dtype alone does not say it."""
    option_min: Mapping[str, float] = field(default_factory=dict)
    """By option that is a number: the smallest value it may have; those left out may have any finite one."""
    compile_flags: Callable[[str, Mapping[str, Value]], tuple[str, ...]] = lambda target, point: ()
    memory_order: Callable[[Workload, str], tuple[int, ...]] | None = None
    """None: in the order of the axes."""
    validate: Callable[[Workload], str] = lambda workload: ""
    replaces: str = ""
    """The PyTorch function whose signature an export has, e.g. torch.nn.functional.layer_norm."""
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise KernelError(f"kernel {self.name!r}{fault}")

    def _faults(self) -> Iterator[str]:
        names = {d.name for d in self.dimensions} | set(self.options)
        tensors = {a.name for a in self.arguments if a.kind != "scalar"}
        for a in self.arguments:
            if a.stride_of is not None and a.stride_of[0] not in tensors:
                yield f": scalar argument {a.name!r} is a stride of {a.stride_of[0]!r}, which is no tensor argument"
            if a.kind == "scalar" and a.stride_of is None and a.name not in names:
                yield f": scalar argument {a.name!r} is neither a dimension nor an option"
            if a.kind == "output" and a.optional and a.name not in self.options:
                yield f": no option {a.name!r} asks for the optional output of that name"
            for unknown in set(a.shape) - names:
                yield f": argument {a.name!r} has an unknown dimension {unknown!r}"
        for name in set(self.option_min) - set(self.options):
            yield f": `option_min` names {name!r}, which is not one of its options"
        for target, dtypes in self.dtypes.items():
            for dtype in set(dtypes) - set(self.tolerance):
                yield f": no tolerance for {dtype} of target {target!r}"
        if not any(b.role == "reference" for b in self.baselines):
            yield " has no baseline of role 'reference' to be compared with"

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
            raise UsageError(f"workload {text!r} lacks {', '.join(missing)}; e.g. {self.example(target).key}")
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

    def launch(self, target: str, point: Mapping[str, Value], workload: Workload, limits: Limits) -> Launch:
        plan = self.plan(target, point, workload)
        return Launch(
            grid=plan.grid(dict(workload.dims), limits.multiprocessors),
            block=(plan.threads, 1, 1),
            smem_bytes=plan.smem_bytes,
            cluster=plan.cluster,
            alignment=plan.alignment,
            programmatic=plan.programmatic,
        )

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


def kernel_digest(folder: Path) -> str:
    """sha256 over what decides a search: the folder's Python files and templates, but for the export's frontend, and the
    device headers that kernels share. The kernel need not be loaded for that, and may lie anywhere."""
    kept = {".py", ".j2", ".cuh", ".h"}
    files = [*folder.rglob("*"), *(template_root() / "_shared").rglob("*")]
    digest = hashlib.sha256()
    for name, content in sorted((p.name, p.read_bytes()) for p in files if p.suffix in kept and p.name != FRONTEND_FILE):
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
    raise UnknownNameError("kernel", name, kernel_names())


_loaded: dict[Path, Kernel] = {}


def load_kernel(name: str) -> Kernel:
    """The `KERNEL` of templates/<name>/kernel.py, or of the folder that `name` is a path to.

    Raises UnknownNameError, or KernelError if there is no such file or it does not state a problem.
    """
    folder = find_kernel(name)
    if folder in _loaded:
        return _loaded[folder]
    path = folder / "kernel.py"
    # The folder is imported as a package of a private name, so that kernel.py can be split: from .space import ...
    package = f"_evo_kernel_{folder.name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(package, path, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise KernelError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    try:
        spec.loader.exec_module(module)
    except KernelError:
        raise
    except Exception as error:
        raise KernelError(f"{path} fails on import: {type(error).__name__}: {error}") from error
    kernel = getattr(module, "KERNEL", None)
    if not isinstance(kernel, Kernel):
        raise KernelError(f"{path} must define KERNEL = evo.problem.kernel.Kernel(...)")
    object.__setattr__(kernel, "folder", folder)
    _loaded[folder] = kernel
    return kernel
