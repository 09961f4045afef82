"""evo new: the folder of a new kernel, small and complete, or made around an existing CUDA source."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from evo.cli.options import Json, answer
from evo.errors import CompileError, UnknownNameError, UsageError, error_line
from evo.problem.kernel import DTYPE_BYTES, Argument
from evo.problem.loading import UNFILLED, kernel_names, own_notations, unfilled
from evo.problem.render import Source, code_of, define_macros, definitions, template_environment, uses
from evo.report.terminal import Terminal
from evo.targets import answers, compile_source, find_target

_NOTATION, _ENTRY_POINT = next((n, n.entry_point) for n in own_notations() if n.entry_point is not None)
"""The language whose sources can be adopted, and how they declare their entry points."""
(_TARGET,) = _NOTATION.targets
_ARCH = find_target(_TARGET).example_arch
_STARTER = Path(__file__).with_name(f"_starter{_NOTATION.suffix}")
_TEMPLATE = f"{_TARGET}{_NOTATION.suffix}"
_THREADS = re.compile(r"block_?(size|dim)?_?x?|n?_?threads?(_per_block|_x)?|tpb", re.IGNORECASE)
_FACT = re.compile(r"k?warp_?size", re.IGNORECASE)
"""Names of facts of the hardware, which are not to be searched."""
_TYPES = {
    "float32": ("float", "float2", "float4"),
    "float64": ("double", "double2"),
    "float16": ("__half", "half", "__half2", "half2"),
    "bfloat16": ("__nv_bfloat16", "nv_bfloat16", "__nv_bfloat162", "nv_bfloat162"),
    "int32": ("int", "unsigned", "unsigned int", "int32_t", "uint32_t", "int2", "int4"),
    "int64": ("long", "long long", "unsigned long", "unsigned long long", "int64_t", "uint64_t", "size_t"),
    "int8": ("char", "signed char", "int8_t"),
    "uint8": ("unsigned char", "uint8_t"),
    "bool": ("bool",),
}
_DTYPES = {name: dtype for dtype, names in _TYPES.items() for name in names}


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the kernel, and of the folder to make.")],
    cu: Annotated[Path | None, typer.Option("--cu", metavar="FILE.cu", help="CUDA source to search.")] = None,
    entry: Annotated[str | None, typer.Option(help="The __global__ function of a source that has several.")] = None,
    json: Json = False,
) -> None:
    """Write the folder of a new kernel: a small complete one to change, or one around your own CUDA source."""
    folder = Path(name)
    if not (name.isascii() and name.isidentifier()):
        raise UsageError(f"{name!r} cannot be a kernel's name: use letters, digits and underscores, no digit first")
    if name in kernel_names():
        raise UsageError(f"{name!r} is the name of a kernel that comes with evo: choose another; nothing was written")
    if folder.exists():
        raise UsageError(f"{name} exists: choose another name, or remove it; nothing was written")
    if cu is not None:
        files, facts = _adopt(cu, entry)
    elif entry is not None:
        raise UsageError("--entry names a function of the file given with --cu, which is missing")
    else:
        starters = [(n.targets[0], path) for n in own_notations() if (path := _STARTER.with_suffix(n.suffix)).is_file()]
        files = {f"{target}{path.suffix}": path.read_text() for target, path in starters}
        facts = _facts(files[_TEMPLATE], _STARTER, "vector_add", {"block_size_x": 256, "per_thread": 4})
    facts |= {"name": name, "file": cu and cu.name, "mark": UNFILLED}
    environment = template_environment(_STARTER.parent)
    environment.filters["literal"] = lambda value: repr(value).replace("'", '"')
    for file in ("kernel.py",) if cu else ("kernel.py", "function.py"):
        files[file] = environment.get_template(f"_{file}.j2").render(facts)
    try:
        for path, text in ((folder / file, text) for file, text in files.items()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}): run evo new in a folder of yours") from error
    steps = [f"evo check {name}" if answers(_TARGET) else f"evo check {name} --arch {_ARCH}"]  # without a GPU it compiles
    record = {
        "folder": name,
        "files": sorted(files),
        "entry": facts["entry"],
        "parameters": facts["parameters"],
        "to_fill_in": [{"line": line, "what": what} for line, what in unfilled(folder / "kernel.py")],
        "next": steps if cu else [f"evo check {name} --target cpu", f"evo search {name} --target cpu --budget 30s", *steps],
    }
    answer(json, record, _print_new)


def _print_new(console: Terminal, record: dict[str, Any]) -> None:
    folder = record["folder"]
    console.say(f"wrote {', '.join(f'{folder}/{file}' for file in record['files'])}")
    found = "; ".join(f"{name} in {', '.join(map(str, values))}" for name, values in record["parameters"].items())
    found = found or "nothing yet: give kernel.py parameters that the source uses as macros"
    if "function.py" in record["files"]:
        found = f"on a GPU {found}; on a CPU threads, chunk"
    console.say(f"to be searched: {found}")
    for place in record["to_fill_in"]:
        console.say(f"fill in {folder}/kernel.py, line {place['line']}: {place['what']}")
    console.say(f"{'then' if record['to_fill_in'] else 'next'}: {'; '.join(record['next'])}")


def _adopt(file: Path, entry: str | None) -> tuple[dict[str, str], dict[str, Any]]:
    """The files of the folder, and the facts for its kernel.py. Raises UsageError for a source that is no CUDA kernel or
    does not compile, DeviceError without a compiler."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--cu {file} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from error
    known = list(dict.fromkeys(found["name"] for found in _ENTRY_POINT.finditer(code_of(text))))
    if not known:
        raise UsageError(f"--cu {file} has no entry point: a kernel is a function declared __global__ void NAME(...)")
    if entry is None and len(known) > 1:
        raise UsageError(f"--cu {file} has several entry points: choose one with --entry, of {', '.join(known)}")
    if entry is not None and entry not in known:
        raise UnknownNameError(f"entry point of {file}", entry, known)
    code = code_of(text)
    used = uses(code)
    numbers = {n: value.strip("()uUlL") for n, value, _ in definitions(code) if n in used and not _FACT.fullmatch(n)}
    undefined, headers = _compile(file, entry or known[0])
    choices = {name: int(value) for name, value in numbers.items() if value.isdigit()} | undefined
    return {_TEMPLATE: text, **headers}, _facts(text, file, entry or known[0], choices)


