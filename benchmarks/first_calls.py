"""How long does the first call of its kind take, and from when on does a variant serve it? On a GPU.

    python benchmarks/first_calls.py [--seconds S] [--json FILE]

The shipped packages, in one process whose cache folder is empty: of attention each head size, dtype and kind of mask, of
norms and softmax each dtype at widths that something was tuned for and at others. Each call is made of PyTorch's function
first, whose own first call may take seconds. `first`: seconds of ours. `decided`: seconds from its start until calls are no
longer left to PyTorch for what is being compiled. `meanwhile`: a call until then, over PyTorch's. Median and worst are
printed at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as functional

HEAD_DIMS, COLS = (32, 64, 96, 128, 256), (1000, 4096, 5120)
KINDS = ("none", "causal", "qk", "bk", "bqk", "added", "decode", "long")
LENGTHS = {"decode": (1, 2048), "long": (4096, 4096)}
Case = tuple[str, str, tuple[Any, ...], dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins after so long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, records = time.monotonic(), []
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        os.environ["EVO_KERNELS_CACHE"] = cache
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
        for package, name, args, named in cases():
            if time.monotonic() - began > options.seconds:
                break
            records.append(record := first_call(package, name, args, named))
            print(" ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{v}" for k, v in record.items()), flush=True)
    for package in dict.fromkeys(r["package"] for r in records):
        own = [r for r in records if r["package"] == package]
        worst = {key: max(own, key=lambda r: r[key]) for key in ("first", "decided")}
        told = (f"{k} {median(r[k] for r in own):.2f} s, worst {w[k]:.2f} ({w['name']})" for k, w in worst.items())
        print(f"{package}: {len(own)} calls, median {'; '.join(told)}")
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1))
    return 0


def cases() -> Iterator[Case]:
    for dim in HEAD_DIMS:
        for dtype in (torch.float16, torch.bfloat16):
            for kind in KINDS:
                q_len, kv_len = LENGTHS.get(kind, (512, 512))
                q, k, v = (torch.randn(2, 8, n, dim, device="cuda", dtype=dtype) for n in (q_len, kv_len, kv_len))
                yield "attention", f"{dim} {kind} {dtype}", (q, k, v), named(kind, q_len, kv_len, dtype)
    for package in ("layernorm", "rmsnorm", "softmax_forward"):
        for cols in COLS:
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                x, weight = torch.randn(2048, cols, device="cuda", dtype=dtype), torch.ones(cols, device="cuda", dtype=dtype)
                args = {"layernorm": (x, (cols,), weight, weight), "rmsnorm": (x, (cols,), weight, 1e-6)}
                yield package, f"{cols} {dtype}", args.get(package, (x, -1)), {}


def named(kind: str, q_len: int, kv_len: int, dtype: torch.dtype) -> dict[str, Any]:
    if kind == "added":
        return {"attn_mask": torch.randn(q_len, kv_len, device="cuda", dtype=dtype)}
    if kind.endswith("k"):
        mask = torch.rand(2 if "b" in kind else 1, 1, q_len if "q" in kind else 1, kv_len, device="cuda") > 0.3
        return {"attn_mask": mask.index_fill_(-1, torch.zeros(1, dtype=torch.long, device="cuda"), True)}
    return {"is_causal": True} if kind == "causal" else {}


def first_call(package: str, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    module = import_module(f"evo.ready.{package}")
    function = next(n for n in module.__all__ if hasattr(functional, n))
    own, torchs = getattr(module, function), getattr(functional, function)
    of_torch = seconds(lambda: torchs(*args, **options))
    usual = median(seconds(lambda: torchs(*args, **options)) for _ in range(5))
    began = time.perf_counter()
    first = seconds(lambda: own(*args, **options))
    meanwhile = []
    while "compiled beside" in (way := module.explain(*args, **options)):
        meanwhile.append(median(seconds(lambda: own(*args, **options)) for _ in range(9)) / usual)
        time.sleep(0.01)
    if meanwhile:
        first = max(first, seconds(lambda: own(*args, **options)))  # which holds the race, if `explain` did not
    decided = time.perf_counter() - began
    found = {"package": package, "name": name, "first": first, "torch": of_torch, "decided": decided}
    return {**found, "meanwhile": median(meanwhile) if meanwhile else 1.0, "way": way[:160]}


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
