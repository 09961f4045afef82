"""Chooses the variant that serves a problem, loads it, and remembers the answer. It knows no kernel: frontend.py does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch

from . import cpu, cuda
from .choice import Family, Member, in_order, members_of
from .jit import Jit
from .package import Busy, Package, Unavailable, Variant
from .trial import Call, Loaded, Table

_MOST_ENTRIES = 4096
"""That a table keeps; the oldest goes first."""


class Dispatch(Table):
    """From problem to Call, or to the reason why there is none; filled as problems come. frontend: the kernel's module."""

    def __init__(self, package: Package, frontend: Any) -> None:
        super().__init__()
        self.package = package
        self.native: Any = None
        """What else keeps answers, and forgets them with this: the native launcher, where there is one."""
        self._jit = Jit(package, frontend)
        self._variants = list(package.variants)
        """The package's, and behind them what was compiled here for sizes that nothing was tuned for."""
        self._families: dict[tuple[Any, ...], Family | str] = {}
        """By what all problems of one have in common (`_common`); or why there is none."""
        self._fallbacks: dict[tuple[Any, ...], list[Variant]] = {}
        """Likewise, where nothing was tuned for it, what can be compiled."""
        self._loaded: dict[tuple[int, int], Loaded | str] = {}
        self._only: int | None = None
        self._untuned: bool | None = None
        self._slower = False
        self._forked = False
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):  # Linux and macOS
            os.register_at_fork(after_in_child=self._after_fork)

    def __missing__(self, key: tuple[Any, ...]) -> Call | str:
        if self._jit.busy:  # it takes long, and what is tried then may ask, too
            return "a variant is being compiled"
        with self._lock:
            found: Call | str
            try:
                found = self._find(key)
            except Unavailable as reason:
                found = str(reason)
            except Busy as reason:
                return str(reason)
            _remember(self, key, found)
            return found

    def clear(self) -> None:
        super().clear()
        self._families.clear()
        if self.native is not None:
            self.native.clear()

    def variants(self) -> list[dict[str, Any]]:
        """What the manifest records of each variant: workload, genome, candidate, timing, ..."""
        found: list[dict[str, Any]] = deepcopy(self.package.manifest["variants"])
        return found

    def retire(self, index: int, device: int, reason: str) -> None:
        """A variant that failed is not tried again in this process."""
        with self._lock:
            self._loaded[index, device] = f"{self._variants[index]}: {reason}"
            self.clear()

    def also_serve(self, *, untuned: bool | None = None, slower: bool | None = None) -> None:
        """What else variants serve; None leaves it as it is.

        untuned: sizes that are compiled in and that no variant has, which are compiled when they are first met. At first on
        GPUs, where that takes part of a second, and not on CPUs, where it takes seconds.
        slower: problems whose nearest variant was measured, and PyTorch was faster. Not at first.
        """
        with self._lock:
            self._untuned = self._untuned if untuned is None else untuned
            self._slower = self._slower if slower is None else slower
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
            device = _device_of(variant)
            if not in_order([variant], device):
                return f"it is for {variant.arch}, and the first GPU here is not"
            with self._lock:
                self._load(variant, device)
        except (Unavailable, Busy) as reason:
            return str(reason)
        return ""

    def taken(self, index: int) -> int:
        """The variant that serves this one's problem here: itself, or another build of the same, for an architecture that is
        nearer to the device's. Itself, too, where none of them runs."""
        variant = self._variants[index]
        builds = [v for v in self.package.variants if v.tuned_as(variant)]
        with suppress(Unavailable, Busy), self._lock:
            device = _device_of(variant)
            return self._first(in_order(builds, device), device).variant.index
        return index

    def family(self, key: tuple[Any, ...]) -> tuple[str, list[tuple[Any, ...]] | None]:
        """For the native launcher, of a problem: how it is served, in words, and what is right for all problems like it, as
        native.h reads it: of each member the sizes, why it leaves problems near those to PyTorch, its variant or why there
        is none (no words: it is not loaded yet), that one's number (-1: none), and what its code says of itself. No
        members: PyTorch serves all of them; None: nothing that lasts."""
        found = self[key]
        text = found if isinstance(found, str) else str(found.variant)
        family = self._families.get(self._common(key))  # not locked: while something is compiled, others do not wait
        if family is None or isinstance(family, str):
            return text, None if family is None else []
        return text, [(*m.sizes.values(), self._left(family, m), *self._state(m, key[0])) for m in family.members]

    def _state(self, member: Member, device: int) -> tuple[str, int, tuple[Any, ...] | None]:
        refused = ""
        for variant in member.builds:
            loaded = variant.refused or self._loaded.get((variant.index, device))
            if loaded is None:
                return "", -1, None
            if not isinstance(loaded, str):
                return str(variant), variant.index, loaded.described()
            refused = refused or loaded
        return refused, -1, None

    def _find(self, key: tuple[Any, ...]) -> Call:
        """Raises Unavailable; Busy."""
        device, common = key[0], self._common(key)
        sizes = {d["name"]: n for d, n in zip(self.package.dimensions, key[2:], strict=True)}
        for d in self.package.dimensions:
            if not d["low"] <= sizes[d["name"]] <= d["high"]:
                raise Unavailable(f"{d['name']}={sizes[d['name']]} is not within {d['low']} to {d['high']}")
        if common not in self._families:
            _remember(self._families, common, self._family(common, sizes))
        family = self._families[common]
        if isinstance(family, str):
            raise Unavailable(family)
        member, near = family.nearest(sizes)
        if near and (left := self._left(family, member)):
            raise Unavailable(left)
        try:
            loaded = self._first(member.builds, device)
        except Unavailable as reason:
            if not family.untuned:
                raise
            self._families[common] = refused = f"{family.untuned}{reason}"
            raise Unavailable(refused) from None
        return loaded.call(sizes, self.retire)

    def _common(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a problem has in common with all for which the same variants are right: other sizes count as 0."""
        device, dtype, *numbers = key
        fixed = self.package.fixed["cpu" if device < 0 else "cuda"]
        return (device, dtype, *(n if f else 0 for n, f in zip(numbers, fixed, strict=True)))

    def _family(self, common: tuple[Any, ...], sizes: Mapping[str, int]) -> Family | str:
        """What is right for a problem and all like it, or why there is nothing."""
        device, name = common[0], str(common[1]).removeprefix("torch.")
        if device < 0 and self._forked:  # OpenMP's threads do not survive that, and its runtimes wait for them for ever
            return "this process was forked, which leaves CPU calls to PyTorch"
        here = (v for v in in_order(self.package.variants, device) if v.dtype == name)
        candidates = [v for v in here if self._only in (None, v.index)]
        if not candidates:
            tuned_for = sorted({f"{v.target} {v.arch} {v.dtype}" for v in self.package.variants})
            return f"nothing was tuned for {name} on this device (there is {', '.join(tuned_for)})"
        tuned = [v for v in candidates if all(v.sizes[n] == sizes[n] for n in v.fixed)]
        if tuned:
            return Family(members_of(tuned, device))
        known = sorted({", ".join(f"{n}={v.sizes[n]}" for n in sorted(v.fixed)) for v in candidates})
        untuned = f"these sizes were not tuned for ({'; '.join(known)}); "
        if self._only is not None:
            return untuned + "no other variant is to be chosen now"
        if common not in self._fallbacks:
            _remember(self._fallbacks, common, self._jit.fallbacks(device, name, sizes))
        if not (builds := self._fallbacks[common]):
            return untuned + "none here can be compiled for them"
        if not (device >= 0 if self._untuned is None else self._untuned):
            return untuned + "also_serve(untuned=True) has a variant compiled for them"
        return Family([Member(builds, device)], untuned)

    def _left(self, family: Family, member: Member) -> str:
        """Why problems near a member's own are left to PyTorch; empty if they are not."""
        if self._slower or self._only is not None or not member.slower:
            return ""
        return f"{family.untuned}{member.slower}; also_serve(slower=True) has variants serve nevertheless"

    def _first(self, variants: Sequence[Variant], device: int) -> Loaded:
        """The first of these that can be loaded. Raises Unavailable, with the reason of the first; Busy."""
        reasons: list[Unavailable] = []
        for variant in variants:
            try:
                return self._load(variant, device)
            except Unavailable as reason:
                reasons.append(reason)
        raise reasons[0] if reasons else Unavailable("there is none")

    def _load(self, variant: Variant, device: int) -> Loaded:
        """Loads a variant once for each device. Raises Unavailable, also for one that has failed before; Busy."""
        found = variant.refused or self._loaded.get((variant.index, device))
        if found is None:
            try:
                found = self._code(variant, device)
            except Unavailable as reason:
                found = f"{variant}: {reason}"
            if variant.index >= 0:
                self._loaded[variant.index, device] = found
            elif isinstance(found, str):  # of such sizes there is no end: they have a number once there is code for them
                variant.refused = found
            else:
                variant.index = len(self._variants)
                self._variants.append(variant)
                self._loaded[variant.index, device] = found
        if isinstance(found, str):
            raise Unavailable(found)
        return found

    def _code(self, variant: Variant, device: int) -> Loaded:
        """A variant's binary; where it has none, or a library does not fit this CPU, what is compiled of its source.
        Raises Unavailable; Busy while a CUDA graph is captured."""
        if device >= 0:
            cuda.refuse_while_capturing(device)
        if variant.binary is None:
            return self._jit.compiled(variant, device)
        if device >= 0:
            code = self.package.read(variant.binary, variant.record["binary_sha256"])
            return cuda.load_image(variant, variant.binary, code, device)
        try:
            return cpu.load_shipped(variant)
        except Unavailable as shipped:
            try:
                found = self._jit.compiled(variant, device)
            except Unavailable as built:
                raise Unavailable(f"{shipped}, and {built}") from built
            variant.rebuilt = str(shipped)
            return found

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # whoever held it is not in this process
        self._jit.busy, self._forked = False, True
        if self.native is not None:
            self.native.after_fork()
        self.clear()


def _remember(table: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: object) -> None:
    if len(table) >= _MOST_ENTRIES:
        del table[next(iter(table))]
    table[key] = value


def _device_of(variant: Variant) -> int:
    """-1 for the CPU, else the first GPU. Raises Unavailable where there is none."""
    if variant.target == "cpu":
        return -1
    if not torch.cuda.is_available():
        raise Unavailable("no CUDA GPU answers to PyTorch")
    return 0
