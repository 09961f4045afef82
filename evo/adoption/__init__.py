"""What a source shows of the kernel in it: its arguments and their roles, its choices and, in CUDA, its launch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jinja2
from jinja2.meta import find_undeclared_variables

from evo.adoption.geometry import (
    AXES,
    Geometry,
    Tree,
    block_axes,
    bounds_of,
    counted_by_grid,
    geometry_of,
    in_python,
    numbers_of,
)
from evo.adoption.roles import Role, roles_of
from evo.errors import CompileError, TemplateError, UnknownNameError, UsageError, error_line
from evo.problem.constants import as_parameters, host_filled
from evo.problem.fill import fill_plain
from evo.problem.kernel import DTYPE_BYTES, Argument
from evo.problem.loading import own_notations
from evo.problem.plain import NAME, EntryPoint, Parameter, PlainSource, read_source, text_of
from evo.problem.render import Source, template_environment
from evo.problem.space import Value
from evo.targets import compile_source, find_target

NOTATION = next(n for n in own_notations() if n.declares_kernels)
"""The language of the kernels for a GPU that can be adopted."""
(TARGET,) = NOTATION.targets
_PLAIN_CODE = next(n for n in own_notations() if n.plain and not n.declares_kernels)
(CPU,) = _PLAIN_CODE.targets
FILES = {TARGET: f"{TARGET}{NOTATION.suffix}", CPU: f"{CPU}{_PLAIN_CODE.suffix}"}
"""What a source is called in the folder of a kernel, by target."""
ARCH = find_target(TARGET).example_arch

_THREADS = re.compile(
    r"(num_?|n_?)?(threads?|block|tpb|work_?group|wg|local)(_?(size|dim|per_block|count|num))?_?[xyz]?", re.IGNORECASE
)
_FACT = re.compile(r"k?warp_?size|__.*|cuda.*", re.IGNORECASE)
"""Names of facts of the hardware or of the compiler, which are not to be searched."""
_TYPES = {
    "float32": ("float", "float2", "float3", "float4"),
    "float64": ("double", "double2"),
    "float16": ("__half", "half", "__half2", "half2", "at::Half", "c10::Half"),
    "bfloat16": ("__nv_bfloat16", "nv_bfloat16", "__nv_bfloat162", "nv_bfloat162", "at::BFloat16", "c10::BFloat16"),
    "int32": ("int", "unsigned", "unsigned int", "int32_t", "uint32_t", "int2", "int3", "int4", "uint"),
    "int64": ("long", "long long", "unsigned long", "unsigned long long", "int64_t", "uint64_t", "size_t", "long int"),
    "int16": ("short", "unsigned short", "int16_t", "uint16_t"),
    "int8": ("char", "signed char", "int8_t"),
    "uint8": ("unsigned char", "uint8_t", "uchar", "uchar4"),
    "bool": ("bool",),
}
_DTYPES = {name: dtype for dtype, names in _TYPES.items() for name in names}
_MASK = 1 << 26
"""From this on a number is no size."""
_JINJA = re.compile(r"\{%-?\s*[a-z]|\{\{-?\s*[A-Za-z_][^{};,]*\}\}")
"""A statement or an expression of a Jinja template, which inline PTX, as in "{%0, %1}", and nested lists of C++ are not."""
_IN_C = re.compile(r'extern\s+"C"\s+void')
_CHUNKS = (1024, 8192, 65536)
FLOATS = ("float32", "opmath")
"""Dtypes of scalars that are options: a double is one of the problem's where that is of doubles."""
BEFORE = "_before"
"""What is put behind the name of an argument that is updated in place, for what it holds before."""


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """A kernel of a file, as its kernel.py states it."""

    entry: str
    target: str
    dtypes: tuple[str, ...]
    arguments: tuple[Argument, ...]
    dimensions: tuple[str, ...]
    sizes: Mapping[str, int]
    """Sizes of the example."""
    fixed: tuple[str, ...] = ()
    """Dimensions that are macros."""
    options: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Values by name; those of the number of a CPU's threads are empty, as they depend on the machine."""
    default: Mapping[str, Value | None] = field(default_factory=dict)
    """None for a number of a CPU's threads that the source does not show."""
    threads: str = ""
    """Threads of a block, in Python; empty where the file does not show it."""
    tiles: str = ""
    axes: bool = False
    smem_bytes: str = "0"
    is_unsized: bool = False
    """Whether the file does not show the bytes of an array that is extern __shared__."""
    questions: tuple[str, ...] = ()
    """What only the author knows of the arguments."""
    left_out: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    variables: Mapping[str, str | int] = field(default_factory=dict)
    """Variables of a Jinja template, with a value of each."""

    @property
    def parameters_of_entry(self) -> tuple[Argument, ...]:
        """The arguments that the entry point takes, as `Kernel.parameters` has them."""
        begun = {a.initial for a in self.arguments}
        return tuple(a for a in self.arguments if a.name not in begun)

    def as_template(self, text: str) -> str:
        """A Jinja template of somebody's as one of ours: its variables are parameters, or the type of the elements."""
        tensor = next(a.name for a in self.arguments if a.kind != "scalar")
        given = {n: f"types.{tensor}" if isinstance(v, str) else f"p.{n}" for n, v in self.variables.items()}
        linked = re.sub(rf'(?<!"C" )(__global__(?=[^;{{}}]*?\b{self.entry}\s*\())', r'extern "C" \1', text, count=1)
        return "".join(f"{{% set {name} = {value} %}}\n" for name, value in given.items()) + linked


