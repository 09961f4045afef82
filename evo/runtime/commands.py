"""python -m PACKAGE build | check | bench | show"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

import torch

from .package import Package
from .timing import Timing, compare
from .trial import Verdict, verdicts

__all__ = ["main"]

_PARTS_OF_TIMING = ("how", "own us", "torch us", "speed-up (95% interval)")
_DISTURBED = "! something slowed this down while it was timed: do not trust the figure"


def main(package: Package, frontend: Any) -> int:
    """Exit code 0: done, and all is right. 1: something is wrong, or no variant runs here. 2: bad usage."""
    parser = argparse.ArgumentParser(prog=f"python -m {package.name}", description=package.kernel["title"])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build the native launcher for this machine's PyTorch")
    checking = commands.add_parser("check", help="compare every variant with PyTorch and float64")
    checking.add_argument("--seed", type=int, default=None, help="of the inputs (default: another each time)")
    checking.add_argument("-v", "--verbose", action="store_true", help="one line a case")
    timing = commands.add_parser("bench", help="time every variant beside PyTorch")
    timing.add_argument("--rounds", type=int, default=30, help="pairs of samples (default: 30)")
    for command in (checking, timing):
        command.add_argument(
            "--all", action="store_true", help="also builds that run here, but in whose place another one is taken"
        )
    showing = commands.add_parser("show", help="what was exported, and whether it runs here")
    for command in (building, checking, timing, showing):
        command.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    records: Any
    if options.command == "build":
        records, code = _build(frontend, not options.json)
    elif options.command == "check":
        seed = torch.seed() % 2**31 if options.seed is None else options.seed
        records, code = _check(frontend, seed, None if options.json else options.verbose, options.all)
    elif options.command == "bench":
        records, code = _bench(frontend, max(1, options.rounds), not options.json, options.all)
    else:
        records, code = _show(frontend, not options.json)
    if options.json:
        print(json.dumps(records, indent=1))
    return code


def _variants(frontend: Any, every: bool = True) -> list[dict[str, Any]]:
    """What every command says of a variant: `taken` is the one that serves its problem here, perhaps another build of it;
    `unavailable` why it does not run itself, `rebuilt` why it was built. Unless `every`, those in whose place another one
    is taken are not loaded, and `unavailable` says so."""
    dispatch = frontend.DISPATCH
    found = []
    for v in dispatch.package.variants:
        taken = dispatch.taken(v.index)
        instead = f"variant {taken} is taken in its place"
        found.append(
            {
                "variant": v.index,
                "candidate": v.record["candidate"],
                "workload": v.record["workload"]["key"],
                "arch": v.arch,
                "standing": v.record["standing"],
                "measured_arch": v.record["measured_arch"],
                "taken": taken,
                "unavailable": dispatch.unavailable(v.index) if every or taken == v.index else instead,
                "rebuilt": dispatch.rebuilt(v.index),
                "recorded": _recorded(v.record),
            }
        )
    return found


def _recorded(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What evo measured before the export, beside PyTorch and with cold caches; `how` says in which stage."""
    timing = record["timing"]
    if timing is None:
        return None
    return {
        "how": timing["stage"],
        "device": record["record"].get("device"),
        "own_us": timing["median_us"],
        "torch_us": timing["torch_us"],
        "speedup": 1 / timing["ratio"],
        "speedup_low": 1 / timing["ratio_high"],
        "speedup_high": 1 / timing["ratio_low"],
        "disturbed": bool(timing["disturbed"]),
    }


def _gain(timing: dict[str, Any]) -> str:
    interval = f"({timing['speedup_low']:.3f} to {timing['speedup_high']:.3f})"
    return f"{timing['speedup']:.3f} {interval}{' !' if timing['disturbed'] else ''}"


def _explain(timings: list[dict[str, Any]]) -> None:
    """What the mark means, where it was printed."""
    if any(t["disturbed"] for t in timings):
        print(_DISTURBED)


