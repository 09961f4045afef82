"""The manifest of a package: what lies in it, how it is launched, and where it comes from, read and made complete.

What is written leaves out what follows from the rest. `stated` says what a record is taken to say where it says nothing, a
workload is written as its key, and how all sources of a target are compiled stands once, under `targets`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
SAME = "same"
"""Choice of an option that is a dtype: the workload's."""
FORMAT_VERSION = 4
"""The version of manifests that is written and read."""
_LAUNCH = {
    "threads": "block",
    "tiles?": [("text", "count")],
    "blocks_per_tile?": "count",
    "blocks_per_multiprocessor?": "count or none",
    "smem_bytes?": "size",
    "cluster?": "count",
    "alignment?": "count",
    "programmatic?": "truth",
    "axes?": "truth",
    "blocks?": "count or none",
    "entry?": "text",
}
_COMPILED: Mapping[str, Any] = {"fixed": ["text"], "recipe": (None, {"flags": ["text"], "libraries?": ["text"]})}
_TIMING = {
    "stage": "text", "disturbed": "truth", "median_us": "number", "ratio": "number", "ratio_low": "number or none",
    "ratio_high": "number or none", "torch_us": "number or none",
}  # fmt: skip
_POINT = {
    "candidate": "text", "workload": "text", "timing?": (None, _TIMING), "record?": {"device?": "text or none"},
    "slowdown?": "number",
}  # fmt: skip
_SOURCE = {
    "target": "text",
    "arch": "text",
    "workload": "text",
    **{f"{name}?": shape for name, shape in _COMPILED.items()},
    "source": "text",
    "launch": {**_LAUNCH, "then?": [_LAUNCH], "workspace?": [("size", ["text"], "truth")]},
    "needs?": {"machine": "text", "features": (None, ["text"])},
    "measured_on?": "size",
    "jit?": (None, {
        "dimension": "text", "blanks": ["size"],
        "sizes": [{"first": "size", "last?": "size", "step?": "count", "launch?": {}, "growth?": {"*": "size"}}],
    }),
}  # fmt: skip
_SHAPE = {
    "format_version": "size",
    "evo_version": "text",
    "exported_at": "text",
    "kernel": {
        "name": "text",
        "title": "text",
        "replaces": "text",
        "entry": "text",
        "dimensions": [{"name": "text", "low": "size", "high": "size", "choices?": ["text"]}],
        "arguments": [{"name": "text", "kind": "text", "dtype": "text", "bytes?": "size", "alignment?": "count"}],
        "tolerance": {"*": {"atol": "number", "rtol": "number", "torch_factor": "number"}},
    },
    "targets": {"*": _COMPILED},
    "variants": [{**_SOURCE, **_POINT, "measured_arch?": "text", "binary?": "text or none", "points?": [_POINT]}],
    "general": [_SOURCE],
    "measured_on?": [{"torch?": "text"}],
    "files?": {"*": "text"},
}  # fmt: skip
"""What a manifest has as it is written: `key?` may be left out, "*" stands for any key, a list or tuple for its elements,
(None, x) for x or nothing. Further keys are allowed."""
_KINDS: Mapping[str, Any] = {
    "text": lambda v: isinstance(v, str),
    "truth": lambda v: isinstance(v, bool),
    "size": lambda v: type(v) is int and 0 <= v < 2**63,
    "count": lambda v: type(v) is int and 0 < v < 2**31,
    "block": lambda v: all(map(_KINDS["count"], v if type(v) is list and 0 < len(v) <= 3 else [v])),
    "number": lambda v: type(v) in (int, float) and math.isfinite(v) and v >= 0,
}