def adopt(file: Path, entry: str | None, target: str = "") -> Adopted:
    """The kernel of a file, or the one that `entry` names of several. target: what the file declares if left out; in C++ for
    the CPU, which is not compiled, kernels are the functions with extern "C". Raises UsageError for a source that is no
    kernel or does not compile, DeviceError without a compiler."""
    try:
        text, filled = text_of(file), dict[str, str | int]()
        if _JINJA.search(text):
            text, filled = _rendered(text)
    except (TemplateError, jinja2.TemplateError) as error:
        what = f"{file} is no Jinja template: " if isinstance(error, jinja2.TemplateError) else ""
        raise UsageError(f"--cu {what}{error}") from None
    source = read_source(text)
    if target == CPU or not (target or source.entry_points or file.suffix == NOTATION.suffix):
        target, source = CPU, read_source(_IN_C.sub("__global__ void", text))
    known = list(source.entry_points)
    if not known:
        raise UsageError(
            f"--cu {file} has no entry point: a kernel is a function declared __global__ void NAME(...), or, in C++ for the"
            ' CPU, declared extern "C" void NAME(...)'
        )
    if entry is None and len(known) > 1:
        raise UsageError(f"--cu {file} has several entry points: choose one with --entry, of {', '.join(known)}")
    if entry is not None and entry not in known:
        raise UnknownNameError(f"entry point of {file}", entry, known)
    return _Reading(file, source, source.entry_points[entry or known[0]], filled, target or TARGET).adopted()


def _rendered(text: str) -> tuple[str, dict[str, str | int]]:
    """A Jinja template with values for its variables, which are guessed by their names; and these."""
    environment = template_environment()
    names = sorted(find_undeclared_variables(environment.parse(text)))
    filled = {name: "float" if re.search(r"type|real", name) else _guess(name, names) for name in names}
    return environment.from_string(text).render(filled), filled


