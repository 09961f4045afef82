"""Rows have the same bits in any batch, under also_serve(batch_invariant=True)? And what does that cost?

    python benchmarks/batch_invariance.py [--batches 200] [--device cpu|cuda] [--package exported/layernorm]...
                                          [--kernel NAME]... [--rounds 30] [--seed N] [--json]

Families are packages: those named, else of each kernel (--kernel: of these) on a GPU the shipped one, and on a CPU an export
of its space's default points for the sizes below. Each of the batches is of a variant's own sizes, drawn at random with it:
some rows of a large batch (of attention: elements of the batch) in any order, also several times, as a copy, or a part of
it where it lies. Their results are compared with those of the large batch, bit for bit.

Cost: at each variant's own sizes the time of what serves them with batch_invariant over the time of what serves them
without, which may be PyTorch. Interleaved, with data that no cache holds: on a GPU of the kernels alone, as CUDA graphs, on
a CPU of calls that are launched from Python. `geometric mean` and `most` over the sizes.

Exit code: 0 all bits are the same; 1 some differ, or no variant served a family's batches.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from exported import Package, Sample, load, machine, race, watch
from torch import Tensor

from evo.export import ExportItem, ExportRequest, find_exporter
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.ready import packages
from evo.runtime.judged import bits_of
from evo.runtime.manifest import MANIFEST, read_manifest
from evo.runtime.package import Busy, Unavailable
from evo.runtime.timing import by_wall_clock, on_gpu, sets_for, walk
from evo.targets import find_target

ROWS = tuple(f"rows={rows},cols={cols},dtype=float32" for rows in (4, 4096) for cols in (96, 1000))
HEADS = "kv_heads=4,q_len={0},kv_len=128,head_dim=64,dtype=float32"
ON_CPU = {
    "layernorm": ROWS, "rmsnorm": ROWS, "add_layernorm": ROWS, "add_rmsnorm": ROWS, "softmax": ROWS,
    "attention": tuple(f"batch={batch},heads=4,{HEADS.format(q)}" for batch, q in ((1, 1), (8, 1), (1, 128), (8, 128))),
}  # fmt: skip
"""The kernels, and the sizes that are exported for a CPU."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--package", type=Path, action="append", default=[])
    parser.add_argument("--kernel", choices=[*ON_CPU], action="append", default=[])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU answers to PyTorch")
    place, records = torch.device(options.device, 0), []
    with tempfile.TemporaryDirectory(prefix="evo-batches-") as made, torch.inference_mode():
        folders = options.package or families(options.kernel or [*ON_CPU], place, Path(made))
        for package in (load(folder, stand_in=False) for folder in folders):
            record = {"family": package.folder.name, "machine": machine(place), "seed": options.seed}
            record |= compared(package, place, options.batches, random.Random(options.seed))
            record["cost"] = costs(package, place, options.rounds) if options.rounds else []
            records.append(record)
            if not options.json:
                tell(record)
    if options.json:
        print(json.dumps(records, indent=1))
    return 0 if all(r["batches"] and not r["bits_differing"] for r in records) else 1


def families(kernels: Sequence[str], place: torch.device, made: Path) -> list[Path]:
    """Folders of the packages of these kernels for a device."""
    if place.type == "cuda":
        shipped = {read_manifest(folder / MANIFEST)["kernel"]["name"]: folder for folder in packages().values()}
        return [shipped[name] for name in kernels]
    return [export(name, made / f"batches_of_{name}") for name in kernels]


def export(name: str, out: Path) -> Path:
    """The default points of a kernel's space for a CPU."""
    kernel, limits, items = load_kernel(name), find_target("cpu").limits("native"), list[ExportItem]()
    for number, text in enumerate(ON_CPU[name]):
        workload = kernel.workload("cpu", text)
        space = kernel.space("cpu", workload, limits)
        genome = Genome.of(space.complete(space.default))
        items.append(ExportItem(workload=workload, genome=genome, candidate=f"default/{number}"))
    request = ExportRequest(kernel=name, target="cpu", arch="native", items=tuple(items), out=out)
    find_exporter("module").export(request)
    return out


def variants_on(package: Package, place: torch.device) -> list[Any]:
    """The variants that this device takes for their own sizes."""
    dispatch = package.frontend.DISPATCH
    own = [v for v in dispatch.package.variants if v.target == place.type]
    return [v for v in own if dispatch.taken(v.index) == v.index and not dispatch.unavailable(v.index)]


