"""python -m evo.ready: the kernels that are shipped, a line for each problem and architecture."""

from __future__ import annotations

import argparse
import json
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
    if not found:
        print("no kernel is shipped with this evo")
    return 0


def _tell(kernel: ReadyKernel) -> None:
    print(f"{kernel.name}: {kernel.title}, in place of {kernel.replaces}")
    print(f"  from evo.ready import {', '.join(kernel.functions)}")
    builds: dict[str, list[str]] = {}
    for variant in kernel.variants:
        builds.setdefault(variant.workload, []).append(_build(variant))
    for problem, told in builds.items():
        print(f"  {problem}: {', '.join(told)}")


def _build(variant: ReadyVariant) -> str:
    if variant.standing == "compiled":
        return f"{variant.arch} (compiled)"
    if variant.speedup is None:
        return variant.arch
    left = ", so left to it" if variant.slower else ""
    return f"{variant.arch} ({variant.speedup:.2f} times PyTorch's speed on {variant.device}{left})"


if __name__ == "__main__":
    sys.exit(main())
