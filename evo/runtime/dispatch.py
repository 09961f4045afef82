"""Chooses the variant that serves a problem, loads it, and remembers the answer. It knows no kernel: frontend.py does."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled, math_sdp_enabled, mem_efficient_sdp_enabled

from . import cpu, cuda
from .choice import CLOSE, EXACT, FAR, Family, Member, bucket_of, in_order, is_measured, member_of, members_of
from .driver import driver_version
from .jit import Compiling, Jit
from .manifest import MANIFEST
from .package import (
    Busy,
    Package,
    Unavailable,
    Variant,
    digest,
    faster_torch,
    in_words,
    keep,
    kept,
    options_in_words,
    tell,
)
from .trial import Call, Loaded, Table

_RACING = 2
"""Variants that a race is between, beside PyTorch."""
_GAIN = 1.05
"""How many times PyTorch's speed wins a race: its few rounds are not surer than that."""
BACKENDS: Mapping[str, Callable[[], bool]] = {
    "flash": flash_sdp_enabled, "efficient": mem_efficient_sdp_enabled, "math": math_sdp_enabled, "cudnn": cudnn_sdp_enabled,
}  # fmt: skip
"""Whether PyTorch may use its back ends of attention, which decide what a variant is raced with."""
_BUSY = "this machine is too busy to race a variant with it"
_RACES = 6
"""Races at one problem that a busy machine may spoil. Calls are left to PyTorch for 1 s, 2 s, 4 s, ... until the next one is
held; after the last one for the rest of this process."""
_PATIENCE_S = 1.5
"""What the first call of its kind waits for variants to be compiled; until that is done, the next are PyTorch's."""
_MOST_ENTRIES = 4096
"""Largest number of entries in a table; the oldest goes first."""

_NONE_NEAR = "no variant was timed near such sizes"
_VARIES = "results of no variant here are the same in any batch"

_Found = TypeVar("_Found")


