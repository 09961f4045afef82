"""Norms and softmax of exported packages beside PyTorch, torch.compile, and the kernels of Liger and QuACK, on a GPU.

    python benchmarks/peers.py --package exported/rmsnorm [--package exported/softmax] --shape 4096x1024 [--shape ...]
                               [--dtype bfloat16]... [--rounds 15] [--seconds S] [--json FILE]

For each package, shape (rows x columns) and dtype: `forward` without gradients; of norms also `backward`, the gradients of
all arguments from a result that was recorded, and `both`. Contenders take turns, each a graph of calls with so much data
that none is in the second-level cache when its turn comes; the GPU's own time counts, of the median round. `eager`: the
wall time of one of many calls of `both`, one after another, until the GPU has finished. Results are compared with float64: a
contender whose error is more than twice PyTorch's, in norm, is marked and does not count. One that cannot run is left out,
with the reason.
Liger and QuACK take part where they are installed.

Printed: microseconds, and ours over the best of the others; geometric means of that; how many are slower by more than 3%.
Exit code: 0 measured; 1 one of our results was wrong, or a call was not served by a variant.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from exported import Package, add_packages, load_all, machine
from torch import Tensor

from evo.runtime.timing import Sample, on_gpu, race, sets_for, walk

OURS, SLOWER = "ours", 1.03
Function = Callable[..., Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_packages(parser)
    parser.add_argument("--shape", action="append", required=True)
    parser.add_argument("--dtype", action="append", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new problem begins after so long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(machine(torch.device("cuda", 0)))
    began, found, sound = time.monotonic(), [], True
    for package in load_all(options.package):
        for shape in options.shape:
            for dtype in options.dtype or ("bfloat16",):
                if time.monotonic() - began < options.seconds:
                    with torch.cuda.stream(torch.cuda.Stream()):  # which a backward pass needs: it runs where all else did
                        records, well = problem(package, *map(int, shape.split("x")), dtype, options.rounds)
                    found, sound = found + records, sound and well
    tell_means(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if sound else 1


def functions(package: Package) -> Iterator[tuple[str, Callable[[], Function]]]:
    """Functions with the arguments of the package's function, by name; making one may raise ImportError and others."""
    name, original = package.function, package.frontend.ORIGINAL
    yield OURS, lambda: package.frontend.SUBJECT
    yield "PyTorch", lambda: original
    yield "torch.compile", partial(torch.compile, original, dynamic=False)
    yield "Liger", partial(liger, name)
    yield "QuACK", partial(quack, name)


def liger(name: str) -> Function:
    if name == "layer_norm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, shape, weight, bias, eps: LigerLayerNormFunction.apply(x, weight, bias, eps)
    if name == "rms_norm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        # in place it would write the gradient over that of the result
        return lambda x, shape, weight, eps: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return lambda x, *_: LigerSoftmaxFunction.apply(x)


def quack(name: str) -> Function:
    if name == "softmax":
        from quack.softmax import softmax

        return lambda x, *_: softmax(x)
    from quack.rmsnorm import rmsnorm

    if name == "rms_norm":
        return lambda x, shape, weight, eps: rmsnorm(x, weight, eps=eps)
    return lambda x, shape, weight, bias, eps: _QuackLayerNorm.apply(x, weight, bias, eps)


