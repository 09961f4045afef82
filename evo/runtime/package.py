"""A package of variants: its files, its manifest, how they are launched; and the user's cache, where what is built on this
machine is kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
CACHE_VARIABLE = "EVO_KERNELS_CACHE"

INIT = """\
from .runtime import Package, frontend_of

PACKAGE = Package(__name__, __path__)
frontend = frontend_of(PACKAGE)
__all__ = frontend.__all__
globals().update({name: getattr(frontend, name) for name in __all__})
"""
"""__init__.py of a package, less its docstring."""

NESTED = """\
import sys

from .. import runtime

sys.modules[f"{__name__}.runtime"] = runtime

"""
"""What comes before INIT in a package within another one, whose run time it shares."""

BACKWARD = "backward"
"""The package within another one that computes its gradients."""

MAIN = """\
import sys

from . import PACKAGE, frontend
from .runtime import main

if __name__ == "__main__":
    sys.exit(main(PACKAGE, frontend))
"""
"""__main__.py of a package."""

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_CODES = {"int64": "q", "int32": "i", "float32": "f", "float64": "d"}


FORMAT_VERSION = 3
"""The version of manifests that is written and read."""
_LAUNCH = {
    "threads": "count",
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
_PROBLEM = {"dims": {"*": "size"}, "dtype": "text"}
_TIMING = {
    "stage": "text", "disturbed": "truth", "median_us": "number", "ratio": "number", "ratio_low": "number or none",
    "ratio_high": "number or none", "torch_us": "number or none",
}  # fmt: skip
_POINT = {
    "candidate": "text",
    "workload": {**_PROBLEM, "key": "text", "options": {"*": "any"}},
    "timing": (None, _TIMING),
    "record": {"device?": "text or none"},
}
_SOURCE = {
    "target": "text",
    "arch": "text",
    "workload": _PROBLEM,
    "fixed": ["text"],
    "source": "text",
    "source_sha256": "text",
    "recipe": {"flags": ["text"], "libraries?": ["text"]},
    "launch": {**_LAUNCH, "then?": [_LAUNCH], "workspace?": [("size", ["text"], "truth")]},
    "needs?": {"machine": "text", "features": (None, ["text"])},
    "measured_on?": "size",
    "jit?": (None, {
        "dimension": "text", "blanks": ["size"], "sizes": [{"first": "size", "last": "size", "step": "count", "launch": {}}]
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
        "dimensions": [{"name": "text", "low": "size", "high": "size"}],
        "arguments": [{"name": "text", "kind": "text", "dtype": "text"}],
        "tolerance": {"*": {"atol": "number", "rtol": "number", "torch_factor": "number"}},
    },
    "variants": [{
        **_SOURCE, **_POINT, "standing": "text", "measured_arch": "text", "binary?": "text or none", "points?": [_POINT]
    }],
    "general": [_SOURCE],
    "headers": {"*": "text"},
    "measured_on?": [{"torch?": "text"}],
    "edited?": {"*": ["any"]},
    "files?": {"*": "text"},
}  # fmt: skip
"""What a manifest has: `key?` may be left out, "*" stands for any key, a list or tuple for its elements, (None, x) for x or
nothing. Further keys are allowed."""
_KINDS: Mapping[str, Any] = {
    "text": lambda v: isinstance(v, str),
    "truth": lambda v: isinstance(v, bool),
    "size": lambda v: type(v) is int and 0 <= v < 2**63,
    "count": lambda v: type(v) is int and 0 < v < 2**31,
    "number": lambda v: type(v) in (int, float) and math.isfinite(v) and v >= 0,
    "any": lambda v: True,
}


class Unavailable(Exception):
    """A variant does not run here; the message is the reason."""


class Busy(Exception):
    """Not at this moment, but perhaps later; the message is the reason."""


def read_manifest(path: Path) -> dict[str, Any]:
    """A package's manifest. Raises ImportError, in one sentence, for one that is not there or not as evo writes it."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest.get("format_version") if isinstance(manifest, dict) else None
        if type(version) is int and version != FORMAT_VERSION:
            fault = f"it is of format {version}, and this run time reads {FORMAT_VERSION}"
        else:
            fault = _misfit(manifest, _SHAPE, "it") or _contradiction(manifest)
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


