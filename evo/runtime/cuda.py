"""Loads cubins (or PTX) and launches them on PyTorch's streams, through the CUDA driver by ctypes.

Reference: CUDA Driver API, sections Module Management and Execution Control.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from .driver import (
    DYNAMIC_SMEM,
    LARGE_CLUSTER,
    PORTABLE_CLUSTER,
    REGISTERS,
    SMEM_WITHOUT_OPT_IN,
    STATIC_SMEM,
    Frame,
    Slot,
    answer,
    ask,
    error_text,
    load_driver,
)
from .manifest import OPERATIONS, LaunchPlan, launchable, quantity
from .package import Unavailable, Variant

_NO_CONTEXT = 201
_CAPTURE_ERRORS = range(900, 920)
_RELAXED = 2  # CUstreamCaptureMode
_NON_BLOCKING = 1  # CUstream_flags

# torch's public ways to ask these make objects first, which takes longer than the launch.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


@dataclass(frozen=True, eq=False)
class Function:
    """A variant loaded into the primary context of one GPU, the one that PyTorch uses.

    `handles`: for each launch the entry point, and the one for addresses that are no multiples of the launch's alignment; 0
    where that is 1.
    """

    variant: Variant
    handles: tuple[tuple[int, int], ...]
    context: int
    index: int
    multiprocessors: int

    def described(self) -> tuple[Any, ...]:
        """For the native launcher: context, workspace, and of each launch the entry points and how to launch them at any
        size: what is cut, as in choice.h, and the size of a piece; most blocks (0: any)."""
        names, launches = [d["name"] for d in self.variant.package.dimensions], []
        for plan, handles in zip(self.variant.plans, self.handles, strict=True):
            tiles = tuple((numbered(text, names), size) for text, size in plan.tiles)
            most = plan.most_blocks(self.multiprocessors) or 0
            numbers = plan.block, plan.smem_bytes, plan.cluster, plan.programmatic, plan.alignment
            launches.append((*handles, *numbers, tiles, plan.blocks_per_tile, most, plan.axes))
        return self.context, self.variant.described_workspace(), tuple(launches)

    def call(self, sizes: Mapping[str, int], retire: Callable[[int, int, str], None], how: str = "") -> CudaCall:
        """retire(index of the variant, GPU, reason): told of a launch that fails. how: the variant was chosen, in words.
        Raises Unavailable."""
        return CudaCall(self, sizes, retire, how)


def numbered(text: str, names: Sequence[str]) -> list[tuple[int, int]]:
    """A `quantity` in pairs: (0, a dimension's number), (1, a whole number), (2, the number of an operation)."""
    operations = [*OPERATIONS]
    kinds = {**{n: (2, i) for i, n in enumerate(operations)}, **{n: (0, i) for i, n in enumerate(names)}}
    return [kinds[part] if isinstance(part, str) else (1, part) for part in quantity(text)]


def _primary_context(index: int) -> int:
    """The context of a GPU that PyTorch uses. Raises Unavailable."""
    device = answer(ctypes.c_int, "cuDeviceGet", "the GPU does not answer", index)
    context: int = answer(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", "the GPU's context cannot be had", device)
    return context


@contextmanager
def _context(context: int) -> Iterator[None]:
    ask("cuCtxPushCurrent", "the GPU's context cannot be used", context)
    try:
        yield
    finally:
        load_driver().cuCtxPopCurrent(ctypes.byref(ctypes.c_void_p()))


def is_capturing(index: int) -> bool:
    """Whether this thread's stream on a GPU is being captured into a CUDA graph; never on a CPU, whose index is -1, or by a
    PyTorch without CUDA."""
    if index < 0 or torch.version.cuda is None:
        return False
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


def new_stream(index: int) -> torch.cuda.Stream:
    """A stream that nothing else uses: those of torch.cuda.Stream are lent in turns, also to what captures graphs. Raises
    Unavailable."""
    with beside_captures(), _context(_primary_context(index)):
        stream = answer(ctypes.c_void_p, "cuStreamCreate", "the GPU has no stream to compile on", _NON_BLOCKING)
    return torch.cuda.ExternalStream(stream, torch.device("cuda", index))


@contextmanager
def beside_captures() -> Iterator[None]:
    """This thread or another may be capturing a graph: only in this mode may code be loaded and memory allocated meanwhile.
    Raises Unavailable."""
    driver, mode = load_driver(), ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def load_image(variant: Variant, name: str, image: bytes, index: int) -> Function:
    """Code of a variant's, a cubin or PTX, that messages call `name`. Raises Unavailable."""
    context = _primary_context(index)
    with beside_captures(), _context(context):
        handles = _load_functions(image, name, variant)
    properties = torch.cuda.get_device_properties(index)
    return Function(variant, handles, context, index, properties.multi_processor_count)


def _load_functions(image: bytes, name: str, variant: Variant) -> tuple[tuple[int, int], ...]:
    fails = f"{name} does not load"
    # The terminating NUL that ctypes sees to is what PTX needs; a cubin knows its own length.
    module = answer(ctypes.c_void_p, "cuModuleLoadData", fails, image)

    def look_up(symbol: str) -> int:
        missing = f"{name} has no entry point {symbol}"
        function: int = answer(ctypes.c_void_p, "cuModuleGetFunction", missing, module, symbol.encode())
        # Also has a driver that loads lazily load the code now, and not amid a later capture.
        answer(ctypes.c_int, "cuFuncGetAttribute", fails, REGISTERS, function)
        return function

    def prepared(plan: LaunchPlan) -> tuple[int, int]:
        entry = variant.entry(plan)
        unaligned = look_up(f"{entry}_unaligned") if plan.alignment > 1 else 0
        function = look_up(entry)
        if plan.smem_bytes + answer(ctypes.c_int, "cuFuncGetAttribute", fails, STATIC_SMEM, function) > SMEM_WITHOUT_OPT_IN:
            needed = f"{name} needs {plan.smem_bytes} bytes of shared memory a block"
            ask("cuFuncSetAttribute", needed, function, DYNAMIC_SMEM, plan.smem_bytes)
        if plan.cluster > PORTABLE_CLUSTER:
            ask("cuFuncSetAttribute", f"{name} needs clusters of {plan.cluster} blocks", function, LARGE_CLUSTER, 1)
        return function, unaligned

    return tuple(map(prepared, variant.plans))


class CudaCall:
    """A loaded variant with the geometry of its launches, in order. May be called by several threads at once."""

    def __init__(
        self, function: Function, sizes: Mapping[str, int], retire: Callable[[int, int, str], None], how: str
    ) -> None:
        variant = self.variant = function.variant
        self.how = how
        self.sizes = tuple(sizes.values())
        self.workspace = variant.workspace(sizes)
        slots = variant.arguments
        self._addresses = [i for i, (code, _) in enumerate(slots) if code == "Q"]
        pairs = zip(variant.plans, function.handles, strict=True)
        self._steps = [_Step(plan, handles, sizes, function.multiprocessors, slots) for plan, handles in pairs]
        self._driver, self._function, self._retire = load_driver(), function, retire
        self._launch, self._index = self._driver.cuLaunchKernelEx, function.index

    def __call__(self, *values: Any) -> bool:
        bits = 0
        for i in self._addresses:
            bits |= values[i]
        stream = current_stream(self._index)
        for step in self._steps:
            handle, frames = step.unaligned if bits & step.misaligned else step.aligned
            try:
                frame = frames.pop()
            except IndexError:
                frame = step.frame(frames)
            frame.pack(*values)
            frame.config.stream = stream
            error = _NO_CONTEXT
            if _current_device() == self._index:
                error = self._launch(frame.address, handle, frame.arguments, None)
            if error == _NO_CONTEXT:  # another GPU is the current one, or this thread has not used CUDA yet
                with suppress(Unavailable), _context(self._function.context):
                    error = self._launch(frame.address, handle, frame.arguments, None)
            frames.append(frame)
            if error:
                if error not in _CAPTURE_ERRORS:
                    self._retire(self.variant.index, self._index, f"a launch failed: {error_text(self._driver, error)}")
                return False
        return True


class _Step:
    """One launch: for addresses that are `aligned` and that are not the function, and frames that no thread is using."""

    def __init__(
        self,
        plan: LaunchPlan,
        handles: tuple[int, int],
        sizes: Mapping[str, int],
        multiprocessors: int,
        slots: Sequence[Slot],
    ) -> None:
        """Raises Unavailable."""
        x, y, z = self._blocks = plan.grid(sizes, multiprocessors)
        if not launchable(self._blocks):
            raise Unavailable(f"it would need a grid of {x} x {y} x {z} blocks")
        self._plan, self._slots, self.misaligned = plan, slots, plan.alignment - 1
        frames: tuple[list[Frame], list[Frame]] = [], []  # list.append and list.pop are atomic
        self.aligned, self.unaligned = zip(map(ctypes.c_void_p, handles), frames, strict=True)

    def frame(self, frames: list[Frame]) -> Frame:
        """One more."""
        plan, aligned = self._plan, frames is self.aligned[1]
        how = (plan.smem_bytes, plan.cluster, plan.programmatic) if aligned else (0, 1, False)
        return Frame(self._blocks, plan.block, *how, self._slots)
