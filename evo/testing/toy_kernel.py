"""A small kernel, written to a folder by tests that need candidates of every temper: y = 2 x."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evo.evaluation import Build
from evo.measure import Request
from evo.problem.genome import Genome
from evo.problem.kernel import Workload

__all__ = ["TEMPLATE", "WORKLOAD", "build_request", "measure_request", "write_kernel"]

WORKLOAD = Workload.of({"n": 4096}, "float32")

_KERNEL = '''
import time
from pathlib import Path

from evo.problem.kernel import Argument, Case, Dimension, Kernel, LaunchPlan, Tolerance, Workload
from evo.problem.space import Categorical, Constraint, Ordinal, Space

MODES = {modes!r}
LOG = Path({log!r})


COMPILING = []


def note(event):
    with LOG.open("a") as file:
        file.write(f"{{event}} {{time.monotonic():.6f}}\\n")


def case(n):
    return Case(f"normal {{n}}", Workload.of({{"n": n}}, "float32"), "normal")


def compile_flags(target, point):
    """Asked for at the beginning of a build."""
    COMPILING.append(True)
    note("begin")
    return ()


def plan(target, point, workload):
    """Asked for at the end of a build; and by the device process, where no build has begun."""
    if COMPILING:
        COMPILING.clear()
        note("end")
    return LaunchPlan({plan})


KERNEL = Kernel(
    name="toy",
    title="Twice",
    entry="twice",
    dimensions=(Dimension(name="n", low=0, high=1 << 20),),
    dtypes={{{target!r}: ("float32",)}},
    arguments=(Argument(name="x", kind="input", shape=("n",)), Argument(name="y", kind="output", shape=("n",))),
    tolerance={{"float32": Tolerance(atol=1e-6, rtol=1e-6)}},
    reference=lambda inputs, workload: {{"y": 2 * inputs["x"]}},
    cases=lambda target, workload: [case(5), case(64), case(1001)],
    workloads={{{target!r}: ("n=4096,dtype=float32",)}},
    space=lambda target, workload, limits: Space(
        parameters=(
            Categorical(name="mode", values=MODES, why="temper", structural=True),
            Ordinal(name="unroll", values=(1, 2, 4, 8), why="fewer branches"),
        ),
        constraints=({constraints}),
        default={{"mode": MODES[0], "unroll": 1}},
    ),
    plan=plan,
    compile_flags=compile_flags,
)
'''

TEMPLATE = r"""
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <unistd.h>

{% if p.mode == "compile_error" %}
#error this candidate does not compile
{% elif p.mode == "compile_bomb" %}
// 2^40 classes, derived from one another: the compiler is never done.
template <int DEPTH, long PATH> struct Bomb : Bomb<DEPTH - 1, 2 * PATH>, Bomb<DEPTH - 1, 2 * PATH + 1> {};
template <long PATH> struct Bomb<0, PATH> {};
static Bomb<40, 1> bomb;
{% endif %}

extern "C" void {{ "thrice" if p.mode == "no_entry" else "twice" }}(const float* x, float* y, long long n) {
{% if p.mode == "abort" %}
    std::abort();
{% elif p.mode == "hang" %}
    pause();
{% elif p.mode == "spin" %}
    for (volatile int on = 1; on;) {}
{% elif p.mode == "tell_time" %}
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (std::FILE* file = std::fopen("@LOG@", "a")) {
        std::fprintf(file, "call %ld.%06ld\n", (long)now.tv_sec, now.tv_nsec / 1000);
        std::fclose(file);
    }
{% endif %}
    const float factor = {{ 3 if p.mode == "wrong" else 2 }};
#pragma GCC unroll {{ p.unroll }}
    for (long long i = 0; i < n; ++i) y[i] = factor * x[i];
}
"""


def write_kernel(
    folder: Path,
    modes: tuple[str, ...] = ("honest",),
    *,
    template: str = TEMPLATE,
    constraints: str = "",
    target: str = "cpu",
) -> Path:
    """Writes kernel.py and the target's template to `folder`; the first of `modes` is the default.

    Builders and calls of mode tell_time note the time, in seconds of the monotonic clock, in `folder`/log.txt.
    """
    folder.mkdir(parents=True)
    log = str(folder / "log.txt")
    plan = "threads=1" if target == "cpu" else 'threads=256, tiles=(("n", 256),)'
    text = _KERNEL.format(modes=modes, log=log, constraints=constraints, target=target, plan=plan)
    (folder / "kernel.py").write_text(text)
    (folder / ("cpu.cpp.j2" if target == "cpu" else "cuda.cu.j2")).write_text(template.replace("@LOG@", log))
    return folder


def build_request(kernel: Path, mode: str = "honest", unroll: int = 1) -> Request:
    genome = Genome.of({"mode": mode, "unroll": unroll})
    return Request(kernel=str(kernel), target="cpu", arch="native", genome=genome, workload=WORKLOAD, seed=1)


def measure_request(kernel: Path, build: Build, mode: str = "honest", *, timed: bool = True) -> Request:
    return replace(build_request(kernel, mode), build=build, time=timed)