class _Reading:
    """One kernel of a file."""

    def __init__(
        self, file: Path, source: PlainSource, entry: EntryPoint, filled: Mapping[str, str | int], target: str
    ) -> None:
        self._file, self._whole, self._filled, self._target = file, source, filled, target
        self._part, self._left_out = source.part(entry.name, file.parent) if target == TARGET else (source, [])
        self._entry, self._numbers = self._part.entry_points[entry.name], numbers_of(self._part)
        self._constants = {c.name: c.sizes for c in host_filled(source, self._part)}
        if self._constants and filled:
            raise UsageError(
                f"--cu {file}: nothing fills __constant__ {', '.join(self._constants)} of a Jinja template: make it a"
                f" parameter of {entry.name}"
            )
        names = [*(p.name for p in self._entry.parameters), *self._constants]
        try:
            self._handed = as_parameters(file, source, self._part, entry.name, names)
        except TemplateError as error:
            raise UsageError(f"--cu {error}") from None
        taken = self._handed.entry_points[entry.name].parameters
        self._parameters = [p._replace(pointers=min(p.pointers, 1)) if p.name in self._constants else p for p in taken]
        self._types = self._of_templates()
        self._guessed = {name: value for name, value in filled.items() if isinstance(value, int)}

    def adopted(self) -> Adopted:
        roles = roles_of(self._handed, self._handed.entry_points[self._entry.name])
        arguments, unsure = list[Argument](), list[str]()
        for p in self._parameters:
            arguments += self._arguments(p, roles.get(p.name), unsure)
        begun = {a.initial for a in arguments}
        arguments.sort(key=lambda a: a.name in begun)  # these are no parameters
        if not any(a.kind == "output" for a in arguments):
            raise UsageError(
                f"{self._file}: {self._entry.name} writes to none of its arguments: it has no result to search by"
            )
        choices, numbers = self._choices()
        headers = self._beside() if self._target == CPU else self._compile(choices, numbers, unsure)
        scalars = [a.name for a in arguments if a.kind == "scalar" and a.dtype in ("int32", "int64")]
        known = [*counted_by_grid(self._whole, self._entry, [*scalars, *numbers], choices), *scalars, *numbers]
        dimensions = known or ["n"]
        geometry = geometry_of(self._whole, self._entry, known, choices)
        geometry, choices, threads = self._with_threads(geometry, choices)
        tensors = [a for a in arguments if a.kind != "scalar"]
        dtype = next((a.dtype for a in tensors if a.dtype in DTYPE_BYTES), "float32")
        dtypes = self._types or (dtype,)
        if dtypes == ("float64",):
            arguments = [replace(a, dtype="opmath") if _is_double(a) else a for a in arguments]
        if wrong := next(filter(_is_double, arguments), None):
            raise UsageError(
                f"{self._file}: parameter {wrong.name!r} of {self._entry.name} is a double beside elements of"
                f" {' and '.join(dtypes)}: make it a float"
            )
        shape = tuple(dimensions) if len(dimensions) == 1 else ()
        unknown = [a.name for a in tensors if not a.dtype]
        shapes = {a.name: self._shape(a.name, dimensions) if a.name in self._constants else shape for a in tensors}
        unshown = {*self._unshown(dimensions[0])} if shape else set[str]()
        unshown |= shapes.keys() if unknown or not scalars else set()
        asked = [n for n in shapes if not shapes[n] or (n not in self._constants and n in unshown)]
        where = f"in the dimensions {', '.join(dimensions)} (add others to `dimensions` and `workloads`)"
        questions = [f"the shapes of {', '.join(asked)} {where}"] if asked else []
        questions += [f"the dtype of {', '.join(unknown)}"] if unknown else []
        return Adopted(
            entry=self._entry.name,
            target=self._target,
            dtypes=dtypes,
            arguments=tuple(
                replace(a, shape=shapes[a.name], dtype="problem" if a.dtype in ("", *dtypes) else a.dtype)
                if a.name in shapes else a
                for a in arguments
            ),
            dimensions=tuple(dimensions),
            sizes=usual_sizes(dimensions, numbers),
            fixed=tuple(numbers),
            options={a.name: 1.0 for a in arguments if a.kind == "scalar" and a.dtype in FLOATS},
            parameters=choices,
            default={
                name: threads.get(name, self._default(name, values) if values else self._numbers.get(name))
                for name, values in choices.items()
            },
            questions=(*questions, *unsure),
            left_out=() if self._filled else tuple(self._left_out),
            variables=self._filled,
            headers=headers,
            **self._launch(geometry, known),  # type: ignore[arg-type]
        )

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _of_templates(self) -> tuple[str, ...]:
        """The dtypes for which a template is instantiated, if it is one of the type of its elements."""
        places = [i for i, (kind, _) in enumerate(self._entry.templates) if kind in ("typename", "class")]
        if not places:
            return ()
        made = (text for place in places for text in self._instances(place))
        found = dict.fromkeys(_DTYPES[t] for t in made if _DTYPES.get(t) in DTYPE_BYTES)
        return tuple(found) or ("float32",)

    def _instances(self, place: int) -> list[str]:
        """What the launches in the file give a template parameter."""
        own = (launched.templates for launched in self._whole.launches if launched.name == self._entry.name)
        return [given[place] for given in own if place < len(given)]

    def _arguments(self, parameter: Parameter, role: Role | None, unsure: list[str]) -> Iterator[Argument]:
        name = parameter.name
        of_template = parameter.type in {n for _, n in self._entry.templates}
        dtype = self._types[0] if of_template and self._types else _DTYPES.get(parameter.type, "")
        if role is None:
            if dtype not in ("int32", "int64", "float32", "float64"):
                raise UsageError(
                    f"{self._file}: parameter {name!r} of {self._entry.name} is neither a pointer nor an int, long long,"
                    " float or double: change it, or make it a macro"
                )
            yield Argument(name=name, kind="scalar", dtype=dtype)
            return
        dtype = dtype if parameter.pointers < 2 else ""
        if (role.unsure or not (role.read or role.written)) and not parameter.is_const:
            unsure.append(f"whether {name} is an input or an output")
        if not role.written or parameter.is_const:
            kind = "input" if role.read or parameter.is_const else "output"
            yield Argument(name=name, kind=kind, dtype=dtype)  # type: ignore[arg-type]
        elif not role.read or (role.first == "written" and role.is_plainly_written):
            yield Argument(name=name, kind="output", dtype=dtype)
        elif role.added:
            unsure.append(f"what {name} holds before a call, to which the kernel adds: zeros, or an input")
            yield Argument(name=name, kind="output", dtype=dtype, initial="zeros")
        else:
            before = f"{name}{BEFORE}"
            yield Argument(name=name, kind="output", dtype=dtype, initial=before)
            yield Argument(name=before, kind="input", dtype=dtype)

    def _of_constants(self) -> set[str]:
        """Names that the sizes of constants are made of, which are no choices."""
        values = {d.name: d.value for d in self._part.definitions}
        found, waiting = set[str](), [n for sizes in self._constants.values() for n in NAME.findall(" ".join(sizes))]
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                waiting += NAME.findall(values.get(name, ""))
        return found

    def _unshown(self, dimension: str) -> Iterator[str]:
        """Pointers that are no vectors of the only dimension, as the code multiplies by it to find a place, or that have an
        element a block or thread, or one that the data choose."""
        code, place = self._handed.code(self._entry.node), r"(block|thread)Idx\s*\.\s*[xyz]\s*\]"
        is_matrix = re.search(rf"\*\s*{dimension}\b(?!\s*\*)|\b{dimension}\s*\*", code)
        for name in (p.name for p in self._parameters if p.pointers):
            if is_matrix or re.search(rf"\b{name}\s*\[\s*{place}|\batomic\w+\s*\(\s*&?\s*{name}\b", code):
                yield name

    def _shape(self, name: str, dimensions: Collection[str]) -> tuple[str, ...]:
        """The shape of a constant, in dimensions; empty where its sizes are no such, or their order is not seen."""
        sizes = self._constants[name]
        factors = tuple(factor.strip(" ()") for size in sizes for factor in size.split("*"))
        is_seen = len(factors) == len(sizes) or len({*factors}) == 1
        return factors if is_seen and {*factors} <= {*dimensions} else ()

    # -- choices ------------------------------------------------------------------------------------------------------

    def _choices(self) -> tuple[dict[str, tuple[Value, ...]], dict[str, int]]:
        """What is to be searched, and sizes of the problem that are macros: a large number, or one with a single letter as
        its name, or that the place of a thread is compared with, is rather a size than a choice."""
        bounds = bounds_of(self._part, self._entry, [d.name for d in self._part.definitions])
        used, asked, known = self._handed.uses, self._part.asked(self._entry.name), self._numbers
        defined = {d.name for d in self._part.definitions}
        bounds |= self._of_constants()
        found, sizes = {name: values_around(name, value) for name, value in self._guessed.items()}, dict[str, int]()
        for d in self._part.definitions:
            if d.follows or d.name not in used or _FACT.fullmatch(d.name) or (number := known.get(d.name)) is None:
                continue
            if d.name in asked:
                found[d.name] = tuple(sorted({number, 0, *asked[d.name]}))
            elif number > 1024 or len(d.name) == 1 or d.name in bounds:
                if number < _MASK:
                    sizes[d.name] = number
            else:
                found[d.name] = values_around(d.name, number)
        for name in (n for n in asked if n not in defined and not _FACT.fullmatch(n)):
            found[name] = asked[name] if len(asked[name]) > 1 else tuple(sorted({0, 1, *asked[name]}))
            self._guessed[name] = asked[name][0] if asked[name] else 0
        for place, (kind, name) in enumerate(self._entry.templates):
            if kind not in ("typename", "class"):
                numbers = tuple(sorted({int(text) for text in self._instances(place) if text.isdigit()}))
                usual = values_around(name, numbers[0] if numbers else _guess(name))
                found[name] = (False, True) if kind == "bool" else numbers if len(numbers) > 1 else usual
        if self._target == CPU:
            if threads := self._whole.spelled("threads"):
                found[threads] = ()
            if chunk := self._whole.spelled("chunk"):
                sizes.pop(chunk, None)
                self._guessed.setdefault(chunk, _CHUNKS[1])
                found[chunk] = tuple(sorted({*_CHUNKS, known.get(chunk, _CHUNKS[1])}))
        return found, sizes

    def _default(self, name: str, values: tuple[Value, ...]) -> Value:
        own = self._numbers.get(name), self._guessed.get(name, _guess(name)), values[0]
        return next(value for value in own if value is not None and value in values)

    def _beside(self) -> tuple[str, ...]:
        """The headers in the file's folder that it includes, and that these do."""
        found, waiting = list[str](), [self._file.name]
        while waiting:
            text = text_of(self._file.parent / waiting.pop())
            named = (n for n in re.findall(r'^\s*#\s*include\s*"([^"\n]+)"', text, re.MULTILINE) if ".." not in n)
            own = (n for n in named if (self._file.parent / n).is_file())
            found += (more := [n for n in own if n not in found])
            waiting += more
        return tuple(found)

    def _compile(
        self, choices: dict[str, tuple[Value, ...]], sizes: dict[str, int], unsure: list[str]
    ) -> tuple[str, ...]:
        """Adds choices for names that nothing defines, and gives the file's own headers. Raises UsageError if it does not
        compile, unless values that were guessed may be why."""
        undefined = {name: self._guessed[name] for name in choices if name in self._guessed}
        types = {p.name: NOTATION.types[self._types[0]] for p in self._parameters if self._types and p.pointers}
        names = [p.name for p in self._parameters]
        while True:
            values = {name: self._default(name, values) for name, values in choices.items()} | {**sizes}
            try:
                text = fill_plain(self._file, self._entry.name, values, types, (), True, self._whole.bytes.decode(), names)
                folders = (str(self._file.resolve().parent),)
                name = self._entry.name
                source = Source(text=text, target=TARGET, language=NOTATION.name, entry=name, include_dirs=folders)
                compile_source(source, ARCH, Path())
                return tuple(source.includes)
            except (CompileError, TemplateError) as error:
                more = set(re.findall(r'identifier "(\w+)" is undefined', str(error))) - set(undefined)
                more &= self._part.uses - self._part.declared
                if not more and undefined and isinstance(error, CompileError):
                    with_ = ", ".join(f"{n}={v}" for n, v in undefined.items())
                    unsure.append(f"values with which it compiles; with {with_}: {error_line(str(error))}")
                    return ()
                if not more or isinstance(error, TemplateError):
                    raise UsageError(
                        f"--cu {self._file} does not compile for {ARCH}: {error_line(str(error))} (NVRTC compiles device"
                        " code, without the headers of the C++ library)"
                    ) from None
                undefined |= {name: _guess(name, {*more, *choices}) for name in sorted(more)}
                sizes |= {name: undefined[name] for name in sorted(more & self._of_constants())}
                choices |= {name: values_around(name, undefined[name]) for name in sorted(more - sizes.keys())}
                self._guessed |= undefined

    # -- the launch ---------------------------------------------------------------------------------------------------

    def _with_threads(
        self, geometry: Geometry, choices: dict[str, tuple[Value, ...]]
    ) -> tuple[Geometry, dict[str, tuple[Value, ...]], dict[str, int]]:
        """The launch, with the number of threads as a choice where the code looks at blockDim and has no array for so many;
        choices with these; and what they were."""
        axes, code = block_axes(self._part, self._entry), self._part.code(self._entry.node)
        arrays = re.findall(r"__shared__[^;]*?((?:\[[^\]]*\])+)", code)
        is_free = not any(re.search(r"\d", a) for a in arrays) and not self._entry.bounds and "blockDim" in code
        threads: list[Tree] = list(geometry.threads or [None] * axes)
        while len(threads) > axes and threads[-1] == 1:
            threads.pop()
        threads += [1] * (axes - len(threads))
        replaced, usual = dict[Tree, Tree](), dict[str, int]()
        for place, size in enumerate(threads):
            axis = f"blockDim.{AXES[place]}"
            own = [n for n in choices if _THREADS.fullmatch(n) and (axes == 1 or n.lower().endswith(AXES[place]))]
            if size is None and own:
                replaced[axis] = threads[place] = own[0]
            elif size in replaced:
                replaced[axis] = threads[place] = replaced[size]
            elif is_free and (size is None or (isinstance(size, int) and size > 1 and _fits(geometry, place, size))):
                name = "threads" if axes == 1 else f"threads_{AXES[place]}"
                usual[name] = size or (256 if axes == 1 else 16)
                values = values_around("threads", usual[name]) if axes == 1 else (1, 2, 4, 8, 16, 32, 64)
                choices = {**choices, name: tuple(sorted({*values, usual[name]}))}
                replaced[axis] = threads[place] = name
            elif size is not None:
                replaced[axis] = size
        tiles = list[tuple[Tree, Tree]]()
        for place, (whole, size) in enumerate(geometry.tiles):
            is_block = place < min(axes, len(geometry.threads)) and size == geometry.threads[place]
            tiles.append((whole, threads[place] if is_block else _replaced(size, replaced)))
        smem = _replaced(geometry.smem_bytes, replaced)
        return Geometry(() if None in threads else tuple(threads), tuple(tiles), smem), choices, usual

    def _launch(self, geometry: Geometry, dimensions: Collection[str]) -> dict[str, object]:
        block = tuple(in_python(part, dimensions, of_workload=True) for part in geometry.threads)
        names = [in_python(size, dimensions, of_workload=True) for _, size in geometry.tiles]
        cut = (in_python(whole, dimensions, of_workload=False) for whole, _ in geometry.tiles)
        tiles = [f'("{text}", {size})' for text, size in zip(cut, names, strict=True)]
        has_dynamic = bool(re.search(r"extern\s+__shared__", self._part.code(self._entry.node)))
        is_unsized = has_dynamic and not geometry.smem_bytes
        shows_block = not any("blockDim" in text for text in block)
        shown = shows_block and not any("blockDim" in text for text in names) and not is_unsized
        return {
            "threads": (block[0] if len(block) == 1 else f"({', '.join(block)})") if block and shows_block else "",
            "tiles": "".join(f"{tile}, " for tile in tiles).strip() if shown else "",
            "axes": len(tiles) > 1,
            "is_unsized": is_unsized,
            "smem_bytes": in_python(geometry.smem_bytes, dimensions, of_workload=True),
        }


