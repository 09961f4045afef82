"""Conditions that a candidate has to stand on a GPU: what `evo.targets.Hazards` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evo.problem.kernel import Launch
from evo.problem.render import Source
from evo.targets import Loaded, find_target

if TYPE_CHECKING:
    from evo.targets import Session

__all__ = ["SOURCE", "CudaHazards"]

_NAPS = 64
"""Of a microsecond or so, from the candidate's launch on: its blocks start, and read what they do not wait for."""

_MOST_NAPS = 1 << 24
"""A host that is stopped does not keep the GPU waiting for ever: half a minute. What it launches then goes unexamined."""

_THREADS = 256
"""Few, and without shared memory: blocks of the candidate must fit beside one of these on every multiprocessor."""

SOURCE = """
// Shared memory keeps what the block before left in it. A block of all the shared memory that a block can have, one on
// each multiprocessor, overwrites it.
extern "C" __global__ void __launch_bounds__(1024) scrub(long long word, long long count) {
    extern __shared__ volatile long long memory[];
    for (long long i = threadIdx.x; i < count; i += blockDim.x) memory[i] = word;
}

// Lets the next kernel start before this one has done anything, as far as that kernel asks for it.
// CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". The host says when that kernel is
// launched; from then on naps are counted, and not the time: where others share the GPU, that also passes while none of
// this context's kernels can start.
extern "C" __global__ void write_late(
    longlong2* to, const longlong2* from, long long count, const volatile int* launched, long long naps, long long most
) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if (threadIdx.x == 0) {
        for (long long i = 0; i < most && !*launched; ++i) __nanosleep(1000);
        for (long long i = 0; i < naps; ++i) __nanosleep(1000);
    }
    __syncthreads();
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        to[i] = from[i];
}
"""


class CudaHazards:
    """The methods are those of `evo.targets.Hazards`. Compiled for the GPU at hand when it is made, in a tenth of a
    second."""

    def __init__(self, session: Session) -> None:
        self._multiprocessors = session.limits.multiprocessors
        self._smem_bytes = session.limits.smem_bytes_per_block // 8 * 8
        self._scrub, self._write_late = (self._load(session, entry) for entry in ("scrub", "write_late"))
        self._launched = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._session = session

    @staticmethod
    def _load(session: Session, entry: str) -> Loaded:
        source = Source(text=SOURCE, target="cuda", entry=entry)
        return session.load(find_target("cuda").compile(source, session.info.arch, Path()), entry)

    def scrub(self, byte: int) -> None:
        word = int.from_bytes(bytes([byte]) * 8, "little", signed=True)
        grid = (self._multiprocessors, 1, 1)
        launch = Launch(grid=grid, block=(1024, 1, 1), smem_bytes=self._smem_bytes)
        self._scrub((word, self._smem_bytes // 8), launch)

    @contextmanager
    def write_late(self, to: torch.Tensor, source: torch.Tensor) -> Iterator[None]:
        count = to.nbytes // 16
        blocks = min(self._multiprocessors, -(-count // _THREADS))
        launch = Launch(grid=(blocks, 1, 1), block=(_THREADS, 1, 1))
        self._session.synchronize()  # the last one has seen its signal
        self._launched.zero_()
        self._write_late((to, source, count, self._launched.data_ptr(), _NAPS, _MOST_NAPS), launch)
        try:
            yield
        finally:
            self._launched.fill_(1)
