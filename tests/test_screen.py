"""What a running search shows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from evo.budget import Budget
from evo.cli.screen import LiveScreen, PlainLines
from evo.evaluation import Timing
from evo.kernel import Workload
from evo.progress import Improvement, Progress

WORKLOADS = (Workload.of({"n": 4096}, "float32"),)


def progress(clocks: dict[str, float]) -> Progress:
    timing = Timing(
        workload=WORKLOADS[0].key,
        contender="candidate",
        protocol="cold",
        median_us=18.77,
        low_us=18.7,
        high_us=18.9,
        samples_us=(18.77,),
        ratio=0.5,
        ratio_low=0.4,
        ratio_high=0.625,
        clocks=clocks,
    )
    found = Improvement(elapsed_s=3.0, island=0, order=12, ratio=0.5, timing=timing)
    return Progress(finished=20, elapsed_s=3.0, best={0: found}, improvements=[found])


@pytest.mark.parametrize(("clocks", "interval"), [({}, "1.600 to 2.500"), ({"disturbed": 2.0}, "2.500, disturbed")])
@pytest.mark.parametrize("live", [False, True])
def test_a_better_candidate_is_shown_with_its_interval(live: bool, clocks: dict[str, float], interval: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=150, force_terminal=live, color_system=None)
    screen = LiveScreen(console, "evo search", WORKLOADS, Budget(seconds=9)) if live else PlainLines(console, WORKLOADS)
    with screen:
        screen.update(progress(clocks))
    assert interval in out.getvalue()