def _fits(geometry: Geometry, axis: int, threads: int) -> bool:
    """Whether a block's piece grows with its threads along an axis."""
    size = geometry.tiles[axis][1] if axis < len(geometry.tiles) else threads
    return bool(size == threads or f"blockDim.{AXES[axis]}" in str(size))


def _replaced(tree: Tree, instead: Mapping[Tree, Tree]) -> Tree:
    if isinstance(tree, tuple):
        return (tree[0], *(_replaced(part, instead) for part in tree[1:]))
    return instead.get(tree, tree)


def _guess(name: str, others: Collection[str] = ()) -> int:
    """A value for a name that nothing defines. others: such names beside it, as a block of two axes has two."""
    if not _THREADS.fullmatch(name):
        return 4
    along = [n for n in others if _THREADS.fullmatch(n) and n[:-1] == name[:-1] and n[-1].lower() in AXES]
    return 256 if len(along) < 2 else 32 if name[-1].lower() == "x" else 4


def _is_double(argument: Argument) -> bool:
    return argument.kind == "scalar" and argument.dtype == "float64"


def usual_sizes(dimensions: Sequence[str], known: Mapping[str, int]) -> dict[str, int]:
    """A size of each dimension: those that are known, and powers of two with which all together are some 2^20 elements."""
    free = [d for d in dimensions if d not in known]
    bits = max(20 - math.prod(known[d] for d in dimensions if d in known).bit_length() + 1, 4 * len(free))
    made = {d: 1 << (bits + place) // len(free) for place, d in enumerate(free)}
    return {d: known.get(d) or made[d] for d in dimensions}


def values_around(name: str, default: int) -> tuple[Value, ...]:
    """The values to try: powers of two around the default."""
    one_axis = _THREADS.fullmatch(name) and default >= 64
    power = 256 if one_axis else 1 << max(default.bit_length() - 1, 0)
    factors = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4) if one_axis else (1 / 4, 1 / 2, 1, 2, 4)
    return tuple(sorted({default, *(int(power * f) for f in factors if power * f >= 1)})) if default else (0, 1)