def _contradiction(manifest: Mapping[str, Any]) -> str:
    """What of a manifest of the right shape names something that is not there; empty if nothing does."""
    kernel, machines = manifest["kernel"], manifest.get("measured_on", ())
    sizes = {d["name"] for d in kernel["dimensions"]}
    if not manifest["variants"]:
        return "it has no variants"
    if unknown := {a["kind"] for a in kernel["arguments"]} - {"input", "output", "scalar", "workspace"}:
        return f"it has an argument of the unknown kind {unknown.pop()!r}"
    for where, v in [(f"it.{of}[{i}]", v) for of in ("variants", "general") for i, v in enumerate(manifest[of])]:
        jit = v.get("jit") or {"dimension": None, "sizes": ()}
        launches = [v["launch"], *v["launch"].get("then", ()), *({**v["launch"], **s["launch"]} for s in jit["sizes"])]
        named = {*v["fixed"], *(name for plan in launches for name, _ in plan.get("tiles", ()))}
        named |= {name for plan in launches for _, names, _ in plan.get("workspace", ()) for name in names}
        on_gpu = v["target"] == "cuda" and re.fullmatch(r"(sm|compute)_\d{2,3}[af]?", v["arch"])
        if not on_gpu and (v["target"] != "cpu" or (v.get("binary") and "needs" not in v)):
            return f"{where} is for target {v['target']!r} and {v['arch']!r}, which is no machine"
        if unknown := named - sizes:
            return f"{where} names {unknown.pop()!r}, which is no dimension"
        needed = sizes if v in manifest["variants"] else {*v["fixed"]}
        if any(not needed <= set(p["workload"]["dims"]) <= sizes for p in (v, *v.get("points", ()))):
            return f"{where} has sizes of other dimensions than {', '.join(sorted(sizes))}"
        if v["workload"]["dtype"] not in kernel["tolerance"]:
            return f"{where} is for {v['workload']['dtype']!r}, of which there is no tolerance"
        if v.get("measured_on", -1) >= len(machines):
            return f"{where} was measured on machine {v['measured_on']}, which is not listed"
        if jit["dimension"] not in (None, *v["fixed"]) or (jit["dimension"] is None and v in manifest["general"]):
            return f"{where} is for other sizes of {jit['dimension']!r}, which is not compiled in"
        for plan in launches:
            try:
                if fault := _misfit(plan, _LAUNCH, f"{where}.launch"):
                    return fault
                LaunchPlan(**{name: value for name, value in plan.items() if name not in ("then", "workspace")})
            except (TypeError, ValueError) as error:
                return f"{where}.launch is none ({error})"
    before: set[str] = set()
    for name, edits in manifest.get("edited", {}).items():
        of, *changes = edits or [None]
        texts = [c[2:] for c in changes if not _misfit(c[:2], ("size", "size"), "")]
        if not isinstance(of, str) or of in manifest["edited"].keys() - before:
            return f"it tells source {name!r} by edits of one that is not there"
        if len(texts) < len(changes) or _misfit(texts, [["text"]], ""):
            return f"it tells source {name!r} by what are no edits"
        before.add(name)
    return ""


