"""Is a drop-in replacement ever slower? Problems that nobody searched, drawn by seed, against PyTorch's function on a GPU.

    python benchmarks/unsearched.py --package kernels/attention [--package kernels/layernorm] [--problems 300] [--seed 0]
                                    [--cover TEXT]... [--as sm_89] [--neighbours] [--measure on|off] [--rounds 15]
                                    [--seconds S] [--json FILE]

Each problem is called once by every contender first (`first` is the wall time of ours, which may compile, and race).
Then contenders take turns, each with none of its data in the second-level cache; the GPU's own time counts, of the
median round, behind a wait that lets the CPU run ahead. Contenders: the package's function as a user has it,
PyTorch's own choice twice (how far its two times are apart is what the clock cannot tell) and, of attention, PyTorch
without cuDNN (FlashAttention-2 or the memory-efficient back end: what an Ada card has). A model has few widths:
those of norms and softmax are 24 that the seed draws. A quarter of attention's problems have a mask, boolean or additive.
--cover: these problems in place of drawn ones, written as for `evo search`. --as: variants for an older architecture through
their PTX, beside what PyTorch has there.
--neighbours: each problem is followed by one that its race has decided, too: other sizes of the same bucket, and queries,
keys and values in the memory order of projections.

Printed: geometric means of ours over theirs, how many problems are slower by more than 3%, the slowest of them with what
`explain` says, and by the way that problems took; the largest error of a first call over PyTorch's, by float64. --json:
every problem.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from exported import Package, add_packages, gpu_times, load_all, machine, pretend
from torch.nn.attention import SDPBackend, sdpa_kernel

from evo.export._package import workload_record
from evo.job.job import check_workloads
from evo.problem.loading import load_kernel
from evo.runtime.choice import bucket_of

SLOWER = 1.03
MOST_BYTES, MOST_FLOPS = 2 << 30, 2e12
ADA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_packages(parser)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cover", action="append", help="e.g. rows=64/4096,cols=1024,dtype=float16")
    parser.add_argument("--as", dest="arch", help="an older architecture, such as sm_89")
    parser.add_argument("--neighbours", action="store_true")
    parser.add_argument("--measure", choices=("on", "off"), default="on")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf, help="a package's problems end after so long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    place = torch.device("cuda", 0)
    if options.arch:
        pretend(options.arch)
    print(machine(place))
    for package in load_all(options.package):
        package.module.also_serve(measure=options.measure == "on")
        began = time.monotonic()
        records = []
        draw = random.Random(options.seed)
        drawn = DRAWS[package.function](random.Random(options.seed), options.problems)
        for sizes, dtype, axes in stated(package, options.cover) if options.cover else drawn:
            records.append(problem(package, sizes, dtype, axes, place, options.rounds))
            if options.neighbours:
                near = neighbour(sizes, draw)
                records.append(problem(package, near, dtype, axes, place, options.rounds, neighbour=True))
            if time.monotonic() - began > options.seconds:
                break
        tell(package, records, time.monotonic() - began)
        found += records
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def stated(package: Package, covers: list[str]) -> Iterator[tuple[dict[str, int], torch.dtype, str]]:
    kernel = load_kernel(package.manifest["kernel"]["name"])
    for w in check_workloads(kernel, "cuda", [], covers):
        sizes: dict[str, int] = workload_record(kernel, w)["dims"]
        yield sizes, getattr(torch, w.dtype), str(w.option("mask_axes")) if sizes.get("attn_mask") else ""


def lengths(draw: random.Random, low: int, high: int) -> int:
    """Evenly by doublings; half of them are multiples of 8, as models have them."""
    n = round(2 ** draw.uniform(math.log2(low), math.log2(high)))
    return max(8, n // 8 * 8) if draw.random() < 0.5 and high >= 8 else n


def attention_problems(draw: random.Random, number: int) -> Iterator[tuple[dict[str, int], torch.dtype, str]]:
    """Problems of attention: sizes, dtype, and the axes of the mask, of b, h, q and k; "" for no mask."""
    masks = random.Random(str(draw.getstate()))  # all else of a seed's problems does not depend on their masks
    while number:
        group, kv_heads = draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 2, 4, 8, 16))
        q_len = lengths(draw, 1, 8192)
        causal = draw.random() < 0.4
        kv_len = q_len if causal or draw.random() < 0.5 else lengths(draw, 1, 8192)
        sizes = {
            "batch": lengths(draw, 1, 32), "heads": group * kv_heads, "kv_heads": kv_heads, "q_len": q_len,
            "kv_len": kv_len, "head_dim": draw.choice((32, 64, 64, 96, 128, 128, 256)), "causal": int(causal), "lse": 0,
            "attn_mask": 0, "additive": 0,
        }  # fmt: skip
        dtype = draw.choice((torch.float16, torch.bfloat16))
        axes = masks.choice(("qk", "qk", "bk", "bk", "bqk", "bqk", "hqk", "bhqk")) if masks.random() < 0.25 else ""
        if axes:
            sizes |= {"causal": 0, "attn_mask": 1, "additive": masks.randrange(2)}
        read = sizes["batch"] * sizes["head_dim"] * 2 * (2 * sizes["heads"] * q_len + 2 * kv_heads * kv_len)
        read += 2 * math.prod(shape_of_mask(sizes, axes)) if axes else 0
        if read <= MOST_BYTES and 4 * sizes["batch"] * sizes["heads"] * q_len * kv_len * sizes["head_dim"] <= MOST_FLOPS:
            number -= 1
            yield sizes, dtype, axes


def shape_of_mask(sizes: dict[str, int], axes: str) -> list[int]:
    whole = {"b": sizes["batch"], "h": sizes["heads"], "q": sizes["q_len"], "k": sizes["kv_len"]}
    return [size if axis in axes else 1 for axis, size in whole.items()]


def mask_of(sizes: dict[str, int], axes: str, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """A mask as models have it: with the axis q, a query sees no later key; with b, nobody sees the padding behind half of
    the keys or more."""
    shape, generator = shape_of_mask(sizes, axes), torch.Generator(place).manual_seed(1)
    batch, _, q_len, kv_len = shape
    seen = torch.ones(shape, dtype=torch.bool, device=place)
    if "q" in axes:
        seen.logical_and_(torch.ones(q_len, kv_len, dtype=torch.bool, device=place).tril_(kv_len - q_len))
    if "b" in axes:
        ends = torch.randint((kv_len + 1) // 2, kv_len + 1, (batch, 1, 1, 1), generator=generator, device=place)
        seen.logical_and_(torch.arange(kv_len, device=place) < ends)
    if not sizes["additive"]:
        return seen
    return torch.randn(shape, generator=generator, device=place, dtype=dtype).masked_fill_(~seen, -torch.inf)


def rows_problems(draw: random.Random, number: int) -> Iterator[tuple[dict[str, int], torch.dtype, str]]:
    widths = [lengths(draw, 64, 16384) for _ in range(24)]
    while number:
        sizes = {"rows": lengths(draw, 1, 65536), "cols": draw.choice(widths)}
        dtype = draw.choice((torch.float16, torch.bfloat16, torch.float32))
        if 4 * sizes["rows"] * sizes["cols"] * dtype.itemsize <= MOST_BYTES:
            number -= 1
            yield sizes, dtype, ""


def neighbour(sizes: dict[str, int], draw: random.Random) -> dict[str, int]:
    """Other sizes of the same bucket."""
    near = dict(sizes)
    for name in (n for n in sizes if n in ("rows", "batch", "q_len", "kv_len")):
        others = (round(sizes[name] * draw.uniform(0.85, 1.18)) for _ in range(9))
        near[name] = next((n for n in others if n and bucket_of({name: n}) == bucket_of({name: sizes[name]})), sizes[name])
    return near | {"q_len": near["kv_len"]} if sizes.get("causal") else near


DRAWS = {
    "scaled_dot_product_attention": attention_problems,
    **dict.fromkeys(("layer_norm", "rms_norm", "softmax"), rows_problems),
}


def problem(
    package: Package, sizes: dict[str, int], dtype: torch.dtype, axes: str, place: torch.device, rounds: int, *,
    neighbour: bool = False,
) -> dict[str, Any]:
    frontend = package.frontend
    args = frontend.timed({**sizes, "attn_mask": 0, "additive": 0}, dtype, place, 1)
    if neighbour and package.function == "scaled_dot_product_attention":
        args = (*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in args[:3]), *args[3:])
    if axes:
        args = (*args[:3], mask_of(sizes, axes, dtype, place), *args[4:])
    with torch.inference_mode():
        torch.cuda.synchronize()
        began = time.perf_counter()
        own = frontend.SUBJECT(*args)
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        errors = errors_of(args, own, frontend.ORIGINAL(*args), frontend.exact)
        way = frontend.explain(*args)
        original = partial(frontend.ORIGINAL, *args)
        us = gpu_times({"own": partial(frontend.SUBJECT, *args), "PyTorch": original, "PyTorch again": original}, rounds)
        if package.function == "scaled_dot_product_attention":
            with sdpa_kernel(ADA), suppress(torch.OutOfMemoryError):  # PyTorch may have to hold all scores
                us |= gpu_times({"without cuDNN": original}, rounds)
    shown = "x".join(map(str, sizes.values())) + f" {axes}".rstrip()
    return {
        "function": package.function, "sizes": shown, "dtype": str(dtype)[6:], "way": way, "neighbour": neighbour,
        "first_us": 1e6 * first, **errors, **us,
    }  # fmt: skip


def errors_of(args: tuple[Any, ...], own: torch.Tensor, torchs: torch.Tensor, exact: Any) -> dict[str, float]:
    """Errors against float64: for attention, of the heads that share the first keys; for others, of the first rows. NaN
    counts as Inf."""
    if own.dim() == 4:
        group = args[0].shape[1] // args[1].shape[1]
        mask = args[3][:1, :group] if args[3] is not None else None
        few = [t[:1, :group] for t in (own, torchs)]
        args = (args[0][:1, :group], args[1][:1, :1], args[2][:1, :1], mask, *args[4:])
    else:
        few, args = [own[:64], torchs[:64]], (args[0][:64], *args[1:])
    truth = exact(*args)
    own_error, torchs_error = ((t.double() - truth).abs().nan_to_num_(math.inf).max().item() for t in few)
    return {"error": own_error, "torchs_error": torchs_error}


def tell(package: Package, records: list[dict[str, Any]], seconds: float) -> None:
    print(f"\n{package.function}: {len(records)} problems in {seconds:.0f} s, {package.launcher} launcher")
    for other in ("PyTorch", "without cuDNN"):
        ratios = sorted(((r["own"] / r[other], r) for r in records if other in r), key=lambda pair: pair[0])
        tell_ratios(other, ratios)
    again = sorted(r["PyTorch again"] / r["PyTorch"] for r in records)
    print(f"  PyTorch over itself: {geometric_mean(again):.3f}, {again[0]:.3f} to {again[-1]:.3f}")
    worst = max(records, key=lambda r: r["error"] / (r["torchs_error"] + 1e-6))
    found, torchs = worst["error"], worst["torchs_error"]
    print(f"  largest error over PyTorch's: {found:.1e} over {torchs:.1e}, {worst['sizes']} {worst['dtype']}")
    firsts = sorted(r["first_us"] for r in records)
    print(f"  first calls: median {median(firsts):,.0f} us, slowest {firsts[-1]:,.0f} us")


def kind(way: str) -> str:
    if way.startswith("PyTorch"):
        return "left to PyTorch after a race" if "on this machine, where" in way else "left to PyTorch"
    kinds = ("raced here", "measured at these", "nearest that was measured", "unmeasured", "variant")
    return next(k for k in kinds if k in way)


def tell_ratios(other: str, ratios: list[tuple[float, dict[str, Any]]]) -> None:
    if not ratios:
        return
    slow = [(ratio, r) for ratio, r in ratios if ratio > SLOWER]
    mean = geometric_mean(ratio for ratio, _ in ratios)
    print(f"  over {other}: geometric mean {mean:.3f}, {len(slow)} of {len(ratios)} slower by more than 3%")
    ways = defaultdict(list)
    for ratio, r in ratios:
        ways[kind(r["way"]) + (", neighbours" if r["neighbour"] else "")].append(ratio)
    for name, found in sorted(ways.items()):
        print(f"    {len(found):4} {name}: {geometric_mean(found):.3f}, at most {max(found):.3f}")
    for ratio, r in slow[:-9:-1]:
        print(f"    {ratio:.2f}  {r['sizes']} {r['dtype']}: {r['own']:.1f} us, {other} {r[other]:.1f}; {r['way']}")


if __name__ == "__main__":
    raise SystemExit(main())
