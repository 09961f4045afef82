"""For benchmarks of exported packages: loading them, and racing calls against each other in one process."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch

Sample = Callable[[int], tuple[float, ...]]
"""So many calls, one after another: seconds by each of the clocks that are read."""


@dataclass(frozen=True)
class Package:
    """What `evo export --format module` wrote. `function`: the name that it has here and in torch.nn.functional."""

    folder: Path
    module: ModuleType
    frontend: Any
    manifest: Mapping[str, Any]
    function: str

    def serve_all(self) -> None:
        """Variants serve what they can, whether or not PyTorch was measured to be faster."""
        self.frontend.DISPATCH.serve_slower(True)

    def explain(self, *args: Any, **options: Any) -> str:
        said: str = self.module.explain(*args, **options)
        return said

    @property
    def launcher(self) -> str:
        return "native" if self.frontend._call is not None else f"Python ({self.frontend.NATIVE.reason})"

    @contextmanager
    def launched_from_python(self) -> Iterator[None]:
        """As if there were no native launcher."""
        before = self.frontend._call, self.frontend.NATIVE.explain
        self.frontend._call = self.frontend.NATIVE.explain = None
        try:
            yield
        finally:
            self.frontend._call, self.frontend.NATIVE.explain = before


def add_packages(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--package", action="append", type=Path, required=True, help="a folder that `evo export --format module` wrote"
    )


def load(folder: Path) -> Package:
    """Ends the program, with the reason, if it is no such folder."""
    folder = folder.resolve()
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        replaced = manifest["kernel"]["replaces"]
        if manifest["format"] != "module" or not (replaced or "").startswith("torch.nn.functional."):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise SystemExit(f"{folder} is no package that `evo export --format module` wrote") from None
    there = sys.modules.get(folder.name)
    if there is not None and Path(there.__file__ or "").parent != folder:
        raise SystemExit(f"{folder} cannot be imported beside another {folder.name}: export it under another name")
    sys.path.insert(0, str(folder.parent))
    module = importlib.import_module(folder.name)
    frontend = importlib.import_module(f"{folder.name}.frontend")
    return Package(folder, module, frontend, manifest, replaced.rsplit(".", 1)[1])


def load_all(folders: Sequence[Path]) -> list[Package]:
    """Each once."""
    return [load(folder) for folder in dict.fromkeys(folder.resolve() for folder in folders)]


@dataclass(frozen=True)
class Timing:
    """Median microseconds a call. `ratio`: over the reference's time in the same round, median, and the ranks that enclose
    it with 95% confidence. `disturbed`: other programs or throttled clocks slowed down more than half of the rounds."""

    us: float
    ratio: float
    low: float
    high: float
    disturbed: bool

    def __str__(self) -> str:
        return f"{self.us:10.2f} us  {self.gain}"

    @property
    def gain(self) -> str:
        mark = " !" if self.disturbed else ""
        return f"{1 / self.ratio:.3f}x ({1 / self.high:.3f} to {1 / self.low:.3f}){mark}"


@dataclass(frozen=True)
class Race:
    """Seconds a call of each contender in each round, by each clock."""

    rounds: list[dict[str, tuple[float, ...]]]
    disturbed: bool

    def timing(self, name: str, reference: str, clock: int = 0) -> Timing:
        ratios = sorted(r[name][clock] / r[reference][clock] for r in self.rounds)
        reach = 0.98 * len(ratios) ** 0.5  # of the ranks around the middle that enclose a median with 95% confidence
        low, high = max(0, int(len(ratios) / 2 - reach)), min(len(ratios) - 1, int(len(ratios) / 2 + reach))
        return Timing(
            us=1e6 * median(r[name][clock] for r in self.rounds),
            ratio=median(ratios),
            low=ratios[low],
            high=ratios[high],
            disturbed=self.disturbed,
        )


def race(
    contenders: Mapping[str, Sample], rounds: int, sample_s: float, watch: Callable[[], bool], most: int = 1 << 20
) -> Race:
    """Rounds of one sample each, forth and back in turns; the first pair warms up, disturbed ones are taken again where
    half of them are not. A sample is of at least `sample_s`, but of at most `most` calls."""
    repeats = {}
    for name, sample in contenders.items():
        sample(1)
        repeats[name] = max(1, min(most, round(sample_s / max(sample(1)[-1], 1e-7))))

    def once(names: Sequence[str]) -> dict[str, tuple[float, ...]]:
        return {name: tuple(s / repeats[name] for s in contenders[name](repeats[name])) for name in names}

    order = list(contenders)
    for names in (order, order[::-1]):
        once(names)
    kept: list[dict[str, tuple[float, ...]]] = []
    spoilt: list[dict[str, tuple[float, ...]]] = []
    while len(kept) < rounds and len(spoilt) < rounds:
        watch()  # whatever it was, it was before
        pair = [once(order), once(order[::-1])]
        (spoilt if watch() else kept).extend(pair)
    enough = bool(kept) and 2 * len(kept) >= rounds
    return Race(kept if enough else kept + spoilt, not enough)


def watch(package: Package, place: torch.device) -> Callable[[], bool]:
    """Whether other programs, or clocks held down, disturbed the timing since it was last asked: as `bench` of a package."""
    bench = importlib.import_module(f"{package.folder.name}._bench")
    taken = bench._cores_taken()
    if place.type != "cuda":
        return taken  # type: ignore[no-any-return]
    throttled = bench._throttled(place.index or 0)
    return lambda: bool(throttled() | taken())


def machine(place: torch.device) -> str:
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, PyTorch {torch.__version__}"