def _compile(file: Path, entry: str) -> tuple[dict[str, int], dict[str, str]]:
    """A value for each name that nothing defines, and the file's own headers. Raises UsageError if it does not compile."""
    undefined: dict[str, int] = {}
    while True:
        text = define_macros(file, _NOTATION, entry, undefined, ())
        folders = (str(file.resolve().parent),)
        source = Source(text=text, target=_TARGET, language=_NOTATION.name, entry=entry, include_dirs=folders)
        try:
            compile_source(source, _ARCH, Path())
            return undefined, source.includes
        except CompileError as error:
            more = set(re.findall(r'identifier "(\w+)" is undefined', str(error))) - set(undefined)
            if not more:
                raise UsageError(
                    f"--cu {file} does not compile for {_ARCH}{''.join(f' with {n}={v}' for n, v in undefined.items())}:"
                    f" {error_line(str(error))} (NVRTC compiles device code only: leave out host code and its headers)"
                ) from None
            undefined |= {name: 256 if _THREADS.fullmatch(name) else 4 for name in sorted(more)}


def _facts(text: str, file: Path, entry: str, numbers: Mapping[str, int]) -> dict[str, Any]:
    """The facts for kernel.py. Raises UsageError for a parameter that cannot be passed."""
    arguments = list(_arguments(code_of(text), entry))
    tensors, scalars = ([a for a in arguments if (a.kind == "scalar") is wanted] for wanted in (False, True))
    for a in scalars:
        if a.dtype not in ("int32", "int64", "float32"):
            raise UsageError(
                f"{file}: parameter {a.name!r} of {entry} is neither a pointer nor an int, long long or float: change it, or"
                " make it a macro"
            )
    dtype = next((a.dtype for a in tensors if a.dtype in DTYPE_BYTES), "float32")
    sizes = [a.name for a in scalars if a.dtype != "float32"]
    # A large number, or one with a single letter as its name, is rather a size of the problem than a choice.
    fixed = tuple(name for name, value in numbers.items() if value > 1024 or len(name) == 1)
    choices = {name: value for name, value in numbers.items() if name not in fixed}
    dimensions = [*sizes, *fixed] or ["n"]
    shape = tuple(dimensions) if len(dimensions) == 1 else ()
    block = next((name for name in choices if _THREADS.fullmatch(name)), "")
    return {
        "entry": entry,
        "dtype": dtype,
        "arguments": [
            replace(a, shape=shape, dtype="problem" if a.dtype in ("", dtype) else a.dtype) if a in tensors else a
            for a in arguments
        ],
        "dimensions": dimensions,
        "sizes": sizes,
        "fixed": fixed,
        "unknown": [a.name for a in tensors if not a.dtype],
        "options": {a.name: 1.0 for a in scalars if a.dtype == "float32"},
        "workload": ",".join([*(f"{d}={numbers.get(d, 1024)}" for d in dimensions), f"dtype={dtype}"]),
        "parameters": {name: _values(name, value) for name, value in choices.items()},
        "default": choices,
        "threads": f'point["{block}"]' if block else "256",
    }


def _arguments(code: str, entry: str) -> Iterator[Argument]:
    """The arguments of an entry point: tensors for pointers, and scalars. The dtype of an unknown type is empty."""
    begin = next(found.end() for found in _ENTRY_POINT.finditer(code) if found["name"] == entry)
    for text in code[begin : code.index(")", begin)].split(","):
        *type_, name = re.sub(r"\b(__restrict__|__restrict|volatile|const)\b|\[\s*\]|[*&]", " ", text).split() or [""]
        pointers = text.count("*") + text.count("[")
        dtype = _DTYPES.get(" ".join(type_), "") if pointers < 2 else ""
        kind = "output" if pointers else "scalar"
        if pointers and re.search(r"\bconst\b", text.partition("*")[0]):
            kind = "input"
        if name not in ("", "void"):
            yield Argument(name=name, kind=kind, dtype=dtype)  # type: ignore[arg-type]


def _values(name: str, default: int) -> tuple[int, ...]:
    """The values to try: powers of two around the default."""
    power = 256 if _THREADS.fullmatch(name) else 1 << max(default.bit_length() - 1, 0)
    factors = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4) if _THREADS.fullmatch(name) else (1 / 4, 1 / 2, 1, 2, 4)
    return tuple(sorted({default, *(int(power * f) for f in factors if power * f >= 1)})) if default else (0, 1)
