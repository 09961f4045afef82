"""A winner for other architectures than the one it was measured on: itself where it is legal there and compiles, else the
best candidate for its workload that does."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from evo.errors import CompileError
from evo.evaluation import Binary
from evo.export import ExportItem
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.render import Source, render
from evo.problem.space import Point, Space, Value
from evo.targets import Target

__all__ = ["Compiled", "asked_of", "compile_elsewhere", "compile_source", "with_ptx"]

_MOST_COMPILATIONS = 20
"""Of candidates that are legal and do not compile: what is wrong is then not the candidate."""
_GPU = re.compile(r"(sm|compute)_(\d+)([af]?)")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A candidate built for an architecture. `item`: whose genome it is; `genome`: as that architecture spells it."""

    item: ExportItem
    genome: Genome
    source: Source
    binary: Binary


def asked_of(target: str, archs: Sequence[str]) -> tuple[str, ...]:
    """Those of the architectures that are a target's: GPUs are called sm_XX or compute_XX, CPUs are not. Each once."""
    return tuple(dict.fromkeys(a for a in archs if bool(_GPU.fullmatch(a)) == (target == "cuda")))


def with_ptx(archs: Sequence[str]) -> tuple[str, ...]:
    """Also PTX, for GPUs newer than these: of the lowest, so that whatever is at least as new as that runs something. Code
    that uses a GPU's own instructions (sm_90a) has none that is newer."""
    found = [_GPU.fullmatch(arch) for arch in archs]
    plain = [int(m[2]) for m in found if m and m[1] == "sm" and not m[3]]
    if not plain or any(m and m[1] == "compute" for m in found):
        return tuple(archs)
    return (*archs, f"compute_{min(plain)}")


def compile_source(target: Target, source: Source, arch: str) -> Binary:
    """Raises CompileError."""
    with tempfile.TemporaryDirectory(prefix="evo-export-") as workdir:
        return target.compile(source, arch, Path(workdir))


def compile_elsewhere(kernel: Kernel, target: Target, item: ExportItem, arch: str) -> tuple[Compiled | None, str]:
    """The item, or else the best of its alternatives, for an architecture it was not measured on; None if there is none.
    And why it is not the item; empty if it is.

    PTX is compiled from the text that machine code of that architecture is. Raises DeviceError for an unknown
    architecture; TemplateError.
    """
    machine_code = arch.replace("compute_", "sm_")
    limits = target.limits(machine_code)  # of PTX: what every GPU has that may compile it
    space = kernel.space(target.name, item.workload, limits)
    why, compilations = "", 0
    for candidate in chain([item], item.alternatives):
        point, unsaid = _as_spelt_there(space, candidate.genome, kernel.inactive.get(target.name, {}))
        if broken := [f"there is no {n}={v}" for n, v in unsaid.items()] or space.violations(point):
            why = why or "; ".join(broken)
            continue
        genome = Genome.of(point)
        source = render(kernel, target.name, genome, kernel.binding(target.name, item.workload), machine_code)
        try:
            binary = compile_source(target, source, arch)
        except CompileError as error:
            why, compilations = why or f"it does not compile ({_first_line(error)})", compilations + 1
            if compilations == _MOST_COMPILATIONS:
                break
            continue
        launch = kernel.launch(target.name, point, item.workload, limits)
        if target.occupancy(binary, launch, limits) == 0:
            why = why or f"a block of {launch.block[0]} threads with {binary.registers} registers each does not fit"
            continue
        return Compiled(item=candidate, genome=genome, source=source, binary=binary), why
    return None, why


def _as_spelt_there(space: Space, genome: Genome, stand_ins: Mapping[str, Value]) -> tuple[Point, Point]:
    """The same kernel as a point of another architecture's space, and what of it cannot be said there: a parameter that one
    of the two spaces has not is the value that templates read in its place."""
    given = genome.parameters
    point: Point = {}
    for parameter in space.parameters:
        name = parameter.name
        if space.is_active(parameter, point):
            if name in given:
                point[name] = given[name]
            elif name in stand_ins:
                point[name] = stand_ins[name]
    return point, {n: v for n, v in given.items() if n not in point and stand_ins.get(n) != v}


def _first_line(error: CompileError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
