"""Order on the device: does a candidate begin before it may, and is it right whichever of its blocks is the last?

Both depend on what else the device does. A candidate meets adverse neighbours (`evo.targets.Hazards`), where the device has
them: kernels before it that end late, and kernels beside it that leave room for few of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from evo.measure.buffers import HUGE, NAN, Memory, same
from evo.problem.kernel import Launch, Workload
from evo.targets import Session

if TYPE_CHECKING:
    from evo.measure.gate import Invocation

_FEW_BLOCKS = 128
"""Number of blocks that take a fraction of a millisecond one after another."""
_WIDEST_READ = 16
"""Alignment in bytes of the memory that `Hazards.end_late` is given."""


def begins_early(session: Session, memory: Memory, invocation: Invocation, workload: Workload) -> str:
    """Why a launch that may begin early is refused; empty if all launches wait, or if the device has no such hazard.

    The kernel before the launch is replaced by one that ends late. At its end it examines all memory, which the launch must
    not have written yet. Then it writes the data that the launch must not have read yet: before the first launch the inputs,
    and zeros in the outputs; before a later one the results of the launches before it. memory: holds the inputs, before and
    afterwards. Raises LaunchError.
    """
    early = [number for number, launch in enumerate(invocation.launches) if launch.programmatic]
    if not early or (hazards := session.hazards) is None:
        return ""
    values, scratch = invocation.values(workload, memory), invocation.workspace.bytes
    invocation(values)
    session.synchronize()
    right = {n: o.clone() for n, o in memory.outputs.items()}
    first_output = min(s.start for s in memory.layout.spans if s.is_output) // _WIDEST_READ * _WIDEST_READ
    for number in early:
        if number:
            invocation(values, 0, number)
            late = memory.bytes[first_output:]
        else:
            for output in memory.outputs.values():
                output.zero_()
            late = memory.bytes
        image, of_scratch = late.clone(), scratch.clone() if number else None
        late.fill_(HUGE)
        scratch.fill_(HUGE)
        with hazards.end_late(((late, image), (scratch, of_scratch)), HUGE) as written:
            invocation(values, number)
        session.synchronize()
        if written():
            return "wrote an output, workspace or an input before the kernel before it had ended, which may still read that"
        if not all(same(memory.outputs[n], o) for n, o in right.items()):
            what = f"read what launch {number} of a call writes" if number else "read an input or wrote an output"
            return f"{what} before the kernel before it had ended"
    invocation.workspace.fill(NAN)  # its guards too, which later calls are judged by
    return ""


def rooms(launches: Sequence[Launch], multiprocessors: int, *, all_of_them: bool) -> list[int]:
    """Numbers of blocks that shall have room at a time.

    With room for one, no block begins before the one before it has ended, so that a block that takes itself for the last too
    early misses the last one's results. Then so many that the last has its turn alone, and half of the blocks. Unless all
    numbers are asked for, only the first that takes little time. Empty where no launch has several blocks, where the device
    has one multiprocessor, or where blocks form clusters, which run together.
    """
    blocks = max(prod(launch.grid) for launch in launches)
    most = min(blocks, multiprocessors) - 1
    if most < 1 or any(launch.cluster > 1 for launch in launches):
        return []
    last_alone = next(room for room in range(most, 0, -1) if (blocks - 1) % room == 0)
    few = 1 if blocks <= _FEW_BLOCKS else last_alone
    return list(dict.fromkeys((few, last_alone, max(1, most // 2), 1) if all_of_them else (few,)))
