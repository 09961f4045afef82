"""What a call of a function made by `evo.kernel` costs the processor, over a call of the same kernel's exported package.

    python benchmarks/own_kernel.py [--rounds 40] [--calls 2000]

Both are called in turn with the same small tensors, the default variant behind them, first launched from Python and then by
the native launcher. Printed: microseconds of each, and the ratio, of the 10th percentile of the rounds. On a GPU where there
is one, else on the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import evo


@evo.kernel(cpu="""
    extern "C" void add(const float* a, const float* b, float* c, int n) {
        for (int i = 0; i < n; ++i) c[i] = a[i] + b[i];
    }
""")
def add(a, b):  # type: ignore[no-untyped-def]
    """
    __global__ void add(const float* a, const float* b, float* c, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) c[i] = a[i] + b[i];
    }
    """
    return a + b


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(1024, device=place)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        sys.path.insert(0, folder)
        add.export(f"{folder}/exported_add")
        package: Any = importlib.import_module("exported_add")
        for module in (add, package):
            module.also_serve(measure=False, slower=True)
        for launcher in ("Python", "native"):
            calls = {"evo.kernel": partial(add, x, x), "package": partial(package.add, x, x)}
            for module in (add, package):
                if not module.explain(x, x).endswith(f"{launcher} launcher"):
                    raise SystemExit(f"not served by the {launcher} launcher: {module.explain(x, x)}")
            own, exported = in_turn(list(calls.values()), options.rounds, options.calls)
            print(f"{launcher} launcher: evo.kernel {own:.2f} us, package {exported:.2f} us, ratio {own / exported:.3f}")
            add.build()
            package.build()
    return 0


def in_turn(calls: list[Callable[[], object]], rounds: int, number: int) -> list[float]:
    """Microseconds of one call of each."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own in zip(calls, found, strict=True):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(number):
                call()
            own.append(1e6 * (time.perf_counter() - began) / number)
    return [sorted(own)[len(own) // 10] for own in found]


if __name__ == "__main__":
    raise SystemExit(main())