class Package:
    """name: what it is imported by. folders: where its files lie; the manifest and the sources are in the first. Raises
    ImportError as `read_manifest` does."""

    def __init__(self, name: str, folders: Iterable[str]) -> None:
        self.name = name
        self.folders = tuple(Path(folder).resolve() for folder in folders)
        self.manifest = read_manifest(self.folders[0] / MANIFEST)
        self.kernel: dict[str, Any] = self.manifest["kernel"]
        self.dimensions: list[dict[str, Any]] = self.kernel["dimensions"]
        self.options = frozenset(name for v in self.manifest["variants"] for name in v["workload"]["options"])
        self.variants = tuple(Variant(self, i, record) for i, record in enumerate(self.manifest["variants"]))
        fixed = {v.target: v.fixed for v in self.variants}
        self.fixed = {p: tuple(d["name"] in fixed.get(p, ()) for d in self.dimensions) for p in ("cpu", "cuda")}
        """Which dimensions are compiled in, by target."""
        self.unasked: frozenset[str] = frozenset()
        """Outputs, by their options, that a variant may give where a call asks for none: the frontend throws them away."""

    def tuned(self, place: str, dtype: str, sizes: dict[str, int]) -> bool:
        """Whether some variant is for a device of that type, the dtype and these sizes: without looking at this machine,
        and so that torch.compile can follow it. Not a method of Dispatch: torch.compile guards the length of a dict whose
        methods it follows, and would compile again after every new size."""
        for v in self.variants:
            if v.target == place and v.dtype == dtype:
                wanted = True
                for name in sizes:
                    wanted = wanted and (name not in v.fixed or v.sizes[name] == sizes[name])
                if wanted:
                    return True
        return False

    def path(self, name: str) -> Path:
        """Of a file of the package; it need not exist."""
        return next((p for p in (folder / name for folder in self.folders) if p.is_file()), self.folders[0] / name)

    def modules(self) -> list[Path]:
        """Files of what was imported of the package beside its run time, in order: what its function is, and its judges."""
        own = [module for name, module in sys.modules.items() if name.startswith(f"{self.name}.")]
        files = {Path(file) for module in own if (file := getattr(module, "__file__", None))}
        return sorted(p for p in files if p.is_file() and p.parent.name not in ("runtime", BACKWARD))

    def read(self, name: str, sha256: str | None = None) -> bytes:
        """A file's bytes. Raises Unavailable if it is missing or, where a digest is given, not the one exported."""
        try:
            data = self.path(name).read_bytes()
        except OSError as error:
            raise Unavailable(f"{name} cannot be read ({error.strerror})") from error
        if sha256 is not None:
            _check(name, data, sha256)
        return data

    def source(self, name: str) -> str:
        """A source that lies here, or is told by how it differs from another: `edited` of the manifest has by its name that
        other's, and then [first, number, text] of what stands instead of certain lines (no text: nothing), from the last to
        the first, counted from 0. Raises Unavailable."""
        if name not in self.manifest.get("edited", ()):
            return self.read(name).decode(errors="replace")
        other, *edits = self.manifest["edited"][name]
        lines = self.source(other).split("\n")
        for first, number, *instead in edits:
            lines[first : first + number] = instead
        return "\n".join(lines)

    def headers(self, source: bytes) -> dict[str, bytes]:
        """What a source includes of the package's files, by the name it does so; what is shipped takes them from the
        templates. Raises Unavailable for one that is not as it was exported."""
        found: dict[str, bytes] = {}
        waiting = [source]
        while waiting:
            for name in (n.decode(errors="replace") for n in _INCLUDE.findall(waiting.pop())):
                if name not in found and self.path(name).is_file():
                    found[name] = self.read(name, self.manifest["headers"].get(name))
                    waiting.append(found[name])
        return found