class Dispatch(Table):
    """From problem to Call, or to the reason why there is none; filled as problems come. frontend: the kernel's module."""

    def __init__(self, package: Package, frontend: Any) -> None:
        super().__init__()
        self.package = package
        self.natives: list[Any] = []
        """What else keeps answers, and forgets them with this: native launchers, that of the forward of a backward, too."""
        self._frontend, self._jit = frontend, Jit(package, frontend)
        self._variants = list(package.variants)
        """The package's, and behind them what was compiled here for sizes that nothing was tuned for."""
        self._families: dict[tuple[Any, ...], Family | str] = {}
        """Families, by what all problems of one have in common (`_common`); or why there is none."""
        self._fallbacks: dict[tuple[Any, ...], list[Variant]] = {}
        """Likewise, where nothing was tuned for it, what can be compiled."""
        self._raced: dict[tuple[Any, ...], Member] = {}
        """Who has won a race, by what the problems have in common of which one race decides for all (`_bucket`)."""
        self._spoilt: dict[tuple[Any, ...], tuple[int, float]] = {}
        """How many races a busy machine has spoilt, and when (`time.monotonic`) the next may be held, by the same."""
        self._compiling: dict[tuple[Any, ...], Compiling] = {}
        """What the answer for a problem waits for."""
        self._loaded: dict[tuple[int, int], Loaded | str] = {}
        self._only: int | None = None
        self._untuned: bool | None = None
        self._wait: bool | None = None
        self._slower, self._measure, self._more, self._batch_invariant = False, True, False, False
        bound = getattr(frontend, "BOUND", None)
        self.batch: str = "" if bound is None else next((d.name for d in bound.kernel.dimensions if d.batch), "")
        """The dimension along which parts of a batch lie; empty if there is none."""
        self._varies: dict[tuple[int, int], str] = {}
        """Why results of a variant on a device may depend on what else is in a batch; empty if they do not."""
        self._forked = False
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):  # Linux and macOS
            os.register_at_fork(after_in_child=self._after_fork)

    def __missing__(self, key: tuple[Any, ...]) -> Call | str:
        if self._jit.busy:  # what is tried then may ask, too
            return "a variant is being compiled or raced"
        going_on = self._compiling.get(key)
        if going_on is not None and not going_on.work.done() and self._patience_s(key[0]) is not None:
            return str(going_on)
        with self._lock:
            found: Call | str
            try:
                found = self._awaited(lambda: self._find(key), self._patience_s(key[0]))
            except Unavailable as reason:
                found = str(reason)
            except Busy as reason:
                if isinstance(reason, Compiling):
                    _remember(self._compiling, key, reason)
                return str(reason)
            _remember(self, key, found)
            return found

    def clear(self) -> None:
        super().clear()
        self._families.clear()
        self._compiling.clear()
        self._raced.clear()
        self._spoilt.clear()
        for native in self.natives:
            native.clear()

    def variants(self) -> list[dict[str, Any]]:
        """What the manifest records of each variant: workload, genome, candidate, timing, ..."""
        found: list[dict[str, Any]] = deepcopy(self.package.manifest["variants"])
        return found

    def retire(self, index: int, device: int, reason: str) -> None:
        """A variant that failed is not tried again in this process."""
        with self._lock:
            self._loaded[index, device] = f"{self._variants[index]}: {reason}"
            self.clear()

    def also_serve(
        self,
        *,
        untuned: bool | None = None,
        slower: bool | None = None,
        measure: bool | None = None,
        wait: bool | None = None,
        batch_invariant: bool | None = None,
        more: bool | None = None,
    ) -> None:
        """What else variants serve; None leaves it as it is. Raises ValueError.

        untuned: sizes that are compiled in and that no variant has, which are compiled when they are first met. At first on
        GPUs, where that takes a second or two, and not on CPUs, where it takes more.
        slower: problems whose nearest variant was measured, and PyTorch was faster; where what was measured is not in the
        package, by the faster of the two nearest variants, as the next. Not at first.
        measure: problems unlike all that were measured by the fastest in a short race of the two nearest variants and
        PyTorch, as at first; else by the nearest variant. Nearest are also those whose sizes are up to 16 times farther, in
        each dimension, than the nearest one's.
        wait: calls for which variants are being compiled, by these: they wait. At first on CPUs and within CUDA graphs that
        are captured; on GPUs else for 1.5 s at most.
        batch_invariant: calls whose parts of a batch have the same bits in any other: by one variant for all sizes of the
        batch, also where PyTorch was faster. Not at first. ValueError where the kernel knows no batch.
        more: calls by variants with outputs that they do not ask for, where others are for the same sizes. Not at first.
        """
        if batch_invariant and not self.batch:
            raise ValueError(f"batch_invariant=True: no dimension of {self.package.name} is a batch")
        with self._lock:
            self._batch_invariant = self._batch_invariant if batch_invariant is None else batch_invariant
            self._untuned = self._untuned if untuned is None else untuned
            self._slower = self._slower if slower is None else slower
            self._measure = self._measure if measure is None else measure
            self._wait = self._wait if wait is None else wait
            if more is not None and more != self._more:
                self._more = more
                self._fallbacks.clear()
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
                self._awaited(lambda: self._load(variant, device))
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
            return self._awaited(lambda: self._first(in_order(builds, device), device)).variant.index
        return index

    def family(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """For the native launcher, of a problem: how it is served, in words; what is right for all problems like it, as
        native.h reads it; whether those that no measurement decides are raced; and what a race here has decided (or None).
        Of each member the sizes, why it leaves problems near those to PyTorch, its variant or why there is none (no words:
        it is not loaded yet), that one's number (-1: none), what its code says of itself, whether it was measured, and
        whether it gives outputs that they do not ask for. No members: PyTorch serves all of them; None: nothing that
        lasts."""
        found = self[key]
        text = found if isinstance(found, str) else str(found.variant)
        family = self._families.get(self._common(key))  # not locked: while something is compiled, others do not wait
        if not isinstance(family, Family):
            return text, None if family is None else [], False, None
        raced, device = self._raced.get(self._bucket(key)), key[0]
        told = [self._told(family, m, device) for m in family.members]
        return text, told, self._measures, None if raced is None else self._told(family, raced, device)

    def _told(self, family: Family, m: Member, device: int) -> tuple[Any, ...]:
        text, variant, code = self._state(m, device)
        more = variant >= 0 and self._variants[variant].gives_more(m.sizes)
        return (*m.sizes.values(), self._left(family, m), text and text + m.how, variant, code, m.measured, more)

    def _state(self, member: Member, device: int) -> tuple[str, int, tuple[Any, ...] | None]:
        refused = "" if member.builds else _NONE_NEAR
        for variant in member.builds:
            loaded = variant.refused or self._loaded.get((variant.index, device))
            if loaded is None:
                return "", -1, None
            if not isinstance(loaded, str):
                return str(variant), variant.index, loaded.described()
            refused = refused or loaded
        return refused, -1, None

    def _patience_s(self, device: int) -> float | None:
        """None: as long as it takes, also while a graph is captured, which has what it is given for good."""
        waits = device < 0 if self._wait is None else self._wait
        return None if waits or self._only is not None or cuda.is_capturing(device) else _PATIENCE_S

    def _awaited(self, work: Callable[[], _Found], seconds: float | None = None) -> _Found:
        """What `work` gives once what it has compiled is. Raises Busy where that takes longer, or earlier calls began it."""
        began, before = time.monotonic(), self._jit.begun
        while True:
            try:
                return work()
            except Compiling as reason:
                if seconds is None:
                    self._jit.wait(reason.work, None)
                    continue
                left = max(0.0, began + seconds - time.monotonic())
                if self._jit.begun == before or not self._jit.wait(reason.work, left):
                    raise

    def _find(self, key: tuple[Any, ...]) -> Call:
        """Raises Unavailable; Busy."""
        device, common, sizes = key[0], self._common(key), self._sizes(key)
        for d, size, compiled in zip(self.package.dimensions, sizes.values(), common[2:], strict=True):
            if not d["low"] <= size <= d["high"]:
                reason = f"{d['name']}={size} is not within {d['low']} to {d['high']}"
                if compiled == size:  # none like it is served
                    _remember(self._families, common, reason)
                raise Unavailable(reason)
        if common not in self._families:
            _remember(self._families, common, self._family(common, sizes))
        family = self._families[common]
        if isinstance(family, str):
            raise Unavailable(family)
        member = self._member(family, key)
        if left := self._left(family, member):
            raise Unavailable(left)
        try:
            loaded = self._first(member.builds, device)
        except Unavailable as reason:
            if not family.untuned:
                raise
            self._families[common] = refused = f"{family.untuned}{reason}"
            raise Unavailable(refused) from None
        if self._batch_invariant and self._varying(loaded, device, key[1], sizes):
            del self._families[common]
            return self._find(key)
        close = EXACT if member.sizes == sizes else CLOSE
        return loaded.call(sizes, self.retire, member.how or (close if is_measured(member, sizes) else FAR))

    def for_any_batch(self, index: int) -> tuple[Loaded, Loaded]:
        """What serves a variant's problem where results are to be the same in any batch, and that variant. Raises
        Unavailable, Busy."""
        variant, before = self._variants[index], self._batch_invariant
        device = _device_of(variant)
        key = (device, getattr(torch, variant.dtype), *(variant.sizes[d["name"]] for d in self.package.dimensions))
        self.also_serve(batch_invariant=True)
        try:
            with self._lock:
                found = self._awaited(lambda: self._find(key)).variant
                return self._load(found, device), self._load(variant, device)
        finally:
            self.also_serve(batch_invariant=before)

    def varies(self, index: int) -> str | None:
        """Why parts of a batch may have other bits in another one, as a variant computes them; empty if they have the same.
        None where the kernel knows no batch. Raises Unavailable, Busy."""
        if not self.batch:
            return None
        variant, device = self._variants[index], _device_of(self._variants[index])
        with self._lock, torch.no_grad():
            loaded = self._awaited(lambda: self._load(variant, device))
            return self._varying(loaded, device, getattr(torch, variant.dtype), variant.sizes)

    def _varying(self, loaded: Loaded, device: int, dtype: torch.dtype, sizes: Mapping[str, int]) -> str:
        """Tried once for each variant and device. Raises Busy within a graph that is captured."""
        place = loaded.variant.index, device
        if place not in self._varies:
            if cuda.is_capturing(device):
                raise Busy("whether its results are the same in any batch cannot be tried within a graph's capture")
            where = torch.device("cpu") if device < 0 else torch.device("cuda", device)
            try:
                same = self._frontend.same_in_any_batch(self.batch, loaded, sizes, dtype, where)
                self._varies[place] = "" if same else "it has other bits in another batch"
            except torch.OutOfMemoryError:
                raise Busy("no memory is left to try whether its results are the same in any batch") from None
            except Exception as error:  # whatever it is, the caller has a model to run
                self._varies[place] = f"it cannot be tried: {str(error).partition(chr(10))[0]}"
        return self._varies[place]

    @property
    def _measures(self) -> bool:
        return self._measure and self._only is None and not self._batch_invariant

    def _member(self, family: Family, key: tuple[Any, ...]) -> Member:
        """The one that serves a problem, if PyTorch does not. Raises Busy where it is to be raced, and cannot now."""
        sizes = self._sizes(key)
        nearest = family.near(sizes)
        if not self._measures or is_measured(nearest[0], sizes):
            return nearest[0]
        bucket = self._bucket(key)
        if bucket not in self._raced:
            _remember(self._raced, bucket, self._race(nearest, bucket, sizes))
        return self._raced[bucket]

    def _race(self, nearest: Sequence[Member], bucket: tuple[Any, ...], sizes: Mapping[str, int]) -> Member:
        """What a race of the first two with PyTorch decides, held now or earlier on this machine. Raises Busy, also where
        this machine is too busy: such a race decides nothing, and nothing of it is remembered."""
        device, dtype, name = bucket[0], bucket[1], self._race_file(bucket)
        variant, ratio, where = json.loads(kept(name) or '["", 0, ""]')
        known = [v for m in nearest for v in m.builds if str(v) == variant]
        builds = [v for v in known if not isinstance(self._loaded.get((v.index, device)), str)]  # it may have failed since
        if not builds:
            spoilt, next_s = self._spoilt.get(bucket, (0, 0.0))
            if time.monotonic() < next_s:
                raise Busy(_BUSY)
            contenders, compiling = list[Loaded](), list[Compiling]()
            for member in nearest:
                try:
                    loaded = self._first(member.builds, device)
                    contenders += [loaded] if loaded not in contenders else []
                except Unavailable:
                    continue
                except Compiling as going_on:  # all of them at the same time
                    compiling.append(going_on)
                if len(contenders) + len(compiling) == _RACING:
                    break
            if compiling:
                raise compiling[0]
            if not contenders:
                return nearest[0]  # of which the reason is told
            try:
                fastest, ratio, busy = self._jit.race(contenders, sizes, dtype, device)
            except Exception as error:  # whatever it is, the caller has a model to run
                reason = str(error).partition("\n")[0]
                return replace(nearest[0], slower=f"no race with it could be held: {reason}")
            if busy and not self._spoilt:
                tell(f"{self.package.name}: problems not measured before go to PyTorch: {_BUSY}; explain(...) says which")
            if busy and spoilt + 1 < _RACES:
                _remember(self._spoilt, bucket, (spoilt + 1, time.monotonic() + 2**spoilt))
                raise Busy(_BUSY)
            if busy:
                return replace(nearest[0], slower=_BUSY)
            builds, where = [fastest.variant], in_words(sizes, self.package.options)
            keep(name, json.dumps([str(fastest.variant), ratio, where]).encode())
        slower = faster_torch(where, "this machine", ratio) if ratio * _GAIN > 1 else ""
        return Member(builds, sizes, True, slower, f", raced here at {where}: {1 / ratio:.2f} times PyTorch's speed")

    def _race_file(self, bucket: tuple[Any, ...]) -> str:
        device, *common = bucket
        if device < 0:
            machine = [cpu.model(), torch.get_num_threads()]
        else:
            machine = [torch.cuda.get_device_name(device), driver_version(), torch.backends.cudnn.version()]
        machine += [enabled() for enabled in BACKENDS.values()]
        return f"race-{digest(self.package.read(MANIFEST), torch.__version__, *map(str, (*machine, *common)))}"

    def _sizes(self, key: tuple[Any, ...]) -> dict[str, int]:
        return {d["name"]: int(n) for d, n in zip(self.package.dimensions, key[2:], strict=True)}  # causal is a bool

    def _bucket(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """What problems share that are served as the first of them that was raced."""
        return (*self._common(key), *bucket_of(self._sizes(key)))

    def _common(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a problem has in common with all for which the same variants are right: other sizes count as 0."""
        device, dtype, *numbers = key
        fixed = self.package.fixed["cpu" if device < 0 else "cuda"]
        return (device, dtype, *(int(n) if f else 0 for n, f in zip(numbers, fixed, strict=True)))

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
        tuned = [v for v in candidates if v.fits(sizes)]
        if self._batch_invariant:
            sizes = {**sizes, self.batch: 1}
            if not (steady := [v for v in tuned if not self._varies.get((v.index, device))]) and tuned:
                return _VARIES
            tuned = steady
        if tuned:
            if self._only is not None:
                return Family([member_of(tuned, device, {}, sizes)])
            members = members_of(tuned, device, sizes, self._more, self._slower)
            if self._batch_invariant:
                members = self._of_any_batch(members)
            if self._measures and any(sizes[n] for n in getattr(self._frontend, "DATA_DECIDE", ())):
                members = [replace(m, measured=False, slower="") for m in members]
            return Family(members)
        asked, *known = (self._compiled_in(candidates[0], own) for own in (sizes, *(v.sizes for v in candidates)))
        untuned = f"nothing was tuned for {asked} (but for {'; '.join(sorted(set(known)))}); "
        if self._only is not None:
            return untuned + "no other variant is to be chosen now"
        if common not in self._fallbacks:
            _remember(self._fallbacks, common, self._jit.fallbacks(device, name, sizes, self._more))
        builds = [v for v in self._fallbacks[common] if not (self._batch_invariant and self._varies.get((v.index, device)))]
        if not builds and self._fallbacks[common]:
            return _VARIES
        if not builds:
            return untuned + "none here can be compiled for them"
        if not (device >= 0 if self._untuned is None else self._untuned):
            return untuned + "also_serve(untuned=True) has a variant compiled for them"
        return Family([replace(member_of(builds, device, {}, sizes), measured=False)], untuned)

    def _of_any_batch(self, members: Sequence[Member]) -> list[Member]:
        """One of the members for the same sizes beside the batch, which was tuned for the largest batch, as if it was for a
        batch of one: the size of a batch then chooses nothing."""
        found: dict[tuple[int, ...], Member] = {}
        for m in sorted((m for m in members if m.builds), key=lambda m: m.sizes[self.batch]):
            sizes = {**m.sizes, self.batch: 1}
            found[tuple(sizes.values())] = replace(m, sizes=sizes, measured=False, slower="")
        return list(found.values())

    def _compiled_in(self, variant: Variant, sizes: Mapping[str, int]) -> str:
        """The sizes that are, in words, and the options that are on: head_dim=64 causal."""
        sizes = {n: sizes[n] for n in sorted(variant.fixed)}
        numbers = [f"{n}={size}" for n, size in sizes.items() if n not in self.package.options]
        return " ".join([*numbers, *options_in_words(sizes, self.package.options)]) or "no option"

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
        raise reasons[0] if reasons else Unavailable(_NONE_NEAR)

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
        Raises Unavailable; Busy."""
        if variant.binary is None:
            return self._jit.compiled(variant, device)
        if device >= 0:
            code = self.package.read(variant.binary)
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
        self._jit.forget()
        self._forked = True
        for native in self.natives:
            native.after_fork()
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
