"""Chooses the variant that serves a problem, loads it, and remembers the answer. It knows no kernel: frontend.py does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any, TypeVar

import torch

from . import cpu, cuda
from .choice import builds_of_nearest, in_order, slower_there
from .jit import Compiled, Jit, Pending
from .package import Busy, Package, Unavailable, Variant
from .trial import Call, Table, Trial

__all__ = ["Dispatch"]

_MOST_ENTRIES = 4096

_T = TypeVar("_T")


class _NotTuned(Unavailable):
    """All is right but for sizes that are compiled in."""


class Dispatch(Table):
    """From problem to Call, or to the reason why there is none; filled as problems come."""

    def __init__(self, package: Package, trial: Trial) -> None:
        super().__init__()
        self.package = package
        self._variants = package.variants
        self._jit = Jit(package, trial)
        self._loaded: dict[tuple[int, int], Compiled | str] = {}
        self._rebuilt: dict[int, str] = {}
        self._only: int | None = None
        self._slower = False
        self._forked = False
        self.native: Any = None
        """What else keeps answers, and forgets them with this: the native launcher, where there is one."""
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):  # Linux and macOS
            os.register_at_fork(after_in_child=self._after_fork)

    def __missing__(self, key: tuple[Any, ...]) -> Call | str:
        try:
            return self._settled(lambda: self._found(key))
        except Busy as reason:
            return str(reason)

    def _settled(self, ask: Callable[[], _T]) -> _T:
        """What `ask` gives, with the lock; without it, whatever it needs is compiled first."""
        while True:
            try:
                with self._lock:
                    return ask()
            except Pending as compilation:
                compilation.run()

    def _found(self, key: tuple[Any, ...]) -> Call | str:
        """Raises Busy; Pending if a variant is to be compiled first."""
        try:
            found: Call | str = self._find(key)
        except Busy:
            raise
        except Unavailable as reason:
            found = str(reason)
        if len(self) >= _MOST_ENTRIES:
            self.clear()
        if not self._forked:  # there the answer depends on the number of threads
            self[key] = found
        return found

    def clear(self) -> None:
        super().clear()
        if self.native is not None:
            self.native.clear()

    def variants(self) -> list[dict[str, Any]]:
        """What the manifest records of each variant: workload, genome, candidate, timing, ..."""
        found: list[dict[str, Any]] = deepcopy(self.package.manifest["variants"])
        return found

    def retire(self, index: int, device: int, reason: str) -> None:
        """A variant that failed is not tried again in this process."""
        known = index < len(self._variants)
        self._retire(self._variants[index] if known else self._jit.variant(index), device, reason)

    def serve_untuned(self, wanted: bool | None) -> None:
        """Whether sizes that are compiled in and that no variant has are compiled when they are first met. None, as at
        first: on GPUs, where that takes part of a second, and not on CPUs, where it takes seconds."""
        with self._lock:
            self._jit.wanted = wanted
            self.clear()

    def serve_slower(self, wanted: bool) -> None:
        """Whether a problem is a variant's, too, where the variant nearest to it was measured and PyTorch was faster."""
        with self._lock:
            self._slower = self._jit.slower = wanted
            self.clear()

    @contextmanager
    def only(self, index: int) -> Iterator[None]:
        """Within the block no other variant is chosen, in any thread: for checks and measurements."""
        self._only = index
        self.clear()
        try:
            yield
        finally:
            self._only = None
            self.clear()

    def unavailable(self, index: int) -> str:
        """Why a variant does not run on this machine; empty if it does."""
        variant = self._variants[index]
        try:
            device = self.device_of(index)
            self._settled(lambda: self._load(variant, device))
        except Unavailable as reason:
            return str(reason)
        return ""

    def rebuilt(self, index: int) -> str:
        """Why a CPU variant was built on this machine; empty if the shipped library is in use."""
        return self._rebuilt.get(index, "")

    def device_of(self, index: int) -> int:
        """The first device that a variant runs on. Raises Unavailable."""
        variant = self._variants[index]
        if variant.target == "cpu":
            return -1
        if not torch.cuda.is_available():
            raise Unavailable("no CUDA GPU answers to PyTorch")
        places = [device for device in range(torch.cuda.device_count()) if in_order([variant], device)]
        if not places:
            raise Unavailable(f"it is for {variant.arch}, and no GPU here is")
        builds = self._builds_of(variant)
        return next((device for device in places if in_order(builds, device)[0] is variant), places[0])

    def taken(self, index: int) -> int:
        """The variant that serves this one's problem here: itself, or another build of the same, for an architecture that is
        nearer to the device's. Itself, too, where none of them runs."""
        builds = self._builds_of(self._variants[index])
        try:
            places = [self.device_of(index)]
        except Unavailable:
            places = list(range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
        for device in places:
            with suppress(Unavailable):
                return self._serving(builds, device).index
        return index

    def _serving(self, builds: list[Variant], device: int) -> Variant:
        return self._settled(lambda: self._first(in_order(builds, device), device)).variant

    def _builds_of(self, variant: Variant) -> list[Variant]:
        return [v for v in self._variants if v.tuned_as(variant)]

    def tuned(self, place: str, dtype: torch.dtype, sizes: dict[str, int]) -> bool:
        """Whether some variant is for a device of that type, the dtype and these sizes: without looking at this machine,
        and so that torch.compile can follow it."""
        for v in self._variants:
            if v.target == place and getattr(torch, v.dtype) == dtype:
                wanted = True
                for name in sizes:
                    wanted = wanted and (name not in v.fixed or v.sizes[name] == sizes[name])
                if wanted:
                    return True
        return False

    def _find(self, key: tuple[Any, ...]) -> Call:
        device, dtype, *numbers = key
        sizes = {d["name"]: n for d, n in zip(self.package.dimensions, numbers, strict=True)}
        for d in self.package.dimensions:
            if not d["low"] <= sizes[d["name"]] <= d["high"]:
                raise Unavailable(f"{d['name']}={sizes[d['name']]} is not within {d['low']} to {d['high']}")
        name = str(dtype).removeprefix("torch.")
        try:
            builds = builds_of_nearest(self._candidates(device, name, sizes), sizes, device)
            if reason := self._left(builds[0], sizes, device):
                raise Unavailable(reason)
            self._refuse_forked(device)
            found = self._first(builds, device)
        except _NotTuned as reason:
            found = self._fallback(device, name, sizes, reason)
        if isinstance(found.loaded, cuda.Function):
            return cuda.CudaCall(found.variant, found.loaded, sizes, self._retire)
        self._refuse_forked(device)
        return cpu.CpuCall(found.variant, found.loaded, sizes)

    def _refuse_forked(self, device: int) -> None:
        if device < 0 and self._forked and torch.get_num_threads() > 1:
            # OpenMP's threads do not survive a fork, and its runtimes wait for them for ever.
            raise Unavailable("this process was forked; torch.set_num_threads(1) lets it use CPU variants")

    def _left(self, nearest: Variant, sizes: dict[str, int], device: int) -> str:
        """Why a problem is PyTorch's although the nearest variant would serve it; empty if it is not."""
        reason = "" if self._slower or self._only is not None else slower_there(nearest.record, sizes, device)
        return f"{reason}; also_serve(slower=True) has variants serve nevertheless" if reason else ""

    def _candidates(self, device: int, dtype: str, sizes: dict[str, int]) -> list[Variant]:
        """Variants that are right for a problem. Raises Unavailable, saying what they lack, if there are none."""
        target = "cpu" if device < 0 else "cuda"
        found = [v for v in self._variants if v.target == target and self._only in (None, v.index)]
        if not found:
            raise Unavailable(f"nothing was tuned for {target}")
        if target == "cuda":
            known = sorted({v.arch for v in found})
            found = in_order(found, device)
            if not found:
                raise Unavailable(f"nothing here runs on this GPU's architecture (there is {', '.join(known)})")
        known = sorted({v.dtype for v in found})
        found = [v for v in found if v.dtype == dtype]
        if not found:
            raise Unavailable(f"{dtype} is not a dtype that was tuned for ({', '.join(known)})")
        known = sorted({", ".join(f"{n}={v.sizes[n]}" for n in sorted(v.fixed)) for v in found})
        found = [v for v in found if all(v.sizes[n] == sizes[n] for n in v.fixed)]
        if not found:
            raise _NotTuned(f"these sizes were not tuned for ({'; '.join(known)})")
        return found

    def _fallback(self, device: int, dtype: str, sizes: dict[str, int], missing: _NotTuned) -> Compiled:
        """Of sizes that are compiled in and that no variant has. Raises Unavailable; Pending if it is yet to be compiled."""
        if self._only is not None or (device < 0 and self._forked and torch.get_num_threads() > 1):
            raise missing
        try:
            compiled = self._jit.fallback(device, dtype, sizes)
        except Busy:
            raise
        except Unavailable as reason:
            raise Unavailable(f"{missing}; {reason}") from None
        loaded = self._loaded.setdefault((compiled.variant.index, device), compiled)
        if isinstance(loaded, str):  # it failed later
            raise Unavailable(loaded)
        return loaded

    def _first(self, variants: list[Variant], device: int) -> Compiled:
        """The first of these that can be loaded. Raises Unavailable, with the reason of the first."""
        first: Unavailable | None = None
        for variant in variants:
            try:
                return self._load(variant, device)
            except Busy:
                raise
            except Unavailable as reason:
                first = first or reason
        raise first or Unavailable("there is none")

    def _load(self, variant: Variant, device: int) -> Compiled:
        """Loads a variant once for each device. Raises Unavailable, also for one that has failed before; Busy; Pending."""
        key = (variant.index, device)
        if key not in self._loaded:
            try:
                self._loaded[key] = self._code(variant, device)
            except Busy:
                raise
            except Unavailable as reason:
                self._loaded[key] = f"{variant}: {reason}"
        found = self._loaded[key]
        if isinstance(found, str):
            raise Unavailable(found)
        return found

    def _code(self, variant: Variant, device: int) -> Compiled:
        """A variant's binary; where it has none, or a library does not fit this CPU, what is compiled of its source."""
        if variant.binary is None:
            return self._jit.own(variant, device)
        if device >= 0:
            return Compiled(variant, cuda.load_shipped(self.package, variant, device))
        try:
            return Compiled(variant, cpu.load_shipped(self.package, variant))
        except Unavailable as shipped:
            try:
                found = self._jit.own(variant, device)
            except Busy:
                raise
            except Unavailable as built:
                raise Unavailable(f"{shipped}, and {built}") from built
            self._rebuilt[variant.index] = str(shipped)
            return found

    def _retire(self, variant: Variant, device: int, reason: str) -> None:
        with self._lock:
            self._loaded[variant.index, device] = f"{variant}: {reason}"
            self.clear()

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # whoever held it is not in this process
        self._forked = True
        self._jit.after_fork()
        if self.native is not None:
            self.native.after_fork()
        self.clear()