def _check(name: str, data: bytes, sha256: str) -> None:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Unavailable(f"{name} is not the file that was exported (its sha256 differs from the manifest's)")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How to launch a kernel at any size.

    One block (of `threads`) a tile, where the tiles cut the named dimensions; `blocks_per_tile` of them if several
    share one. The grid is a line of all tiles or, with `axes`, has an axis for each of at most three cut dimensions, the
    first of which varies fastest. Sizes that need more blocks than CUDA allows are left to PyTorch (`launchable`). A
    persistent grid has at most `blocks` blocks, or `blocks_per_multiprocessor` for each SM. A cluster is `cluster` blocks
    where others have one.

    alignment: bytes, a power of two, that every address passed must be a multiple of. Where one is not, the entry point
    NAME_unaligned of the same source is launched instead: same grid and block, no dynamic shared memory, no cluster.
    programmatic: programmatic dependent launch (sm_90 on): blocks may start while the kernel before in the stream still
    runs. The source has to wait for it (griddepcontrol.wait) before it reads or writes global memory. CUDA C++
    Programming Guide, "Programmatic Dependent Launch and Synchronization".
    entry: of the source; empty: the kernel's own.
    """

    threads: int
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
            raise ValueError("a launch plan with axes cuts at most three dimensions, and its grid is not persistent")

    def grid(self, sizes: Mapping[str, int], multiprocessors: int) -> tuple[int, int, int]:
        """Blocks for a problem of these sizes."""
        counts = [-(-sizes[name] // size) for name, size in self.tiles]
        x, y, z = (*counts, 1, 1, 1)[:3] if self.axes else (math.prod(counts), 1, 1)
        x *= self.blocks_per_tile
        x = min(x, self.most_blocks(multiprocessors) or x)
        return x * self.cluster, y, z

    def most_blocks(self, multiprocessors: int) -> int | None:
        """Of a persistent grid, in clusters."""
        if self.blocks_per_multiprocessor is None:
            return self.blocks
        return max(1, multiprocessors * self.blocks_per_multiprocessor // self.cluster)


def launchable(grid: Sequence[int]) -> bool:
    """Whether CUDA takes a grid of so many blocks along each axis."""
    return all(n <= most for n, most in zip(grid, (2**31 - 1, 65_535, 65_535), strict=True))


class Variant:
    """One build of a winner, for `arch`, or a source for any size (index -1). `sizes`: the workload it was tuned for, by
    dimension. `fixed`: those of them that are compiled in. `binary`: its file; None: it is compiled where it is to run. The
    record's `standing`: "measured", or "compiled" from what was measured on `measured_arch` alone.
    """

    def __init__(self, package: Package, index: int, record: Mapping[str, Any]) -> None:
        self.package, self.index, self.record = package, index, record
        self.target: str = record["target"]
        self.arch: str = record["arch"]
        self.dtype: str = record["workload"]["dtype"]
        self.sizes: Mapping[str, int] = record["workload"]["dims"]
        self.fixed = frozenset(record["fixed"])
        made_on = package.manifest["measured_on"][record["measured_on"]] if "measured_on" in record else {}
        self.beside: str = made_on.get("torch", "")
        """The version of PyTorch that it was measured with."""
        self.points: tuple[Mapping[str, Any], ...] = (record, *record.get("points", ()))
        """The problems that it was the winner of, the first of which it was tuned for."""
        opmath = "d" if self.dtype == "float64" else "f"
        scalars = (a["kind"] == "scalar" and a["dtype"] for a in package.kernel["arguments"])
        self.arguments = "".join(_CODES.get(dtype, opmath) if dtype else "P" for dtype in scalars)
        """The entry points' parameters in order: P an address, q an int64, i an int32, f a float, d a double."""
        self._read_launch(record["launch"])
        self.binary: str | None = record.get("binary")
        self.size: int | None = None
        """The one that is compiled in, where it is not that of its record (`at`)."""
        self.refused = ""
        """Why there is no code for that size."""
        self.rebuilt = ""
        """Why a library was built again on this machine; empty if the shipped one is in use."""
        self._name = f"variant for any size ({self.target} {self.arch}, {self.dtype})"
        if index >= 0:
            on = f" on {record['measured_arch']}" if record["standing"] == "compiled" else ""
            tuned = in_words(self.sizes, package.options) + on
            self._name = f"variant {index} ({self.target} {self.arch}, {self.dtype}, tuned for {tuned})"

    def __str__(self) -> str:
        return self._name

    def _read_launch(self, record: Mapping[str, Any]) -> None:
        """record: of the first launch; under `then` those that follow it, and under `workspace`, for each such argument, its
        bytes for one element of each of the dimensions named, and whether it is zeroed."""
        first = {name: value for name, value in record.items() if name not in ("then", "workspace")}
        self.plans = tuple(LaunchPlan(**plan) for plan in (first, *record.get("then", ())))
        self._workspace: Sequence[tuple[int, Sequence[str], bool]] = record.get("workspace", ())

    def workspace(self, sizes: Mapping[str, int]) -> tuple[tuple[int, bool], ...]:
        """Bytes of each workspace argument of a call of these sizes, and whether it is zeroed."""
        return tuple((number * math.prod(sizes[n] for n in names), zeroed) for number, names, zeroed in self._workspace)

    def described_workspace(self) -> tuple[tuple[int, tuple[int, ...], bool], ...]:
        """For the native launcher: as in the record, with dimensions by their number."""
        order = [d["name"] for d in self.package.dimensions]
        return tuple((number, tuple(map(order.index, names)), zeroed) for number, names, zeroed in self._workspace)

    def entry(self, plan: LaunchPlan) -> str:
        return plan.entry or str(self.package.kernel["entry"])

    def at(self, size: int) -> Variant | None:
        """What can be made of its source for another size of the dimension that is compiled in: with another number where
        its own stands. None where it is not for that."""
        jit = self.record["jit"]
        for listed in jit["sizes"]:
            if size in range(listed["first"], listed["last"] + 1, listed["step"]):
                found = copy(self)
                found.index, found.size, found.binary = -1, size, None
                found.sizes = {**self.sizes, jit["dimension"]: size}
                found._read_launch({**self.record["launch"], **listed["launch"]})
                found._name = f"{self}, compiled here for {jit['dimension']}={size}"
                return found
        return None

    def source(self) -> bytes:
        """Raises Unavailable if it is not as it was exported."""
        name = self.record["source"]
        text = self.package.source(name).encode()
        _check(name, text, self.record["source_sha256"])
        if self.size is None:
            return text
        jit, position, parts = self.record["jit"], 0, []
        width = len(str(self.record["workload"]["dims"][jit["dimension"]]))
        for blank in jit["blanks"]:
            parts.append(text[position:blank])
            position = blank + width
        return str(self.size).encode().join([*parts, text[position:]])

    def fits(self, sizes: Mapping[str, int], but: str = "") -> bool:
        """Whether what is compiled in is right for a problem, whose size named `but` is not looked at."""
        return all(self.sizes[n] == sizes[n] for n in self.fixed if n != but and (sizes[n] or n not in self.package.unasked))

    def gives_more(self, sizes: Mapping[str, int]) -> bool:
        """Whether it gives outputs that a problem does not ask for."""
        return any(self.sizes[n] and not sizes[n] for n in self.package.unasked)

    def tuned_as(self, other: Variant) -> bool:
        """Whether both are builds for the same problem."""
        return (self.target, self.dtype, self.sizes) == (other.target, other.dtype, other.sizes)


