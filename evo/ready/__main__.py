"""python -m evo.ready: the kernels that are shipped, a line for each problem and architecture."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from evo.ready import ReadyKernel, ReadyVariant, kernels


def main() -> int:
    """Exit code 0; 1 where something that is shipped cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m evo.ready", description="Kernels that are shipped, ready to call.")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    try:
        found = kernels()
    except ImportError as error:
        print(f"evo: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(kernel) for kernel in found], indent=1, default=str))
        return 0
    for kernel in found:
        _tell(kernel)
    if any(v.standing == "compiled" for kernel in found for v in kernel.variants):
        print("compiled: what was found on another architecture, built for this one and never timed on it")
    if found:
        print(f"what of it runs on this machine: python -m evo.ready.{found[0].name} check")
    if not found:
        print("no kernel is shipped with this evo")
    return 0


def _tell(kernel: ReadyKernel) -> None:
    print(f"{kernel.name}: {kernel.title}, in place of {kernel.replaces}")
    print(f"  from evo.ready import {', '.join(kernel.functions)}")
    builds: dict[str, list[str]] = {}
    for variant in kernel.variants:
        builds.setdefault(variant.workload, []).append(_build(variant))
    names = _told_apart(list(builds))
    width = max(map(len, names), default=0)
    for name, told in zip(names, builds.values(), strict=True):
        print(f"  {name.ljust(width)}  {', '.join(told)}")


def _told_apart(problems: list[str]) -> list[str]:
    """Sizes and dtype, and of the options behind them those in which the problems differ."""
    parts = [problem.split(",") for problem in problems]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    kept = []
    for own in parts:
        dtype = next((i for i, part in enumerate(own) if part.startswith("dtype=")), len(own))
        kept.append(",".join(part for i, part in enumerate(own) if i <= dtype or part not in shared))
    return kept


def _build(variant: ReadyVariant) -> str:
    if variant.standing == "compiled":
        return f"{variant.arch} (compiled)"
    if variant.speedup is None:
        return variant.arch
    left = ", so left to it" if variant.slower else ""
    return f"{variant.arch} ({variant.speedup:.2f} times PyTorch's speed on {variant.device}{left})"


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