class _QuackLayerNorm(torch.autograd.Function):
    """Its two kernels, which come without a function of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        from quack.rmsnorm import _rmsnorm_fwd

        y, (mean, rstd) = torch.empty_like(x), (x.new_empty(len(x), dtype=torch.float32) for _ in range(2))
        _rmsnorm_fwd(x, weight, y, bias, rstd, mean, None, None, eps, True)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        from quack.rmsnorm import layernorm_bwd

        x, weight, mean, rstd = ctx.saved_tensors
        return *layernorm_bwd(x, weight, dy, rstd, mean, True), None


def problem(package: Package, rows: int, cols: int, dtype: str, rounds: int) -> tuple[list[dict[str, Any]], bool]:
    """A record a pass; whether ours was served and right."""
    frontend, place = package.frontend, torch.device("cuda", 0)
    torch._dynamo.reset()  # it compiles a function for few sizes, and leaves it as it is for others
    options = {"weight": 1, "bias": 1, **dict.fromkeys(("residual", "sum", "mean", "rstd"), 0)}
    sizes = {"rows": rows, "cols": cols, **options}
    args = [frontend.timed(sizes, getattr(torch, dtype), place, 0)]
    args += [frontend.timed(sizes, getattr(torch, dtype), place, seed) for seed in range(1, sets_for(args[0]))]
    recorded = [recording(a) for a in args]
    torch.manual_seed(2)
    dy = [torch.randn_like(a[0]) for a in args]
    leaves = [tensors(r) for r in recorded]
    wide = recording(tuple(t.double() if isinstance(t, Tensor) else t for t in args[0]))  # the gradients of it are, too
    exact = frontend.exact(*wide)
    gradients = torch.autograd.grad(exact, tensors(wide), dy[0].double())
    truth = {"forward": [exact.detach()], "backward": gradients}
    trains = package.function != "softmax"
    samples: dict[str, dict[str, Sample]] = defaultdict(dict)
    eagers: dict[str, Callable[[], object]] = {}
    errors: dict[str, dict[str, float]] = defaultdict(dict)
    left_out: dict[str, str] = {}
    for name, ask in functions(package):
        try:
            function = ask()
            with torch.no_grad():
                errors["forward"][name] = error([function(*args[0])], truth["forward"])
            if trains:
                ys = [function(*r) for r in recorded]
                first = torch.autograd.grad(ys[0], leaves[0], dy[0], retain_graph=True)
                errors["backward"][name] = error(first, truth["backward"])
                of = zip(ys, leaves, dy, strict=True)
                backward = [partial(torch.autograd.grad, *a, retain_graph=True) for a in of]
                samples["backward"][name] = on_gpu(walk(backward))
                calls = [partial(both, function, *a) for a in zip(recorded, leaves, dy, strict=True)]
                samples["both"][name], eagers[name] = on_gpu(walk(calls)), calls[0]
            forward = [partial(without_gradients, function, a) for a in args]
            samples["forward"][name] = on_gpu(walk(forward))
        except Exception as e:  # of other people's code
            if name == "PyTorch":
                raise
            left_out[name] = f"{type(e).__name__}: {e}".partition("\n")[0][:120]
    del exact, gradients, truth, wide
    shown = f"{package.function} {rows}x{cols} {dtype}"
    print(f"\n{shown}")
    for name, why in left_out.items():
        print(f"  {name} is left out: {why}")
    records, sound = [], True
    for which in ("forward", *(("backward", "both") if trains else ())):
        found = errors["backward" if which == "both" else which]
        wrong = {n for n, e in found.items() if not e <= 2 * found["PyTorch"] + 1e-6}  # NaN is, too
        way = frontend.explain(*(args if which == "forward" else recorded)[0])
        raced = race(samples[which], rounds, lambda: False)
        us = {name: raced.timing(name, name).us / len(args) for name in samples[which]}
        record = {"problem": shown, "pass": which, "way": way, "us": us, "wrong": sorted(wrong), "left_out": left_out}
        if which == "both":
            record["eager_us"] = eager(eagers, rounds)
        records.append(record)
        sound &= OURS not in wrong and OURS in us and not way.startswith("PyTorch")
        tell(record)
    return records, sound


def recording(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A package's own times are without gradients. Of a weight that is not there PyTorch's is its default."""
    return tuple(t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in args)


def tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in args if isinstance(t, Tensor)]


def both(function: Function, args: tuple[Any, ...], leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*args), leaves, dy)


def without_gradients(function: Function, args: tuple[Any, ...]) -> Tensor:
    with torch.no_grad():
        return function(*args)


def error(found: Any, truth: Any) -> float:
    """The largest of the results' errors, in norm, over the norm of what is right."""
    return max(float((f.double() - t.double()).norm() / t.double().norm()) for f, t in zip(found, truth, strict=True))


def eager(calls: dict[str, Callable[[], Any]], rounds: int, number: int = 50) -> dict[str, float]:
    """Microseconds a call by the wall clock, of `number` calls until the GPU has finished; median."""
    found: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds):
        for name in list(calls)[:: 1 - 2 * (turn % 2)]:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(number):
                calls[name]()
            torch.cuda.synchronize()
            found[name].append(1e6 * (time.perf_counter() - begin) / number)
    return {name: median(times) for name, times in found.items()}


def best_other(record: dict[str, Any], clock: str = "us") -> float:
    return min(us for name, us in record[clock].items() if name != OURS and name not in record["wrong"])


def tell(record: dict[str, Any]) -> None:
    for clock in ("us", "eager_us"):
        if OURS in record.get(clock, {}):
            shown = "  ".join(f"{n} {u:.2f}{' WRONG' if n in record['wrong'] else ''}" for n, u in record[clock].items())
            name = record["pass"] if clock == "us" else "eager"
            print(f"  {name:8} {record[clock][OURS] / best_other(record, clock):.3f} of the best other   {shown}")
    if record["way"].startswith("PyTorch"):
        print(f"  not served: {record['way']}")


def tell_means(records: list[dict[str, Any]]) -> None:
    groups = defaultdict(list)
    for r in records:
        if OURS in r["us"]:
            groups[r["problem"].partition(" ")[0], r["pass"]].append(r)
    print()
    for (function, which), found in groups.items():
        ratios = [r["us"][OURS] / best_other(r) for r in found]
        torchs = geometric_mean(r["us"][OURS] / r["us"]["PyTorch"] for r in found)
        slow = sum(ratio > SLOWER for ratio in ratios)
        print(
            f"{function} {which}: {geometric_mean(ratios):.3f} of the best other, {torchs:.3f} of PyTorch, geometric means"
            f" of {len(found)}; {slow} slower by more than 3%, the worst {max(ratios):.3f}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