def in_words(sizes: Mapping[str, int], options: Collection[str]) -> str:
    """64x96, and behind it those of the sizes that are options and on: 64x96 mean rstd."""
    found = "x".join(str(n) for name, n in sizes.items() if name not in options)
    return " ".join([found, *(name for name, n in sizes.items() if name in options and n)])


def deciding(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """From a build's record in the manifest the timing that may decide who serves: of a final that nothing disturbed."""
    timing: dict[str, Any] | None = record.get("timing")
    return timing if timing is not None and timing["stage"] == "final" and not timing["disturbed"] else None


def slower(record: Mapping[str, Any]) -> str:
    """By what PyTorch was faster where a build was measured, in words: by all of the interval. Empty if it was not, or is
    not known."""
    timing = deciding(record)
    if timing is None or (timing["ratio_low"] or 0.0) <= 1.0:
        return ""
    sizes = in_words(record["workload"]["dims"], record["workload"]["options"])
    return faster_torch(sizes, record["record"].get("device") or record["arch"], timing["ratio"])


def faster_torch(sizes: str, where: str, ratio: float) -> str:
    """ratio: a variant's time over PyTorch's. Where what is printed of it is 1.00, they are said to be as fast."""
    verdict = "faster" if round(1 / ratio, 2) < 1 else "as fast"
    return f"measured to be {verdict} at {sizes} on {where}, where a variant has {1 / ratio:.2f} times its speed"


def cache_folder(create: bool = True) -> Path | None:
    """$EVO_KERNELS_CACHE, else evo-kernels/ in $XDG_CACHE_HOME (~/.cache). A folder of this user's alone, since what lies
    in it is executed; None if there is none. Need not exist where it is not to be created."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        wanted = os.environ.get(CACHE_VARIABLE)
        users = base if base.is_absolute() else Path.home() / ".cache"
        folder = Path(wanted).absolute() if wanted else users / "evo-kernels"
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not folder.exists():
            return folder
        status = folder.stat()
    except (OSError, RuntimeError):  # read-only, or no home
        return None
    return folder if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None


def keep(name: str, data: bytes) -> None:
    """Writes a file to the cache folder, for `kept`. Without such a folder, or room in it, nothing."""
    if (folder := cache_folder()) is not None:
        with suppress(OSError):
            write_whole(folder / name, data)


def kept(name: str) -> bytes | None:
    """What `keep` wrote under that name, as `read_whole` has it."""
    folder = cache_folder(create=False)
    return read_whole(folder / name) if folder is not None else None


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file for `read_whole` of this and other processes: whole or not at all. Raises OSError."""
    part = path.with_name(f"part-{os.getpid()}-{path.name}")
    try:
        part.write_bytes(hashlib.sha256(data).digest() + data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_whole(path: Path) -> bytes | None:
    """What `write_whole` wrote; None if there is nothing, or it is not as it was written."""
    with suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:
            return stored[32:]
    return None


def digest(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:40]