def _names(variants: list[dict[str, Any]]) -> list[str]:
    """One a variant, all of one width."""
    compiled = {"measured": "", "compiled": " (compiled)"}
    names = [f"{v['variant']} {v['workload']} {v['arch']}{compiled[v['standing']]}" for v in variants]
    return [name.ljust(max(map(len, names))) for name in names]


def _tell_rebuilt(variant: dict[str, Any]) -> None:
    if variant["rebuilt"]:
        print(f"  built from its source on this machine, because {variant['rebuilt']}")


def _build(frontend: Any, talk: bool) -> tuple[dict[str, Any], int]:
    if not hasattr(frontend, "NATIVE"):
        print("this package has no native launcher", file=sys.stderr)
        return {"native": None, "reason": "this package has none"}, 1
    if frontend.NATIVE.call is None and talk:
        print("building the native launcher: about half a minute", flush=True)
    try:
        path = frontend.build()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return {"native": None, "reason": str(error)}, 1
    reason = frontend.NATIVE.reason
    if talk:
        print(f"native launcher: {path}{f' (not used here: {reason})' if reason else ''}")
    return {"native": path, "reason": reason}, 0


def _show(frontend: Any, talk: bool) -> tuple[list[dict[str, Any]], int]:
    variants, package = _variants(frontend, every=False), frontend.DISPATCH.package
    if talk:
        print(f"{package.kernel['title']}, in place of {package.kernel['replaces']}")
        print(f"exported by evo {package.manifest['evo_version']} at {package.manifest['exported_at']}")
        native = getattr(frontend, "NATIVE", None)
        if native is not None:
            print(f"native launcher: {native.reason or 'in use'}")
        for problem in dict.fromkeys(v["workload"] for v in variants):
            print(problem)
            for v in variants:
                if v["workload"] == problem:
                    _show_build(v, package)
        _explain([v["recorded"] for v in variants if v["recorded"]])
    return variants, 0


def _show_build(v: dict[str, Any], package: Package) -> None:
    standing = f"{v['standing']}, " if v["standing"] == "compiled" else ""
    print(f"  {v['variant']} {v['arch']}: {standing}candidate {v['candidate']}: {v['unavailable'] or 'runs here'}")
    _tell_rebuilt(v)
    if v["standing"] == "compiled":
        print(f"    {_compiled(package.variants[v['variant']].record)}")
    elif v["recorded"]:
        r = v["recorded"]
        print(f"    {r['how']} on {r['device']}: {r['own_us']:.2f} us, speed-up over PyTorch {_gain(r)}")


def _compiled(record: Mapping[str, Any]) -> str:
    """Of a build that was not measured: what the compiler said of it."""
    told = f"found on {record['measured_arch']} and never timed on this architecture"
    if record["registers"] is None:
        return told
    smem_bytes = record["smem_static_bytes"] + record["launch"]["smem_bytes"]
    spilled = f"{record['spill_bytes']} bytes spilled"
    return f"{told}: {record['registers']} registers, {spilled}, {smem_bytes} bytes of shared memory"


def _tell_left_out(variants: list[dict[str, Any]], every: bool, done: str) -> None:
    """What was not `done` ("checked", "timed"), and why: a line for each reason; apart, builds in whose place another one is
    taken here, by architecture."""
    others: Counter[str] = Counter()
    reasons: dict[tuple[str, str], list[str]] = {}
    for v, name in zip(variants, _names(variants), strict=True):
        if v["taken"] != v["variant"] and not every:
            others[v["arch"]] += 1
        elif v["unavailable"]:
            reasons.setdefault((v["arch"], v["unavailable"]), []).append(name)
    for (arch, reason), names in reasons.items():
        print(f"{names[0] if len(names) == 1 else f'{len(names)} variants for {arch}'}  not {done}: {reason}")
    if others:
        told = ", ".join(f"{number} for {arch}" for arch, number in others.items())
        print(f"not {done}, because other builds are taken here: {told} (with --all, those that can run here are, too)")


