"""A package of variants: its files and its variants; and the user's cache, where what is built on this machine is kept."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from .manifest import MANIFEST, SAME, LaunchPlan, complete, launch_in, read_manifest, sizes_in

DIFFERENCES = "sources.diff"
"""Sources of a package that are told by how they differ from others, as unified diffs."""
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
_SLOTS = {"int64": ("q", 8), "int32": ("i", 4), "float32": ("f", 4), "float64": ("d", 8)}


class Unavailable(Exception):
    """A variant does not run here; the message is the reason."""


class Busy(Exception):
    """A variant cannot be loaded or raced at this moment, but perhaps later: PyTorch serves this call, and nothing is
    remembered. The message is the reason."""


Change = tuple[int, int, list[str]]
"""The first line that is changed, counted from 0; how many are taken away there; those that stand there instead."""
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def read_differences(text: str) -> dict[str, tuple[str, list[Change]]]:
    """Unified diffs without context, one behind the other: by the name of each file the one that it differs from, and in
    what, from the first line to the last."""
    found: dict[str, tuple[str, list[Change]]] = {}
    lines = iter(text.split("\n"))
    for line in lines:
        if line.startswith("--- "):
            changes: list[Change] = []
            found[next(lines)[4:]] = (line[4:], changes)
        elif hunk := _HUNK.match(line):
            first, removed, added = int(hunk[1]), int(hunk[2] or 1), int(hunk[3] or 1)
            instead = [next(lines)[1:] for _ in range(removed + added)][removed:]
            changes.append((first - 1 if removed else first, removed, instead))
    return found


class Package:
    """name: what it is imported by. folders: where its files lie; the manifest and the sources are in the first. Raises
    ImportError as `read_manifest` does."""

    def __init__(self, name: str, folders: Iterable[str]) -> None:
        self.name = name
        self.folders = tuple(Path(folder).resolve() for folder in folders)
        self.manifest = read_manifest(self.folders[0] / MANIFEST)
        self.unasked: frozenset[str] = frozenset()
        """Outputs, by their options, that a variant may give where a call asks for none: the frontend throws them away."""
        self._read_manifest()

    def complete(self, kernel: Any) -> None:
        """What `complete` of manifest.py does to its manifest."""
        if complete(self.manifest, kernel):
            self._read_manifest()

    def _read_manifest(self) -> None:
        self.kernel: dict[str, Any] = self.manifest["kernel"]
        self.dimensions: list[dict[str, Any]] = self.kernel["dimensions"]
        choices = {d["name"]: d.get("choices", ()) for d in self.dimensions}
        self.options = {n: choices.get(n, ()) for v in self.manifest["variants"] for n in v["workload"]["options"]}
        """Texts that each option may have, where it is compiled in and not just on or off."""
        self.variants = tuple(Variant(self, i, record) for i, record in enumerate(self.manifest["variants"]))
        fixed = {v.target: v.fixed for v in self.variants}
        self.fixed = {p: tuple(d["name"] in fixed.get(p, ()) for d in self.dimensions) for p in ("cpu", "cuda")}
        """Which dimensions are compiled in, by target."""

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
        """Path of a file of the package, which need not exist."""
        return next((p for p in (folder / name for folder in self.folders) if p.is_file()), self.folders[0] / name)

    def modules(self) -> list[Path]:
        """Files of what was imported of the package beside its run time, in order: what its function is, and its judges."""
        own = [module for name, module in sys.modules.items() if name.startswith(f"{self.name}.")]
        files = {Path(file) for module in own if (file := getattr(module, "__file__", None))}
        return sorted(p for p in files if p.is_file() and p.parent.name not in ("runtime", BACKWARD))

    def read(self, name: str) -> bytes:
        """A file's bytes. Raises Unavailable if it is missing, or listed in the manifest and not the one exported."""
        try:
            data = self.path(name).read_bytes()
        except OSError as error:
            raise Unavailable(f"{name} cannot be read ({error.strerror})") from error
        sha256 = self.manifest.get("files", {}).get(name)
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise Unavailable(f"{name} is not the file that was exported (its sha256 differs from the manifest's)")
        return data

    def damaged(self) -> Iterator[str]:
        """What is wrong with the files that the manifest lists, a sentence for each that is not as it was exported."""
        for name in self.manifest.get("files", {}):
            try:
                self.read(name)
            except Unavailable as reason:
                yield str(reason)

    @cached_property
    def _differences(self) -> dict[str, tuple[str, list[Change]]]:
        return read_differences(self.read(DIFFERENCES).decode()) if self.path(DIFFERENCES).is_file() else {}

    def source(self, name: str) -> bytes:
        """A source that lies here, or is told by how it differs from another. Raises Unavailable."""
        if name not in self._differences:
            return self.read(name)
        other, changes = self._differences[name]
        lines = self.source(other).decode().split("\n")
        for first, number, instead in reversed(changes):
            lines[first : first + number] = instead
        return "\n".join(lines).encode()

    def headers(self, source: bytes) -> dict[str, bytes]:
        """What a source includes of the package's files, by the name it does so; what is shipped takes them from the
        templates. Raises Unavailable."""
        found: dict[str, bytes] = {}
        waiting = [source]
        while waiting:
            for name in (n.decode(errors="replace") for n in _INCLUDE.findall(waiting.pop())):
                if name not in found and self.path(name).is_file():
                    found[name] = self.read(name)
                    waiting.append(found[name])
        return found


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
        self.arguments = tuple(map(self._slot, package.kernel["arguments"]))
        """The entry points' parameters in order, each with its alignment, as `struct` writes them: Q an address, q an int64,
        i an int32, f a float, d a double, 128s a structure of so many bytes."""
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

    def _slot(self, argument: Mapping[str, Any]) -> tuple[str, int]:
        if argument["kind"] == "structure":
            return f"{argument['bytes']}s", argument["alignment"]
        opmath = "float64" if self.dtype == "float64" else "float32"
        return _SLOTS[{"opmath": opmath}.get(name := argument["dtype"], name)] if argument["kind"] == "scalar" else ("Q", 8)

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
            if size in (sizes := sizes_in(listed)):
                found = copy(self)
                found.index, found.size, found.binary = -1, size, None
                found.sizes = {**self.sizes, jit["dimension"]: size}
                found._read_launch(launch_in(self.record["launch"], listed, sizes.index(size)))
                found._name = f"{self}, compiled here for {jit['dimension']}={size}"
                return found
        return None

    def source(self) -> bytes:
        """Raises Unavailable if it is not as it was exported."""
        text = self.package.source(self.record["source"])
        if self.size is None:
            return text
        jit, position, parts = self.record["jit"], 0, []
        width = len(str(self.record["workload"]["dims"][jit["dimension"]]))
        for blank in jit["blanks"]:
            parts.append(text[position:blank])
            position = blank + width
        return str(self.size).encode().join([*parts, text[position:]])

    def was_timed_at(self, point: Mapping[str, Any]) -> bool:
        """Whether this is what was timed at one of its points, or was within 1.5 times of that there (`slowdown`). It need
        not be where PyTorch was faster: what was timed there is then in no package."""
        return point is self.record or "slowdown" in point or not slower({**self.record, **point})

    def fits(self, sizes: Mapping[str, int], but: str = "") -> bool:
        """Whether what is compiled in is right for a problem, whose size named `but` is not looked at."""
        return all(self.sizes[n] == sizes[n] for n in self.fixed if n != but and (sizes[n] or n not in self.package.unasked))

    def gives_more(self, sizes: Mapping[str, int]) -> bool:
        """Whether it gives outputs that a problem does not ask for."""
        return any(self.sizes[n] and not sizes[n] for n in self.package.unasked)

    def tuned_as(self, other: Variant) -> bool:
        """Whether both are builds for the same problem."""
        return (self.target, self.dtype, self.sizes) == (other.target, other.dtype, other.sizes)