def compared(package: Package, place: torch.device, batches: int, draw: random.Random) -> dict[str, Any]:
    """How many batches variants served and rows were compared, and how many bits of how many batches differ."""
    frontend, variants = package.frontend, variants_on(package, place)
    dispatch = frontend.DISPATCH
    found = {"variants": len(variants), "batches": 0, "left_to_pytorch": 0, "rows": 0, "bits_differing": 0}
    large: dict[int, tuple[tuple[Any, ...], list[Tensor]]] = {}
    package.module.also_serve(batch_invariant=True)
    try:
        for _ in range(batches if variants else 0):
            v = draw.choice(variants)
            if v.index not in large:
                dtype, seed = getattr(torch, v.dtype), draw.randrange(1 << 31)
                _, args = frontend.large_batch(dispatch.batch, v.sizes, dtype, place, seed)
                large[v.index] = args, bits_of(frontend.SUBJECT(*args))
            args, whole = large[v.index]
            rows, part = drawn(args, draw)
            if not str(package.explain(*part)).startswith("variant"):
                found["left_to_pytorch"] += 1
                continue
            own = bits_of(frontend.SUBJECT(*part))
            found["batches"] += 1
            found["rows"] += len(rows)
            found["bits_differing"] += sum(map(differing, [t[rows] for t in whole], own))
    finally:
        package.module.also_serve(batch_invariant=False)
    return found


def drawn(args: tuple[Any, ...], draw: random.Random) -> tuple[list[int], tuple[Any, ...]]:
    """Rows of a large batch, and the call of them."""
    number = len(args[0])
    many = draw.choice([1, 1, 2, 3, 8, draw.randrange(1, number + 1), number])
    if draw.random() < 0.5:  # as it lies
        first = draw.randrange(number - min(many, number) + 1)
        rows = list(range(first, first + min(many, number)))
        take: Callable[[Tensor], Tensor] = lambda t: t[rows[0] : rows[-1] + 1]  # noqa: E731
    else:
        rows = [draw.randrange(number) for _ in range(many)]
        take = lambda t: t[rows]  # noqa: E731
    of_batch = [isinstance(t, Tensor) and t.ndim > 0 and len(t) == number for t in args]
    return rows, tuple(take(t) if there else t for t, there in zip(args, of_batch, strict=True))


def differing(one: Tensor, other: Tensor) -> int:
    """Bits that are not the same."""
    different = one ^ other
    if not different.any():
        return 0
    return sum(int((different >> bit & 1).sum()) for bit in range(8 * different.element_size()))


def costs(package: Package, place: torch.device, rounds: int) -> list[dict[str, Any]]:
    """At each variant's own sizes the times of what serves them with batch_invariant and without."""
    return [found for v in variants_on(package, place) for found in cost(package, v, place, rounds)]


def cost(package: Package, variant: Any, place: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    frontend, serve, on_gpu_too = package.frontend, package.module.also_serve, place.type == "cuda"
    timed = partial(frontend.timed, dict(variant.sizes), getattr(torch, variant.dtype), place)
    args = [timed(0)]
    args += [timed(seed) for seed in range(1, sets_for(args[0]))]
    samples, ways = dict[str, Sample](), dict[str, str]()
    try:
        for name, asked in (("with", True), ("without", False)):
            serve(batch_invariant=asked, wait=True)
            answers = Answers(frontend.DISPATCH)
            ours = frontend.served(answers, *args[0]) is not None
            ways[name] = "variant" if ours else "PyTorch"
            run = walk([partial(frontend.served, answers, *a) if ours else partial(frontend.ORIGINAL, *a) for a in args])
            samples[name] = on_gpu(run) if on_gpu_too else by_wall_clock(run)
        raced = race(samples, rounds, (lambda: False) if on_gpu_too else watch())
    except (Unavailable, Busy) as reason:
        print(f"  not timed: {variant}: {reason}")
        return
    finally:
        serve(batch_invariant=False, wait=None)
    timing = raced.timing("with", "without")
    yield {
        "workload": variant.record["workload"]["key"], "ways": ways, "with_us": timing.us / len(args),
        "ratio": timing.ratio, "ratio_low": timing.low, "ratio_high": timing.high, "disturbed": timing.disturbed,
    }  # fmt: skip


class Answers(dict[Any, Any]):
    """What a package has answered for each problem, kept whatever it is told to serve later."""

    def __init__(self, dispatch: Any) -> None:
        super().__init__()
        self._dispatch = dispatch

    def __missing__(self, key: Any) -> Any:
        return self.setdefault(key, self._dispatch[key])


def tell(record: Mapping[str, Any]) -> None:
    print(f"{record['family']}  ({record['machine']}, seed {record['seed']}, {record['variants']} variants)")
    print(
        f"  {record['batches']} batches, {record['rows']:,} rows compared, {record['bits_differing']:,} bits differing;"
        f" {record['left_to_pytorch']} left to PyTorch"
    )
    for found in record["cost"]:
        busy = "  too busy to measure" if found["disturbed"] else ""
        interval = f"{found['ratio']:.3f} ({found['ratio_low']:.3f} to {found['ratio_high']:.3f})"
        ways = f"{found['ways']['with']} in place of {found['ways']['without']}"
        print(f"  {interval} of the time, {found['with_us']:.2f} us, {ways}  {found['workload']}{busy}")
    if ratios := [found["ratio"] for found in record["cost"] if not found["disturbed"]]:
        print(f"  cost: geometric mean {geometric_mean(ratios):.3f}, most {max(ratios):.3f}")


if __name__ == "__main__":
    raise SystemExit(main())
