"""Compiles on this machine, once: variants that come as a source, and the nearest one for sizes that nothing was tuned for.

What is compiled is tried (trial.py) before it serves a call, and kept on disk for later processes. For other sizes, a
source is a variant's, or one of the manifest's `general` ones for whole ranges of sizes, with another number where its size
stands. See evo/export/module.py, which writes what is read here.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Semaphore, local
from typing import Any

import torch

from . import cpu, cuda, nvrtc
from .choice import factors, rank
from .driver import driver_version
from .package import Busy, Package, Unavailable, Variant, digest, keep, kept, tell
from .trial import Loaded, apart, race, try_out

_MOST_SIZES = 128
"""Largest number of sizes that one process compiles, since programs whose sizes never repeat would compile for ever."""
_MOST_ATTEMPTS = 2
"""Sources that are tried for one size, where they do not compile or load."""
_SAID_AFTER_S = 1.0
"""A pause that a user may wonder about is told on stderr."""
_ONLY_IF_NEAR = 2.0
"""Doublings by which a variant may be farther from a size than a general source is."""
_AT_ONCE = 2
"""Variants that are compiled at the same time: those that a race is between."""
_compiling = local()
"""`here`: whether this thread compiles, so that what it calls does not wait for it."""


class Compiling(Busy):
    """A variant is being compiled, which `work` ends."""

    def __init__(self, work: Future[Loaded]) -> None:
        super().__init__("a variant for it is being compiled beside the calls, once on this machine")
        self.work = work


class Jit:
    """Compiler of one package's sources. frontend: the module by whose cases results are judged."""

    def __init__(self, package: Package, frontend: Any) -> None:
        self._package, self._frontend = package, frontend
        self._bases = [(v, 0.0) for v in package.variants if v.record.get("jit")]
        self._bases += [(Variant(package, -1, record), _ONLY_IF_NEAR) for record in package.manifest["general"]]
        self._sizes = 0
        self.begun = 0
        """Number of compilations begun."""
        self.busy: bool
        """Whether a call waits for one, or a race is held."""
        self.forget()

    def forget(self) -> None:
        """In the child of a fork, where no thread goes on with what was begun."""
        self._work, self._free, self.busy = dict[tuple[Variant, int], Future[Loaded]](), Semaphore(_AT_ONCE), False
        self._streams = dict[int, torch.cuda.Stream]()

    def fallbacks(
        self, device: int, dtype: str, sizes: Mapping[str, int], prefer_more: bool = False
    ) -> list[Variant]:
        """What can be compiled for these sizes on the device, the one to be taken first: all give outputs that the sizes do
        not ask for, or none does; the former if `prefer_more` and there are such."""
        ranked: list[tuple[tuple[float, ...], Variant]] = []
        for base, penalty in self._bases:
            name = base.record["jit"]["dimension"]
            if base.dtype != dtype or not base.fits(sizes, but=name):
                continue
            variant = base.at(sizes[name])
            place = rank(variant, device) if variant is not None else None
            if variant is not None and place is not None:
                distance = factors(base.sizes, sizes)
                order = (distance.pop(name) + penalty, sum(distance.values()), place, len(ranked))
                ranked.append((order, variant))
        found = [variant for _, variant in sorted(ranked, key=lambda pair: pair[0])]
        preferred = [variant for variant in found if variant.gives_more(sizes) == prefer_more]
        return (preferred or found)[:_MOST_ATTEMPTS]

    def compiled(self, variant: Variant, device: int) -> Loaded:
        """Compiled, tried and kept; or what was kept before. Raises Unavailable; Compiling while that goes on beside the
        caller, in a thread and on a stream of its own."""
        if getattr(_compiling, "here", False):
            raise Busy("a variant is being compiled")
        key = variant, device
        if (work := self._work.get(key)) is None:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evo-jit")
            try:
                work = self._work[key] = thread.submit(self._beside, variant, device, torch.get_num_threads())
            except RuntimeError as error:  # the process ends
                raise Unavailable(f"it cannot be compiled on this machine now: {error}") from None
            thread.shutdown(wait=False)
            self.begun += 1
        if not work.done():
            raise Compiling(work)
        del self._work[key]
        try:
            return work.result()
        except Exception as error:  # whatever it is, the call is PyTorch's
            told = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
            raise Unavailable(f"compiling it on this machine fails: {told.partition(chr(10))[0]}") from error

    def wait(self, work: Future[Loaded], seconds: float | None) -> bool:
        """Whether it is over, which is waited for so long."""
        with self._alone():
            return bool(wait([work], seconds).done)

    def race(
        self, contenders: Sequence[Loaded], sizes: Mapping[str, int], dtype: torch.dtype, device: int
    ) -> tuple[Loaded, float, bool]:
        """See trial.race. It goes on behind what the caller's stream has to do, or beside a graph that is captured of it."""
        with self._alone():
            stream = self._stream(device) if device < 0 or cuda.is_capturing(device) else torch.cuda.current_stream(device)
            return race(self._frontend, contenders, sizes, dtype, device, stream)

    def _stream(self, device: int) -> torch.cuda.Stream | None:
        """This one's own; None for a CPU."""
        if device >= 0 and device not in self._streams:
            self._streams[device] = cuda.new_stream(device)
        return self._streams.get(device)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Other threads do not wait within: calls that no variant serves yet are PyTorch's."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def _beside(self, variant: Variant, device: int, threads: int) -> Loaded:
        _compiling.here = True
        with self._free:
            return apart(device, self._stream(device), threads, lambda place: self._compiled(variant, device, place))

    def _compiled(self, variant: Variant, device: int, place: torch.device) -> Loaded:
        started, package, recipe = time.monotonic(), self._package, variant.record["recipe"]
        if recipe is None:
            raise Unavailable("the language of its source is not compiled where it runs")
        text, flags = variant.source(), recipe["flags"]
        headers = package.headers(text)
        if device < 0:
            command, version = cpu.compiler()
            how = [*command, version, cpu.machine(), *sorted(cpu.features())]
        else:
            compiler, properties = nvrtc.compiler(), torch.cuda.get_device_properties(device)
            arch = compiler.arch_for((properties.major, properties.minor), variant.arch)
            how = [str(compiler), arch, properties.name, str(driver_version())]
        # What is kept was found right with these, and is looked at again with others.
        judges = [Path(__file__).with_name(name) for name in ("judged.py", "trial.py", "tolerance.py")]
        judged = [*flags, *how, torch.__version__, *(p.read_bytes() for p in (*package.modules(), *judges))]
        name = f"compiled-{digest(text, *(headers[n] for n in sorted(headers)), *judged)}"
        before = kept(name)
        if before is None and variant.size is not None:
            if self._sizes >= _MOST_SIZES:
                raise Unavailable(f"{_MOST_SIZES} sizes were compiled in this process, and more are left to PyTorch")
            self._sizes += 1
        loaded: Loaded
        if device < 0:
            code = before or cpu.compile_library(text, recipe, package.folders)
            loaded = cpu.load_library(variant, name, code)
        else:
            code = before or compiler.compile(text, headers, flags, arch).code
            loaded = cuda.load_image(variant, name, code, device)
        if before is None:
            try_out(self._frontend, loaded, place)
            if isinstance(loaded, cuda.Function) and any(p.blocks_per_multiprocessor for p in variant.plans):
                # A persistent grid also with so few blocks that each takes many turns.
                try_out(self._frontend, replace(loaded, multiprocessors=1), place)
            keep(name, code)
            if (seconds := time.monotonic() - started) > _SAID_AFTER_S:
                tell(f"{package.name}: compiling {variant} took {seconds:.1f} s, once")
        return loaded
