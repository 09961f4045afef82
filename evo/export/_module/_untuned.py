"""Sizes that are compiled in and that no variant was tuned for: compiled when they are first met, tried, kept.

A source here is a variant's, or one of the manifest's `general` ones for whole ranges of sizes, with another number where
its size stands. It is compiled for the device at hand, compared with PyTorch and float64 (_trial.py) before it serves a
call, and kept on disk for later processes (_cache.py). What fails is not tried again in this process. See
evo/export/_untuned.py, which writes what is read here.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import _cpu, _cuda
from ._cache import keep, kept
from ._choice import rank_on_gpu, slower_there
from ._nvrtc import compiler
from ._trial import OneVariant, Trial, apart, first_fault
from ._variant import Busy, Unavailable, Variant, read_unchanged

__all__ = ["Built", "Pending", "Untuned"]

_MOST_SIZES = 32
"""That one process compiles: programs whose sizes never repeat would compile for ever."""
_MOST_ATTEMPTS = 2
"""Sources that are tried for one size, where they do not compile or load."""
_ONLY_IF_NEAR = 2.0
"""Doublings by which a variant may be farther from a size than a general source is."""

_Key = tuple[Any, ...]


class Pending(Exception):
    """A size has yet to be compiled: let `run` do that, without holding a lock, and ask again."""

    def __init__(self, untuned: Untuned, key: _Key, sources: Sequence[_Source]) -> None:
        super().__init__()
        self.untuned, self.key, self.sources = untuned, key, sources

    def run(self) -> None:
        self.untuned.settle(self.key, self.sources)


@dataclass(frozen=True, eq=False, kw_only=True)
class Built(Variant):
    """A variant for sizes that nothing was tuned for. `origin`: whose source it is, for people."""

    origin: str
    loaded: _cpu.Library | _cuda.Function | None = field(default=None, repr=False)

    def __str__(self) -> str:
        size = self.record["untuned"]["dimension"]
        return f"{self.origin}, compiled here for {size}={self.sizes[size]}"


@dataclass(frozen=True)
class _Source:
    """A source that is right for a size, with the size in it, and the launch it then needs."""

    record: Mapping[str, Any]
    origin: str
    size: int
    launch: Mapping[str, Any]

    def text(self) -> bytes:
        """Raises Unavailable if it is not as it was exported."""
        old = read_unchanged(self.record["source"], self.record["source_sha256"])
        untuned, position, parts = self.record["untuned"], 0, []
        width = len(str(self.record["workload"]["dims"][untuned["dimension"]]))
        for blank in untuned["blanks"]:
            parts.append(old[position:blank])
            position = blank + width
        return str(self.size).encode().join([*parts, old[position:]])

    def headers(self) -> dict[str, bytes]:
        """Raises Unavailable."""
        return {name: read_unchanged(name, sha256) for name, sha256 in self.record["includes"].items()}

    def variant(self, index: int, entry: str, arguments: str, binary: str, compiler: str) -> Built:
        untuned, workload = self.record["untuned"], self.record["workload"]
        told = {"launch": self.launch, "binary": binary, "compiler": compiler, "standing": "compiled"}
        return Built(
            index=index,
            target=self.record["target"],
            arch=self.record["arch"],
            dtype=workload["dtype"],
            sizes={**workload["dims"], untuned["dimension"]: self.size},
            fixed=frozenset(self.record["fixed"]),
            entry=entry,
            arguments=arguments,
            record={**self.record, **told},
            origin=self.origin,
        )


class Untuned:
    """What was compiled in this process. Threads that ask for a size that another one is compiling are told so."""

    def __init__(self, manifest: Mapping[str, Any], variants: Sequence[Variant], trial: Trial) -> None:
        self.wanted: bool | None = None
        """None: for GPUs, where it takes part of a second, and not for CPUs, where a compiler is started and takes some."""
        self.slower = False
        """Whether from a variant, too, that was measured and is slower than PyTorch."""
        self._manifest, self._trial = manifest, trial
        self._first_index = len(variants)
        self._entry = manifest["kernel"]["entry"]
        self._arguments = variants[0].arguments if variants else ""
        self._names = [d["name"] for d in manifest["kernel"]["dimensions"]]
        self._sources = [(v.record, str(v), 0.0) for v in variants if v.record.get("untuned")]
        for record in manifest.get("general", ()):
            origin = f"variant for any size ({record['target']} {record['arch']}, {record['workload']['dtype']})"
            self._sources.append((record, origin, _ONLY_IF_NEAR))
        self._known: dict[_Key, Built | str] = {}
        self._built: list[Built] = []
        self._compiled = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Whoever was compiling is not in this process."""
        self._lock = threading.Lock()
        self._working: set[_Key] = set()

    def variant(self, index: int) -> Built:
        return self._built[index - self._first_index]

    def find(self, device: int, dtype: str, sizes: Mapping[str, int]) -> Built:
        """The variant compiled for these sizes. Raises Unavailable, also if that has failed; Busy while it is being compiled
        or a CUDA graph captured; Pending if nobody has tried."""
        sources = self._sources_for(device, dtype, sizes)
        if not sources:
            raise Unavailable("none here can be compiled for them")
        if reason := "" if self.slower else slower_there(sources[0].record, sizes, device):
            raise Unavailable(f"PyTorch was {reason}; also_serve(slower=True) has one compiled nevertheless")
        key = (device, dtype, *(sizes[n] for n in self._names if n in sources[0].record["fixed"]))
        with self._lock:
            if not (device >= 0 if self.wanted is None else self.wanted):
                raise Unavailable("also_serve(untuned=True) has a variant compiled for them")
            known = self._known.get(key)
            if isinstance(known, Built):
                return known
            if known is not None:
                raise Unavailable(known)
            if key in self._working:
                raise Busy("a variant is being compiled for them")
        if device >= 0:
            _cuda.wait_for_capture(device)
        raise Pending(self, key, sources)

    def settle(self, key: _Key, sources: Sequence[_Source]) -> None:
        """Compiles, unless another thread is at it; what comes of it is for `find` to tell."""
        with self._lock:
            if key in self._working or key in self._known:
                return
            self._working.add(key)
        working = self._working

        def work() -> None:
            found: Built | str | None = None
            try:
                found = self._first_right(sources, key[0])
            except Busy:
                pass
            except Unavailable as reason:
                found = f"compiling one for them fails: {reason}"
            except Exception as error:  # whatever it is, the call is PyTorch's
                found = f"compiling one for them fails: {type(error).__name__}: {error}".partition("\n")[0]
            finally:
                with self._lock:
                    if found is not None:
                        self._known[key] = found
                    working.discard(key)

        try:
            apart(work)
        except Busy:  # no thread
            with self._lock:
                working.discard(key)

    def _sources_for(self, device: int, dtype: str, sizes: Mapping[str, int]) -> list[_Source]:
        """Those that are right for the sizes, on the device; the one to be taken first."""
        target = "cpu" if device < 0 else "cuda"
        capability = (0, 0) if device < 0 else torch.cuda.get_device_capability(device)
        found: list[tuple[tuple[float, ...], _Source]] = []
        for record, origin, penalty in self._sources:
            name, own = record["untuned"]["dimension"], record["workload"]["dims"]
            others = (n for n in record["fixed"] if n != name)
            if (record["target"], record["workload"]["dtype"]) != (target, dtype):
                continue
            if any(own[n] != sizes[n] for n in others):
                continue
            # A source is right for its own architecture and all later ones, as PTX is.
            place = 0 if device < 0 else rank_on_gpu("compute_" + record["arch"].partition("_")[2], capability)
            launch = _launch_at(record, sizes[name])
            if place is None or launch is None:
                continue
            distance = {n: abs(math.log2(max(own[n], 1) / max(sizes[n], 1))) for n in own}
            rank = (distance.pop(name) + penalty, sum(distance.values()), place, len(found))
            found.append((rank, _Source(record, origin, sizes[name], launch)))
        return [source for _, source in sorted(found, key=lambda pair: pair[0])]

    def _first_right(self, sources: Iterable[_Source], device: int) -> Built:
        """Raises Unavailable."""
        first: Unavailable | None = None
        for source in list(sources)[:_MOST_ATTEMPTS]:
            try:
                return self._on_cpu(source) if device < 0 else self._on_gpu(source, device)
            except Busy:
                raise
            except Unavailable as reason:
                if isinstance(reason, _Wrong):
                    raise
                first = first or reason
        raise first or Unavailable("there is no source")

    def _on_gpu(self, source: _Source, device: int) -> Built:
        nvrtc, text, headers = compiler(), source.text(), source.headers()
        flags = source.record["untuned"]["recipe"]["flags"]
        properties = torch.cuda.get_device_properties(device)
        arch = nvrtc.arch_for((properties.major, properties.minor))
        # What is kept was found right with these, and is looked at again with others.
        around = (properties.name, str(_cuda.driver_version()), torch.__version__, self._digest_of_cases())
        parts = [text, *(headers[n] for n in sorted(headers)), *_encoded(arch, *flags, str(nvrtc), *around)]
        name = f"untuned-{_digest(parts)}.{'cubin' if arch.startswith('sm_') else 'ptx'}"
        code, new = kept(name), False
        if code is None:
            self._count()
            code, new = nvrtc.compile(text, headers, flags, arch), True
        variant = self._variant(source, name, str(nvrtc))
        function = _cuda.load_image(variant, code, device)
        if new:
            with _cuda.beside_captures(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                self._try(variant, torch.device("cuda", device), function)
            keep(name, code, {**_facts(variant), "arch": arch, "around": around})
        return self._remember(variant, function)

    def _on_cpu(self, source: _Source) -> Built:
        text = source.text()
        build = _cpu.build_of(source.record, source.record["untuned"]["recipe"], text)
        name = f"untuned-{_digest(_encoded(build.name, torch.__version__, self._digest_of_cases()))}.so"
        code = kept(name)
        variant = self._variant(source, name, build.command[0])
        with _scratch(name) as path:
            if code is None:
                self._count()
                build.run(text, path)
            else:
                path.write_bytes(code)
            library = _cpu.Library(_cpu.open_library(path, variant), rebuilt="")
            if code is None:
                self._try(variant, torch.device("cpu"), library)
                keep(name, path.read_bytes(), _facts(variant))
        return self._remember(variant, library)

    def _variant(self, source: _Source, binary: str, compiler: str) -> Built:
        """Its index is that of none until it is remembered."""
        return source.variant(-1, self._entry, self._arguments, binary, compiler)

    def _try(self, variant: Built, place: torch.device, loaded: _cpu.Library | _cuda.Function) -> None:
        """Raises _Wrong. A persistent grid also with so few blocks that each takes many turns."""
        failures: list[str] = []
        ways = [loaded]
        if isinstance(loaded, _cuda.Function) and variant.record["launch"]["blocks_per_multiprocessor"] is not None:
            ways.append(replace(loaded, multiprocessors=1))
        for way in ways:

            def call(sizes: dict[str, int], way: _cpu.Library | _cuda.Function = way) -> _cpu.CpuCall | _cuda.CudaCall:
                if isinstance(way, _cpu.Library):
                    return _cpu.CpuCall(variant, way, sizes)
                return _cuda.CudaCall(variant, way, sizes, lambda variant, device, reason: failures.append(reason))

            table = OneVariant(variant, self._names, call)
            fault = first_fault(self._trial, table, variant, place, self._manifest["kernel"]["tolerance"])
            if failures or fault:
                raise _Wrong(f"its results are not PyTorch's ({(failures or [fault])[0]})")

    def _remember(self, variant: Built, loaded: _cpu.Library | _cuda.Function) -> Built:
        with self._lock:
            found = replace(variant, index=self._first_index + len(self._built), loaded=loaded)
            self._built.append(found)
        return found

    def _count(self) -> None:
        with self._lock:
            if self._compiled >= _MOST_SIZES:
                raise _Wrong(f"{_MOST_SIZES} sizes were compiled in this process, and more are left to PyTorch")
            self._compiled += 1

    def _digest_of_cases(self) -> str:
        return str(self._manifest["files"].get("frontend.py", "")) + str(self._manifest["files"].get("_trial.py", ""))


class _Wrong(Unavailable):
    """Another source would not do, either, or must not be tried."""


def _launch_at(record: Mapping[str, Any], size: int) -> dict[str, Any] | None:
    """What a launch needs at a size; None where the source is not for it."""
    for listed in record["untuned"]["sizes"]:
        if size in range(listed["first"], listed["last"] + 1, listed["step"]):
            return {**record["launch"], **listed["launch"]}
    return None


@contextmanager
def _scratch(name: str) -> Iterator[Path]:
    """A place for a library until it is loaded. Raises Unavailable."""
    try:
        with tempfile.TemporaryDirectory(prefix="evo-module-", ignore_cleanup_errors=True) as folder:
            yield Path(folder) / name
    except OSError as error:
        raise Unavailable(f"no room to build in ({error.strerror})") from error


def _facts(variant: Built) -> dict[str, Any]:
    """Beside what is kept, for people."""
    return {"variant": str(variant), "source": variant.record["source"], "compiler": variant.record["compiler"]}


def _encoded(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]