def read_manifest(path: Path) -> dict[str, Any]:
    """A package's manifest, with what was left out when it was written. Raises ImportError, in one sentence, for one that is
    not there or not as evo writes it."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest.get("format_version") if isinstance(manifest, dict) else None
        if type(version) is int and version != FORMAT_VERSION:
            fault = f"it is of format {version}, and this run time reads {FORMAT_VERSION}"
        else:
            fault = _misfit(manifest, _SHAPE, "it") or _fill(manifest) or _contradiction(manifest)
    except OSError as error:
        fault = f"it cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        fault = f"it is no JSON ({error})"
    if fault:
        raise ImportError(f"{path} is no manifest of an export: {fault}; export it again, or copy its folder whole")
    return dict(manifest)


def _misfit(value: Any, shape: Any, where: str) -> str:
    """How a value differs from a shape, as `_SHAPE` is; empty if it does not."""
    if isinstance(shape, str):
        kind, _, none = shape.partition(" or ")
        fits = (value is None and bool(none)) or _KINDS[kind](value)
        return "" if fits else f"{where} has {json.dumps(value)[:60]} where a {shape} belongs"
    if isinstance(shape, tuple) and shape[0] is None:
        return "" if value is None else _misfit(value, shape[1], where)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is no object"
        parts = [(n, part) for n, part in shape.items() if n != "*"]
        parts += [(n, shape["*"]) for n in value] if "*" in shape else []
        for name, part in parts:
            key = name if name in value else name.removesuffix("?")
            if key in value and (fault := _misfit(value[key], part, f"{where}.{key}")):
                return fault
            if key not in value and key == name:
                return f"{where} has no {name!r}"
        return ""
    if not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
        return f"{where} is no list" + (f" of {len(shape)}" if isinstance(shape, tuple) else "")
    shapes = shape if isinstance(shape, tuple) else shape * len(value)
    faults = (_misfit(part, one, f"{where}[{i}]") for i, (part, one) in enumerate(zip(value, shapes, strict=True)))
    return next(filter(None, faults), "")


def stated(manifest: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The records of a manifest, each with what it is taken to say where it says nothing, which goes for each key of a part
    that is an object. Raises LookupError for a target or machine that is not listed."""
    for v in manifest["variants"]:
        machine, points = manifest["measured_on"][v.get("measured_on", 0)], v.get("points", ())
        standing = "measured" if v.get("measured_arch", v["arch"]) == v["arch"] else "compiled"
        found = {"measured_on": 0, "measured_arch": v["arch"], "standing": standing, "instead_of": None, "points": []}
        built = {"spill_bytes": 0, "smem_static_bytes": 0, "launch": PLAIN, "jit": None}
        timed = {"timing": None, "record": {"device": machine["device"]} if "device" in machine else {}}
        yield v, {**manifest["targets"][v["target"]], **found, **built, **timed}
        yield from ((point, timed) for point in points)
    for g in manifest.get("general", ()):
        yield g, {**manifest["targets"][g["target"]], "launch": PLAIN}


def _fill(manifest: dict[str, Any]) -> str:
    """Has records say what they are taken to say, and what their workload's key does. Returns what is wrong with that; empty
    if nothing is."""
    manifest["measured_on"] = manifest.get("measured_on") or [{}]
    dimensions = {d["name"]: d.get("choices", ()) for d in manifest["kernel"]["dimensions"]}
    try:
        for record, assumed in stated(manifest):
            for name, value in assumed.items():
                record[name] = {**value, **record.get(name, {})} if isinstance(value, dict) else record.get(name, value)
            record["workload"] = _workload(record["workload"], dimensions)
    except (LookupError, TypeError, ValueError) as error:
        return f"a record is for a target, machine or workload that is not told whole ({error!r})"
    return ""


def compiled_in(kernel: Any) -> list[dict[str, Any]]:
    """Options that are constants of a binary. A module chooses by them as by sizes: off is 0, on is 1, and an option with
    choices is the place among them."""
    fixed, found = {name for names in kernel.compile_time_dims.values() for name in names}, list[dict[str, Any]]()
    for name in (name for name in kernel.options if name in fixed):
        choices = kernel.choices.get(name, ())
        found.append({"name": name, "low": 0, "high": max(1, len(choices) - 1), **({"choices": choices} if choices else {})})
    return found


def complete(manifest: dict[str, Any], kernel: Any) -> bool:
    """Has all records of a manifest that is older than some of its kernel's options which are compiled in say what these are
    at first. Whether there are such options."""
    dimensions = manifest["kernel"]["dimensions"]
    new = [d for d in compiled_in(kernel) if d["name"] not in {known["name"] for known in dimensions}]
    dimensions += new
    names = [d["name"] for d in new]
    for record in (*manifest["variants"], *manifest["general"]):
        record["fixed"] = [*record["fixed"], *(n for n in names if n in kernel.compile_time_dims[record["target"]])]
        for workload in (each["workload"] for each in (record, *record.get("points", ()))):
            workload["dims"] |= {n: kernel.number_of(n, kernel.options[n]) for n in names}
            workload["options"] |= {n: kernel.options[n] for n in names}
    return bool(new)


