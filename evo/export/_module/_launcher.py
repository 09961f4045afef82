"""Chooses and runs the variants of this package. It knows no kernel: frontend.py does, which is written against this:

    DISPATCH = Dispatch(trial)                what manifest.json lists; trial: a Trial, which tells how to find out whether
                                              what was compiled on this machine is right (_trial.py)
    found = DISPATCH[device, dtype, *sizes]   device: index of the GPU, -1 for the CPU; dtype: torch's; sizes: in
                                              the order of the kernel's dimensions. As cheap as a dict
    found is a str                            why no variant serves this problem: leave it to PyTorch
    found(*values) -> bool                    otherwise a Call. values: the entry point's arguments in order,
                                              addresses as int (0: left out), numbers. True: enqueued on the
                                              GPU's current stream (CPU: done). False: nothing ran: leave it to
                                              PyTorch
    found.sizes                               those of the key
    str(found.variant)                        for people
    DISPATCH.serve_untuned(wanted)            whether sizes that no variant has are compiled; None: for GPUs only
    DISPATCH.serve_slower(wanted)             whether variants serve where PyTorch was measured to be faster
    Table                                     the type of DISPATCH, and of what stands in for it in a trial
    addresses(*tensors) -> tuple | str        where they lie, 0 for None; or why they must be left to PyTorch: a
                                              gradient, a mode, a subclass, ... (_tensors.py)
    variants() -> list[dict]                  the manifest's records

What frontend.py passes must be memory of that device and dtype, laid out as the kernel expects.

Beside its public names (__all__), frontend.py defines, for `python -m PACKAGE check` and `bench`:

    SUBJECT, ORIGINAL                      the function of this package, and PyTorch's that it stands in for
    explain(*args)                         the way a call takes: starts with "variant" or "PyTorch"
    exact(*args)                           the result in float64
    cases(sizes, dtype, device, seed)      yields (name, args): random and edge-case calls around a variant's sizes
    timed(sizes, dtype, device, seed)      args of a call of exactly these sizes
    NATIVE, build()                        where there is a frontend.cpp: its Native (_native.py), and what builds it
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch

from . import _cpu, _cuda
from ._choice import builds_of_nearest, in_order, slower_there
from ._tensors import addresses
from ._trial import Call, OneVariant, Table, Trial, apart, first_fault
from ._untuned import Pending, Untuned
from ._variant import FOLDER, Busy, Unavailable, Variant

__all__ = ["MANIFEST", "Call", "Dispatch", "Table", "Trial", "addresses", "variants"]

MANIFEST: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))

_MOST_ENTRIES = 4096
_CODES = {"int64": "q", "int32": "i", "float32": "f", "float64": "d"}


def variants() -> list[dict[str, Any]]:
    """What the manifest records of each variant: workload, genome, candidate, timings, ..."""
    found: list[dict[str, Any]] = deepcopy(MANIFEST["variants"])
    return found


def _read_variants() -> tuple[Variant, ...]:
    kernel = MANIFEST["kernel"]
    codes = "".join("P" if a["kind"] != "scalar" else _CODES[a["dtype"]] for a in kernel["arguments"])
    return tuple(
        Variant(
            index=index,
            target=record["target"],
            arch=record["arch"],
            dtype=record["workload"]["dtype"],
            sizes=record["workload"]["dims"],
            fixed=frozenset(record["fixed"]),
            entry=kernel["entry"],
            arguments=codes,
            record=record,
        )
        for index, record in enumerate(MANIFEST["variants"])
    )


class _NotTuned(Unavailable):
    """All is right but for sizes that are compiled in."""


class Dispatch(Table):
    """From problem to Call, or to the reason why there is none; filled as problems come."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial
        self._variants = _read_variants()
        self._untuned = Untuned(MANIFEST, self._variants, trial)
        self._dimensions: list[dict[str, Any]] = MANIFEST["kernel"]["dimensions"]
        self._loaded: dict[tuple[int, int], _cpu.Library | _cuda.Function | str] = {}
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
            with self._lock:
                return self._found(key)
        except Pending as compilation:
            compilation.run()
        try:
            with self._lock:
                return self._found(key)
        except Pending:
            return "a variant could not be compiled for these sizes at this moment"

    def _found(self, key: tuple[Any, ...]) -> Call | str:
        """Raises Pending if a variant is to be compiled first."""
        try:
            found: Call | str = self._find(key)
        except Busy as reason:
            return str(reason)
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

    def retire(self, index: int, device: int, reason: str) -> None:
        """A variant that failed is not tried again in this process."""
        known = index < len(self._variants)
        self._retire(self._variants[index] if known else self._untuned.variant(index), device, reason)

    def serve_untuned(self, wanted: bool | None) -> None:
        """Whether sizes that are compiled in and that no variant has are compiled when they are first met. None, as at
        first: on GPUs, where that takes part of a second, and not on CPUs, where it takes seconds."""
        with self._lock:
            self._untuned.wanted = wanted
            self.clear()

    def serve_slower(self, wanted: bool) -> None:
        """Whether a problem is a variant's, too, where the variant nearest to it was measured and PyTorch was faster."""
        with self._lock:
            self._slower = self._untuned.slower = wanted
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
            self._load(variant, self.device_of(index))
        except Unavailable as reason:
            return str(reason)
        return ""

    def rebuilt(self, index: int) -> str:
        """Why the library of a CPU variant was built on this machine; empty if the shipped one is in use."""
        library = self._loaded.get((index, -1))
        return library.rebuilt if isinstance(library, _cpu.Library) else ""

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
                return self._load_first(in_order(builds, device), device)[0].index
        return index

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
        sizes = {d["name"]: n for d, n in zip(self._dimensions, numbers, strict=True)}
        for d in self._dimensions:
            if not d["low"] <= sizes[d["name"]] <= d["high"]:
                raise Unavailable(f"{d['name']}={sizes[d['name']]} is not within {d['low']} to {d['high']}")
        name = str(dtype).removeprefix("torch.")
        variant: Variant
        try:
            found = self._candidates(device, name, sizes)
            builds = builds_of_nearest(found, sizes, device)
            if reason := self._left(builds[0], sizes, device):
                raise Unavailable(reason)
            variant, loaded = self._load_first(builds, device)
        except _NotTuned as reason:
            variant, loaded = self._compiled_for(device, name, sizes, reason)
        if isinstance(loaded, _cuda.Function):
            return _cuda.CudaCall(variant, loaded, sizes, self._retire)
        if self._forked and torch.get_num_threads() > 1:
            # OpenMP's threads do not survive a fork, and its runtimes wait for them for ever.
            raise Unavailable("this process was forked; torch.set_num_threads(1) lets it use CPU variants")
        return _cpu.CpuCall(variant, loaded, sizes)

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

    def _compiled_for(
        self, device: int, dtype: str, sizes: dict[str, int], missing: _NotTuned
    ) -> tuple[Variant, _cpu.Library | _cuda.Function]:
        """Of sizes that are compiled in and that no variant has. Raises Unavailable; Pending if it is yet to be compiled."""
        if self._only is not None or (device < 0 and self._forked and torch.get_num_threads() > 1):
            raise missing
        try:
            variant = self._untuned.find(device, dtype, sizes)
        except Busy:
            raise
        except Unavailable as reason:
            raise Unavailable(f"{missing}; {reason}") from None
        assert variant.loaded is not None
        loaded = self._loaded.setdefault((variant.index, device), variant.loaded)
        if isinstance(loaded, str):  # it failed later
            raise Unavailable(loaded)
        return variant, loaded

    def _load_first(self, variants: list[Variant], device: int) -> tuple[Variant, _cpu.Library | _cuda.Function]:
        """The first of these that can be loaded. Raises Unavailable, with the reason of the first."""
        first: Unavailable | None = None
        for variant in variants:
            try:
                return variant, self._load(variant, device)
            except Busy:
                raise
            except Unavailable as reason:
                first = first or reason
        raise first or Unavailable("there is none")

    def _load(self, variant: Variant, device: int) -> _cpu.Library | _cuda.Function:
        """Loads a variant once for each device. Raises Unavailable, also for one that has failed before."""
        key = (variant.index, device)
        with self._lock:
            if key not in self._loaded:
                try:
                    self._loaded[key] = self._load_cpu(variant) if device < 0 else _cuda.load(variant, device)
                except Busy:
                    raise
                except Unavailable as reason:
                    self._loaded[key] = f"{variant}: {reason}"
            found = self._loaded[key]
        if isinstance(found, str):
            raise Unavailable(found)
        return found

    def _load_cpu(self, variant: Variant) -> _cpu.Library:
        library = _cpu.load(variant)
        if library.rebuilt:
            names = [d["name"] for d in self._dimensions]
            table = OneVariant(variant, names, lambda sizes: _cpu.CpuCall(variant, library, sizes))
            tolerance = MANIFEST["kernel"]["tolerance"]
            fault = apart(lambda: first_fault(self._trial, table, variant, torch.device("cpu"), tolerance))
            if fault:
                raise Unavailable(f"{library.rebuilt}, and what this machine's compiler makes of it is wrong ({fault})")
        return library

    def _retire(self, variant: Variant, device: int, reason: str) -> None:
        with self._lock:
            self._loaded[variant.index, device] = f"{variant}: {reason}"
            self.clear()

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # whoever held it is not in this process
        self._forked = True
        self._untuned.after_fork()
        if self.native is not None:
            self.native.after_fork()
        self.clear()