def in_words(sizes: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """64x96, and behind it those of the sizes that are options: 64x96 mean rstd. options: see `options_in_words`."""
    found = "x".join(str(n) for name, n in sizes.items() if name not in options)
    return " ".join([found, *options_in_words(sizes, options)])


def options_in_words(sizes: Mapping[str, int], options: Mapping[str, Any]) -> Iterator[str]:
    """The sizes that are options and on, or have a text. options: the texts that each may have, or its own."""
    for name in (name for name in sizes if name in options):
        texts = options[name]
        if isinstance(texts, str) or (isinstance(texts, Sequence) and texts):
            text = texts if isinstance(texts, str) else texts[sizes[name]]
            yield from [f"{name}={text}"] if text != SAME else []
        elif sizes[name]:
            yield name


def deciding(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """From a build's record in the manifest the timing that may decide who serves: of a final that nothing disturbed."""
    timing: dict[str, Any] | None = record.get("timing")
    return timing if timing is not None and timing["stage"] == "final" and not timing["disturbed"] else None


def slower(record: Mapping[str, Any]) -> str:
    """How much faster PyTorch was where a build was measured, in words: by all of the interval. Empty if it was not, or if
    that is not known."""
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


def tell(text: str) -> None:
    """Prints what a caller may wonder about. A closed stderr is no fault of the call."""
    with suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr)


def digest(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:40]
