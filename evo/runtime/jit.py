"""Compiles on this machine, once: variants that come as a source, and the nearest one for sizes that nothing was tuned for.

What is compiled is tried (trial.py) before it serves a call, and kept on disk for later processes; what fails is not tried
again in this process. For other sizes, a source is a variant's, or one of the manifest's `general` ones for whole ranges of
sizes, with another number where its size stands. See evo/export/_jit.py, which writes what is read here.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import cpu, cuda, nvrtc
from .choice import factors, rank_of_source, slower_there
from .package import Busy, Package, Unavailable, Variant, cache_folder, digest, keep, kept
from .trial import OneVariant, Trial, apart, first_fault

__all__ = ["Compiled", "Jit", "Pending"]

_MOST_SIZES = 32
"""That one process compiles: programs whose sizes never repeat would compile for ever."""
_MOST_ATTEMPTS = 2
"""Sources that are tried for one size, where they do not compile or load."""
_ONLY_IF_NEAR = 2.0
"""Doublings by which a variant may be farther from a size than a general source is."""
_TOLD_AFTER_S = 1.0

_Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Compiled:
    """A variant with the code that was made of its source."""

    variant: Variant
    loaded: cpu.Library | cuda.Function


class Pending(Exception):
    """Something has yet to be compiled: let `run` do that, without holding a lock, and ask again."""

    def __init__(self, jit: Jit, key: _Key, sources: Sequence[_Source]) -> None:
        super().__init__()
        self._jit, self._key, self._sources = jit, key, sources

    def run(self) -> None:
        """Raises Busy where it cannot be done at this moment."""
        self._jit.settle(self._key, self._sources)


@dataclass(frozen=True)
class _Source:
    """What is to be compiled. `variant`: what comes of it, as yet without code. `size`: the number that is to stand in its
    source where its own size does; None: as it is."""

    variant: Variant
    size: int | None = None

    def text(self, package: Package) -> bytes:
        """Raises Unavailable if the source is not as it was exported."""
        record = self.variant.record
        old = package.source(record)
        if self.size is None:
            return old
        jit, position, parts = record["jit"], 0, []
        width = len(str(record["workload"]["dims"][jit["dimension"]]))
        for blank in jit["blanks"]:
            parts.append(old[position:blank])
            position = blank + width
        return str(self.size).encode().join([*parts, old[position:]])


class Jit:
    """What was compiled in this process. Threads that ask for what another one is compiling are told so."""

    def __init__(self, package: Package, trial: Trial) -> None:
        self.wanted: bool | None = None
        """Whether for other sizes. None: for GPUs, where it takes part of a second, and not for CPUs, where a compiler is
        started and takes some."""
        self.slower = False
        """Whether from a variant, too, that was measured and is slower than PyTorch."""
        self._package, self._trial = package, trial
        self._names = [d["name"] for d in package.dimensions]
        self._bases = [(v, str(v), 0.0) for v in package.variants if v.record.get("jit")]
        for record in package.manifest["general"]:
            origin = f"variant for any size ({record['target']} {record['arch']}, {record['workload']['dtype']})"
            self._bases.append((package.variant(-1, record), origin, _ONLY_IF_NEAR))
        self._known: dict[_Key, Compiled | str] = {}
        self._fallbacks: list[Variant] = []
        self._sizes = 0
        self._told = False
        self.after_fork()

    def after_fork(self) -> None:
        """Whoever was compiling is not in this process."""
        self._lock = threading.Lock()
        self._working: set[_Key] = set()

    def variant(self, index: int) -> Variant:
        """One for other sizes: they are counted on from the package's."""
        return self._fallbacks[index - len(self._package.variants)]

    def own(self, variant: Variant, device: int) -> Compiled:
        """A variant at its own size. Raises what `_find` raises."""
        return self._find((device, variant.index), [_Source(variant)])

    def fallback(self, device: int, dtype: str, sizes: Mapping[str, int]) -> Compiled:
        """A variant for these sizes. Raises Unavailable where there is no source for them, and what `_find` raises."""
        sources = self._sources_for(device, dtype, sizes)
        if not sources:
            raise Unavailable("none here can be compiled for them")
        if reason := "" if self.slower else slower_there(sources[0].variant.record, sizes, device):
            raise Unavailable(f"PyTorch was {reason}; also_serve(slower=True) has one compiled nevertheless")
        if not (device >= 0 if self.wanted is None else self.wanted):
            raise Unavailable("also_serve(untuned=True) has a variant compiled for them")
        fixed = sources[0].variant.fixed
        return self._find((device, dtype, *(sizes[n] for n in self._names if n in fixed)), sources)

    def _find(self, key: _Key, sources: Sequence[_Source]) -> Compiled:
        """Raises Unavailable if it has failed; Busy while it is being compiled or a CUDA graph captured; Pending if nobody
        has tried."""
        with self._lock:
            known = self._known.get(key)
            if isinstance(known, Compiled):
                return known
            if known is not None:
                raise Unavailable(known)
            if key in self._working:
                raise Busy("a variant is being compiled for them")
        if key[0] >= 0:
            cuda.refuse_while_capturing(key[0])
        raise Pending(self, key, sources)

    def settle(self, key: _Key, sources: Sequence[_Source]) -> None:
        """Compiles, unless another thread is at it; what comes of it is for `_find` to tell. Raises Busy where it cannot be
        done at this moment, as where there can be no thread."""
        with self._lock:
            if key in self._working or key in self._known:
                return
            self._working.add(key)
        working = self._working
        busy: list[Busy] = []

        def work() -> None:
            found: Compiled | str | None = None
            began = time.monotonic()
            try:
                found = self._first_right(sources, key[0])
            except Busy as reason:
                busy.append(reason)
            except Unavailable as reason:
                found = f"compiling it on this machine fails: {reason}"
            except Exception as error:  # whatever it is, the call is PyTorch's
                found = f"compiling it on this machine fails: {type(error).__name__}: {error}".partition("\n")[0]
            finally:
                with self._lock:
                    if found is not None:
                        self._known[key] = found
                    working.discard(key)
            if isinstance(found, Compiled):
                self._tell(found.variant, time.monotonic() - began)

        try:
            apart(work)
        except Busy:  # no thread
            with self._lock:
                working.discard(key)
            raise
        if busy:
            raise busy[0]

    def _tell(self, variant: Variant, seconds: float) -> None:
        """Once a process, of a pause that somebody may wonder about."""
        if seconds > _TOLD_AFTER_S and not self._told:
            self._told = True
            folder = cache_folder(create=False)
            after = f"later processes find it in {folder}" if folder else "there is no cache folder to keep it in"
            with suppress(OSError, ValueError):  # a closed stderr is no fault of the call
                print(f"{self._package.name}: compiling {variant} took {seconds:.1f} s; {after}", file=sys.stderr)

    def _sources_for(self, device: int, dtype: str, sizes: Mapping[str, int]) -> list[_Source]:
        """Those that are right for the sizes, on the device; the one to be taken first."""
        target = "cpu" if device < 0 else "cuda"
        capability = (0, 0) if device < 0 else torch.cuda.get_device_capability(device)
        found: list[tuple[tuple[float, ...], _Source]] = []
        for base, origin, penalty in self._bases:
            name, own = base.record["jit"]["dimension"], base.record["workload"]["dims"]
            if (base.target, base.dtype) != (target, dtype):
                continue
            if any(own[n] != sizes[n] for n in base.fixed if n != name):
                continue
            place = 0 if device < 0 else rank_of_source(base.arch, capability)
            launch = _launch_at(base.record, sizes[name])
            if place is None or launch is None:
                continue
            distance = factors(own, sizes)
            rank = (distance.pop(name) + penalty, sum(distance.values()), place, len(found))
            told = f"{origin}, compiled here for {name}={sizes[name]}"
            variant = self._package.variant(
                -1, base.record, sizes={**own, name: sizes[name]}, launch=launch, fallback=told
            )
            found.append((rank, _Source(variant, sizes[name])))
        return [source for _, source in sorted(found, key=lambda pair: pair[0])]

    def _first_right(self, sources: Sequence[_Source], device: int) -> Compiled:
        """Raises Unavailable."""
        first: Unavailable | None = None
        for source in sources[:_MOST_ATTEMPTS]:
            try:
                return self._compiled(source, device)
            except Busy:
                raise
            except Unavailable as reason:
                if isinstance(reason, _Wrong):
                    raise
                first = first or reason
        raise first or Unavailable("there is no source")

    def _compiled(self, source: _Source, device: int) -> Compiled:
        """Compiled, tried and kept; or what was kept before. Raises Unavailable."""
        package, record = self._package, source.variant.record
        text, flags = source.text(package), record["recipe"]["flags"]
        headers = package.headers(text)
        if device < 0:
            command, version = cpu.compiler()
            made_by, suffix, how = version, "so", [*command, cpu.machine(), *sorted(cpu.features())]
        else:
            properties = torch.cuda.get_device_properties(device)
            arch = nvrtc.compiler().arch_for((properties.major, properties.minor))
            made_by, suffix = str(nvrtc.compiler()), "cubin" if arch.startswith("sm_") else "ptx"
            how = [arch, properties.name, str(cuda.driver_version())]
        # What is kept was found right with these, and is looked at again with others.
        around = [*flags, made_by, *how, torch.__version__, self._digest_of_cases()]
        name = f"compiled-{digest(text, *(headers[n] for n in sorted(headers)), *around)}.{suffix}"
        code = kept(name)
        new = code is None
        if new and source.size is not None:
            self._count()
        variant = replace(source.variant, record={**record, "binary": name})
        loaded: cpu.Library | cuda.Function
        if device < 0:
            code, loaded = self._library(variant, text, code)
        else:
            code = nvrtc.compiler().compile(text, headers, flags, arch)[0] if code is None else code
            loaded = cuda.load_image(variant, code, device)
        if new:
            self._try(variant, loaded, device)
            keep(name, code, {"variant": str(variant), "source": record["source"], "compiler": made_by, "how": how})
        return self._numbered(Compiled(variant, loaded))

    def _library(self, variant: Variant, text: bytes, code: bytes | None) -> tuple[bytes, cpu.Library]:
        """Raises Unavailable."""
        recipe = variant.record["recipe"]
        try:
            with tempfile.TemporaryDirectory(prefix="evo-module-", ignore_cleanup_errors=True) as folder:
                path = Path(folder) / str(variant.binary)
                if code is None:
                    cpu.compile_library(text, path, recipe["flags"], recipe["libraries"], self._package.include_dirs)
                else:
                    path.write_bytes(code)
                return path.read_bytes(), cpu.open_library(path, variant)
        except OSError as error:
            raise Unavailable(f"no room to build in ({error.strerror})") from error

    def _try(self, variant: Variant, loaded: cpu.Library | cuda.Function, device: int) -> None:
        """Raises _Wrong. A persistent grid also with so few blocks that each takes many turns."""
        if isinstance(loaded, cpu.Library):
            self._try_as(variant, torch.device("cpu"), loaded)
            return
        with cuda.beside_captures(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            place = torch.device("cuda", device)
            self._try_as(variant, place, loaded)
            if variant.plan.blocks_per_multiprocessor is not None:
                self._try_as(variant, place, replace(loaded, multiprocessors=1))

    def _try_as(self, variant: Variant, place: torch.device, loaded: cpu.Library | cuda.Function) -> None:
        failures: list[str] = []

        def call(sizes: dict[str, int]) -> cpu.CpuCall | cuda.CudaCall:
            if isinstance(loaded, cpu.Library):
                return cpu.CpuCall(variant, loaded, sizes)
            return cuda.CudaCall(variant, loaded, sizes, lambda variant, device, reason: failures.append(reason))

        table = OneVariant(variant, self._names, call)
        fault = first_fault(self._trial, table, variant, place, self._package.tolerance)
        if failures or fault:
            raise _Wrong(f"its results are not PyTorch's ({(failures or [fault])[0]})")

    def _numbered(self, compiled: Compiled) -> Compiled:
        if compiled.variant.index >= 0:
            return compiled
        with self._lock:
            index = len(self._package.variants) + len(self._fallbacks)
            found = replace(compiled, variant=replace(compiled.variant, index=index))
            self._fallbacks.append(found.variant)
        return found

    def _count(self) -> None:
        with self._lock:
            if self._sizes >= _MOST_SIZES:
                raise _Wrong(f"{_MOST_SIZES} sizes were compiled in this process, and more are left to PyTorch")
            self._sizes += 1

    def _digest_of_cases(self) -> str:
        own = (Path(__file__).with_name(name).read_bytes() for name in ("trial.py", "tolerance.py"))
        return digest(self._package.read("frontend.py"), *own)


class _Wrong(Unavailable):
    """Another source would not do, either, or must not be tried."""


def _launch_at(record: Mapping[str, Any], size: int) -> dict[str, Any] | None:
    """What a launch needs at a size; None where the source is not for it."""
    for listed in record["jit"]["sizes"]:
        if size in range(listed["first"], listed["last"] + 1, listed["step"]):
            return {**record["launch"], **listed["launch"]}
    return None
