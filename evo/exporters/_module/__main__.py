"""python -m PACKAGE check | bench | show"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib import import_module
from math import isfinite
from typing import Any

import torch

from ._bench import Comparison, compare
from ._check import Verdict, check
from ._launcher import MANIFEST, Dispatch

_PARTS_OF_TIMING = ("how", "own us", "torch us", "speed-up (95% interval)")


def main() -> int:
    """Exit code 0: done, and all is right. 1: something is wrong, or no variant runs here. 2: bad usage."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=MANIFEST["kernel"]["title"])
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="compare every variant with PyTorch and float64")
    checking.add_argument("--seed", type=int, default=None, help="of the inputs (default: another each time)")
    checking.add_argument("-v", "--verbose", action="store_true", help="one line a case")
    timing = commands.add_parser("bench", help="time every variant beside PyTorch")
    timing.add_argument("--rounds", type=int, default=30, help="pairs of samples (default: 30)")
    showing = commands.add_parser("show", help="what was exported, and whether it runs here")
    for command in (checking, timing, showing):
        command.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    frontend = import_module(".frontend", __package__)
    if options.command == "check":
        seed = torch.seed() % 2**31 if options.seed is None else options.seed
        records, code = _check(frontend, seed, None if options.json else options.verbose)
    elif options.command == "bench":
        records, code = _bench(frontend, max(1, options.rounds), not options.json)
    else:
        records, code = _show(frontend.DISPATCH, not options.json)
    if options.json:
        print(json.dumps(records, indent=1))
    return code


def _variants(dispatch: Dispatch) -> list[dict[str, Any]]:
    """What every command says of a variant: `unavailable` is why it does not run here, `rebuilt` why it was built."""
    return [
        {
            "variant": index,
            "candidate": v["candidate"],
            "workload": v["workload"]["key"],
            "arch": v["arch"],
            "unavailable": dispatch.unavailable(index),
            "rebuilt": dispatch.rebuilt(index),
        }
        for index, v in enumerate(MANIFEST["variants"])
    ]


def _names(variants: list[dict[str, Any]]) -> list[str]:
    """One a variant, all of one width."""
    names = [f"{v['variant']} {v['workload']} {v['arch']}" for v in variants]
    return [name.ljust(max(map(len, names))) for name in names]


def _tell_rebuilt(variant: dict[str, Any]) -> None:
    if variant["rebuilt"]:
        print(f"  built from its source on this machine, because {variant['rebuilt']}")


def _show(dispatch: Dispatch, talk: bool) -> tuple[list[dict[str, Any]], int]:
    variants = _variants(dispatch)
    if talk:
        print(f"{MANIFEST['kernel']['title']}, in place of {MANIFEST['kernel']['replaces']}")
        print(f"exported by evo {MANIFEST['evo_version']} at {MANIFEST['exported_at']}")
        for v, name in zip(variants, _names(variants), strict=True):
            print(f"{name}  candidate {v['candidate']}: {v['unavailable'] or 'runs here'}")
            _tell_rebuilt(v)
    return variants, 0


def _check(frontend: Any, seed: int, verbose: bool | None) -> tuple[list[dict[str, Any]], int]:
    """Says nothing where `verbose` is None."""
    variants = _variants(frontend.DISPATCH)
    for v, name in zip(variants, _names(variants), strict=True):
        if v["unavailable"]:
            v["right"] = None
            if verbose is not None:
                print(f"{name}  not checked: {v['unavailable']}")
            continue
        verdicts = list(check(frontend, frontend.DISPATCH, v["variant"], seed))
        v["right"] = not any(c.reason for c in verdicts) and any(c.on_variant for c in verdicts)
        v["seed"], v["cases"] = seed, [asdict(c) for c in verdicts]
        for case in v["cases"]:
            case["error"] = case["error"] if isfinite(case["error"]) else None  # JSON knows no infinity
        if verbose is not None:
            _tell_rebuilt(v)
            _tell_verdicts(name, verdicts, seed, verbose)
    checked = [v["right"] for v in variants if v["right"] is not None]
    if not checked and verbose is not None:
        print("no variant of this package runs on this machine: every call is left to PyTorch")
    return variants, 0 if checked and all(checked) else 1


def _tell_verdicts(name: str, verdicts: list[Verdict], seed: int, verbose: bool) -> None:
    for c in verdicts:
        if verbose or c.reason:
            verdict = f"WRONG  {c.case}: {c.reason}" if c.reason else f"right  {c.case}: error {c.error:.3g}"
            print(f"  {verdict} [{c.path}]")
    wrong = sum(bool(c.reason) for c in verdicts)
    own = [c for c in verdicts if c.on_variant]
    worst = max(own, key=lambda c: c.error, default=None)
    summary = f"error {worst.error:.3g}, PyTorch's {worst.torch_error:.3g}" if worst else "NO CASE USED IT"
    result = f"{wrong} WRONG" if wrong else "right"
    left = len(verdicts) - len(own)
    print(f"{name}  {result}: {len(own)} cases on it, {left} left to PyTorch; {summary} (seed {seed})")


def _bench(frontend: Any, rounds: int, talk: bool) -> tuple[list[dict[str, Any]], int]:
    variants = _variants(frontend.DISPATCH)
    names = _names(variants)
    if talk:
        how, own, original, faster = _PARTS_OF_TIMING
        print(f"{'variant'.ljust(len(names[0]))}  {how:5}  {own:>9}  {original:>9}  {faster}")
    for v, name in zip(variants, names, strict=True):
        if v["unavailable"]:
            if talk:
                print(f"{name}  not timed: {v['unavailable']}")
            continue
        found = compare(frontend, frontend.DISPATCH, v["variant"], rounds)
        v["timings"] = [_timing(c) for c in found]
        for t in v["timings"] if talk else ():
            faster = f"{t['speedup']:.3f} ({t['speedup_low']:.3f} to {t['speedup_high']:.3f})"
            print(f"{name}  {t['how']:5}  {t['own_us']:9.2f}  {t['torch_us']:9.2f}  {faster}")
    return variants, 0 if any("timings" in v for v in variants) else 1


def _timing(c: Comparison) -> dict[str, Any]:
    return {
        "how": c.how,
        "own_us": c.own_us,
        "torch_us": c.torch_us,
        "speedup": 1 / c.ratio,
        "speedup_low": 1 / c.high,
        "speedup_high": 1 / c.low,
    }


if __name__ == "__main__":
    sys.exit(main())