def _check(frontend: Any, seed: int, verbose: bool | None, every: bool) -> tuple[list[dict[str, Any]], int]:
    """Says nothing where `verbose` is None."""
    variants = _variants(frontend, every)
    for v, name in zip(variants, _names(variants), strict=True):
        if v["unavailable"]:
            v["right"] = None
            continue
        found = list(verdicts(frontend, v["variant"], seed))
        v["right"] = not any(c.reason for c in found) and any(c.on_variant for c in found)
        v["seed"], v["cases"] = seed, [asdict(c) for c in found]
        for case in v["cases"]:
            case["error"] = case["error"] if isfinite(case["error"]) else None  # JSON knows no infinity
        if verbose is not None:
            _tell_rebuilt(v)
            _tell_verdicts(name, found, seed, verbose)
    if verbose is not None:
        _tell_left_out(variants, every, "checked")
    checked = [v["right"] for v in variants if v["right"] is not None]
    if not checked and verbose is not None:
        print("no variant of this package runs on this machine: every call is left to PyTorch")
    return variants, 0 if checked and all(checked) else 1


def _tell_verdicts(name: str, found: list[Verdict], seed: int, verbose: bool) -> None:
    for c in found:
        if verbose or c.reason:
            verdict = f"WRONG  {c.case}: {c.reason}" if c.reason else f"right  {c.case}: error {c.error:.3g}"
            print(f"  {verdict} [{c.path}]")
    wrong = sum(bool(c.reason) for c in found)
    own = [c for c in found if c.on_variant]
    worst = max(own, key=lambda c: c.error, default=None)
    summary = f"error {worst.error:.3g}, PyTorch's {worst.torch_error:.3g}" if worst else "NO CASE USED IT"
    result = f"{wrong} WRONG" if wrong else "right"
    left = len(found) - len(own)
    print(f"{name}  {result}: {len(own)} cases on it, {left} left to PyTorch; {summary} (seed {seed})")


def _bench(frontend: Any, rounds: int, talk: bool, every: bool) -> tuple[list[dict[str, Any]], int]:
    variants = _variants(frontend, every)
    names = _names(variants)
    if talk:
        how, own, original, faster = _PARTS_OF_TIMING
        print(f"{'variant'.ljust(len(names[0]))}  {how:6}  {own:>9}  {original:>9}  {faster}")
    for v, name in zip(variants, names, strict=True):
        if not v["unavailable"]:
            compared = compare(frontend, v["variant"], rounds)
            v["timings"] = [_timing(how, torch_us, own) for how, (torch_us, own) in compared.items()]
        for t in _all_timings(v) if talk else ():
            torch_us = "-" if t["torch_us"] is None else f"{t['torch_us']:.2f}"
            print(f"{name}  {t['how']:6}  {t['own_us']:9.2f}  {torch_us:>9}  {_gain(t)}")
    if talk:
        _tell_left_out(variants, every, "timed")
        recorded = [v["recorded"] for v in variants if v["recorded"]]
        for how, device in dict.fromkeys((r["how"], r["device"]) for r in recorded):
            print(f"{how}: measured by evo before the export, on {device}")
        _explain([t for v in variants for t in _all_timings(v)])
    return variants, 0 if any("timings" in v for v in variants) else 1


def _all_timings(variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Those taken now, and the one recorded."""
    return [*variant.get("timings", []), *([variant["recorded"]] if variant["recorded"] else [])]


def _timing(how: str, torch_us: float, own: Timing) -> dict[str, Any]:
    return {
        "how": how,
        "own_us": own.us,
        "torch_us": torch_us,
        "speedup": 1 / own.ratio,
        "speedup_low": 1 / own.high,
        "speedup_high": 1 / own.low,
        "disturbed": own.disturbed,
    }