def _workload(key: str, dimensions: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A workload from its key, such as rows=8,cols=64,dtype=float16,rstd=true. Options follow the dtype; those that are
    compiled in are dimensions, too: 0 or 1, or the place among their choices. Raises LookupError, TypeError, ValueError."""
    parts = dict(part.split("=", 1) for part in key.split(","))
    names = list(parts)
    values = {name: _value(text) for name, text in parts.items()}
    dims = {name: of.index(values[name]) if of else int(values[name]) for name, of in dimensions.items()}
    if any(size < 0 for size in dims.values()):
        raise ValueError("a size below 0")
    options = {name: values[name] for name in names[names.index("dtype") + 1 :]}
    return {"key": key, "dims": dims, "dtype": parts["dtype"], "options": options}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _contradiction(manifest: Mapping[str, Any]) -> str:
    """What of a filled manifest of the right shape names something that is not there; empty if nothing does."""
    kernel = manifest["kernel"]
    sizes = {d["name"] for d in kernel["dimensions"]}
    if not manifest["variants"]:
        return "it has no variants"
    if unknown := {a["kind"] for a in kernel["arguments"]} - {"input", "output", "scalar", "workspace", "structure"}:
        return f"it has an argument of the unknown kind {unknown.pop()!r}"
    for where, v in [(f"it.{of}[{i}]", v) for of in ("variants", "general") for i, v in enumerate(manifest[of])]:
        jit = v.get("jit") or {"dimension": None, "sizes": ()}
        try:
            ends = [launch_in(v["launch"], s, turn) for s in jit["sizes"] for turn in (0, len(sizes_in(s)) - 1)]
        except (KeyError, TypeError):
            return f"{where}.jit has a launch that grows from what is no number"
        launches = [v["launch"], *v["launch"].get("then", ()), *ends]
        try:
            cut = {part for plan in launches for text, _ in plan.get("tiles", ()) for part in quantity(text)}
        except ValueError as error:
            return f"{where}.launch has the tiles {error}"
        named = {*v["fixed"], *(part for part in cut if isinstance(part, str))} - {*OPERATIONS}
        named |= {name for plan in launches for _, names, _ in plan.get("workspace", ()) for name in names}
        on_gpu = v["target"] == "cuda" and re.fullmatch(r"(sm|compute)_\d{2,3}[af]?", v["arch"])
        if not on_gpu and (v["target"] != "cpu" or (v.get("binary") and "needs" not in v)):
            return f"{where} is for target {v['target']!r} and {v['arch']!r}, which is no machine"
        if unknown := named - sizes:
            return f"{where} names {unknown.pop()!r}, which is no dimension"
        if v["workload"]["dtype"] not in kernel["tolerance"]:
            return f"{where} is for {v['workload']['dtype']!r}, of which there is no tolerance"
        if jit["dimension"] not in (None, *v["fixed"]) or (jit["dimension"] is None and v in manifest["general"]):
            return f"{where} is for other sizes of {jit['dimension']!r}, which is not compiled in"
        for plan in launches:
            try:
                if fault := _misfit(plan, _LAUNCH, f"{where}.launch"):
                    return fault
                LaunchPlan(**{name: value for name, value in plan.items() if name not in ("then", "workspace")})
            except (TypeError, ValueError) as error:
                return f"{where}.launch is none ({error})"
    return ""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How to launch a kernel at any size.

    One block (of `threads`, or of so many along x, y and z) a tile; `blocks_per_tile` of them if several share one. Tiles
    of a size cut a dimension, or what `quantity` makes of several, such as "rows * cols". The grid is a line of all tiles
    or, with `axes`, has an axis for each of at most three that are cut, the first of which varies fastest. Sizes that need
    more blocks than CUDA allows are left to PyTorch (`launchable`). A persistent grid has at most `blocks` blocks, or
    `blocks_per_multiprocessor` for each SM. A cluster is `cluster` blocks where others have one.

    alignment: bytes, a power of two, that every address passed must be a multiple of. Where one is not, the entry point
    NAME_unaligned of the same source is launched instead: same grid and block, no dynamic shared memory, no cluster.
    programmatic: programmatic dependent launch (sm_90 on): blocks may start while the kernel before in the stream still
    runs. The source has to wait for it (griddepcontrol.wait) before it reads or writes global memory. CUDA C++
    Programming Guide, "Programmatic Dependent Launch and Synchronization".
    entry: of the source; empty: the kernel's own.
    """

    threads: int | Sequence[int]
    tiles: Sequence[tuple[str, int]] = ()
    blocks_per_tile: int = 1
    blocks_per_multiprocessor: int | None = None
    smem_bytes: int = 0
    cluster: int = 1
    alignment: int = 1
    programmatic: bool = False
    axes: bool = False
    blocks: int | None = None
    entry: str = ""

    def __post_init__(self) -> None:
        if self.axes and (len(self.tiles) > 3 or self.most_blocks(1) is not None):
            raise ValueError("a launch plan with axes cuts at most three quantities, and its grid is not persistent")

    def grid(self, sizes: Mapping[str, int], multiprocessors: int) -> tuple[int, int, int]:
        """Blocks for a problem of these sizes."""
        names = {"__builtins__": {}, "min": min, "max": max}
        counts = [-(-max(0, eval(text, names, sizes)) // size) for text, size in self.tiles]
        x, y, z = (*counts, 1, 1, 1)[:3] if self.axes else (math.prod(counts), 1, 1)
        x *= self.blocks_per_tile
        x = min(x, self.most_blocks(multiprocessors) or x)
        return x * self.cluster, y, z

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block along x, y and z."""
        x, y, z, *_ = (*((self.threads,) if isinstance(self.threads, int) else self.threads), 1, 1)
        return x, y, z

    def most_blocks(self, multiprocessors: int) -> int | None:
        """Most clusters that a persistent grid has; None for a grid that is not."""
        if self.blocks_per_multiprocessor is None:
            return self.blocks
        return max(1, multiprocessors * self.blocks_per_multiprocessor // self.cluster)


PLAIN = asdict(LaunchPlan(threads=0))
"""What a plan in a manifest has where it says nothing else. All have threads."""


OPERATIONS: Mapping[str, type[ast.operator] | str] = {
    "+": ast.Add, "-": ast.Sub, "*": ast.Mult, "//": ast.FloorDiv, "%": ast.Mod, "min": "min", "max": "max",
}  # fmt: skip


@cache
def quantity(text: str) -> tuple[int | str, ...]:
    """What tiles cut, an expression of dimensions and whole numbers with + - * min max, and // and % by a number from 1 on;
    as operands in front of operations: ("rows", "cols", "*"). Raises ValueError for what is none."""

    def parts(node: ast.expr) -> Iterator[int | str]:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.value
        else:
            of: object = type(node)
            operands = list[ast.expr]()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
                of, operands = node.func.id, node.args
            elif isinstance(node, ast.BinOp):
                of, operands = type(node.op), [node.left, node.right]
            (name,) = (name for name, operation in OPERATIONS.items() if operation == of)
            first, second = operands
            if name in ("//", "%") and not (isinstance(second, ast.Constant) and second.value):
                raise ValueError
            yield from (*parts(first), *parts(second), name)

    try:
        return tuple(parts(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError):
        why = "which is no dimension, and no expression of some and of numbers with + - * // % min max"
        raise ValueError(f"{text!r}, {why}") from None


def on_own_cores(target: str) -> bool:
    """Whether code for a target runs on the cores of this process, which makes many cases of a check dear."""
    return target == "cpu"


def compiled_when_loaded(arch: str) -> bool:
    """Whether code for an architecture is an intermediate one (PTX), which the driver compiles."""
    return arch.startswith("compute_")


def launchable(grid: Sequence[int]) -> bool:
    """Whether CUDA takes a grid of so many blocks along each axis."""
    return all(n <= most for n, most in zip(grid, (2**31 - 1, 65_535, 65_535), strict=True))


def sizes_in(listed: Mapping[str, Any]) -> range:
    """One of the ranges of sizes, in a record's `jit`, that its source is right for."""
    return range(listed["first"], listed.get("last", listed["first"]) + 1, listed.get("step", 1))


def launch_in(own: Mapping[str, Any], listed: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """The launch at one of a range's sizes, counted from the first: a record's own but for what `launch` of the range has
    instead, to which `growth` is added from each size to the next. Raises KeyError, TypeError."""
    instead = listed.get("launch", {})
    return {**own, **instead, **{name: instead[name] + turn * more for name, more in listed.get("growth", {}).items()}}
