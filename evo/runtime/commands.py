"""python -m PACKAGE build | check | bench | show"""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from math import isfinite
from typing import Any

import torch

from .package import Busy, Package, Unavailable
from .timing import Timing, compare, cost_of_any_batch
from .trial import Verdict, verdicts


def main(package: Package, frontend: Any) -> int:
    """Exit code 0: done, and all is right. 1: something is wrong, or no variant runs here. 2: bad usage."""
    parser = argparse.ArgumentParser(prog=f"python -m {package.name}", description=package.kernel["title"])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build the native launcher for this machine's PyTorch")
    checking = commands.add_parser("check", help="compare every variant with PyTorch and float64")
    checking.add_argument("--seed", type=int, default=None, help="of the inputs (default: another each time)")
    checking.add_argument("--cases", type=int, default=0, help="so many random ones, too")
    checking.add_argument(
        "--batch-invariant", action="store_true", help="fail, too, where a batch's parts have other bits in another batch"
    )
    checking.add_argument("-v", "--verbose", action="store_true", help="one line a case")
    timing = commands.add_parser("bench", help="time every variant beside PyTorch")
    timing.add_argument("--rounds", type=int, default=30, help="pairs of samples (default: 30)")
    timing.add_argument(
        "--batch-invariant", action="store_true", help="also what also_serve(batch_invariant=True) costs at its sizes"
    )
    for command in (checking, timing):
        command.add_argument(
            "--all", action="store_true", help="also builds that run here, but in whose place another one is taken"
        )
    showing = commands.add_parser("show", help="what was exported, and whether it runs here")
    numbers = range(len(package.variants))
    showing.add_argument("--source", type=int, choices=numbers, metavar="VARIANT", help="print the source of one instead")
    for command in (building, checking, timing, showing):
        command.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    run = {"build": _build, "check": _check, "bench": _bench, "show": _show}[options.command]
    with redirect_stdout(None) if options.json else nullcontext():
        records, code = run(frontend, options)
    if options.json:
        print(json.dumps(records, indent=1))
    return code


def _variants(frontend: Any, every: bool) -> list[dict[str, Any]]:
    """What every command says of a variant: `taken` is the one that serves its problem here, perhaps another build of it;
    `unavailable` why it does not run itself, `rebuilt` why it was built. Unless `every`, those in whose place another one
    is taken are not loaded, and `unavailable` says so."""
    dispatch = frontend.DISPATCH
    found = []
    for v in dispatch.package.variants:
        taken = dispatch.taken(v.index)
        instead = "another build is taken in its place"
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
                "rebuilt": v.rebuilt,
                "recorded": _recorded(v.record),
                "points": [{"workload": p["workload"]["key"], "recorded": _recorded(p)} for p in v.points[1:]],
            }
        )
    return found


def _recorded(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What evo measured before the export, beside PyTorch and with cold caches; `how` says in which stage."""
    t = record["timing"]
    if t is None:
        return None
    own = Timing(t["median_us"], t["ratio"], t["ratio_low"], t["ratio_high"], bool(t["disturbed"]))
    return {"device": record["record"].get("device"), **_figures(t["stage"], t["torch_us"], own)}


def _figures(how: str, torch_us: float | None, own: Timing) -> dict[str, Any]:
    return {
        "how": how,
        "own_us": own.us,
        "torch_us": torch_us,
        "speedup": None if own.disturbed else 1 / own.ratio,
        "speedup_low": None if own.disturbed else 1 / own.high,
        "speedup_high": None if own.disturbed else 1 / own.low,
        "disturbed": own.disturbed,
    }


def _gain(timing: dict[str, Any]) -> str:
    if timing["disturbed"]:
        return "not sure: the machine was too busy"
    return f"{timing['speedup']:.3f} ({timing['speedup_low']:.3f} to {timing['speedup_high']:.3f})"


def _names(variants: list[dict[str, Any]]) -> list[str]:
    """A line for each variant, without the options that are off."""
    compiled = {"measured": "", "compiled": " (compiled)"}
    sizes = (",".join(part for part in v["workload"].split(",") if not part.endswith("=false")) for v in variants)
    return [f"{v['variant']} {named} {v['arch']}{compiled[v['standing']]}" for v, named in zip(variants, sizes, strict=True)]


def _build(frontend: Any, options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    try:
        if not hasattr(frontend, "NATIVE"):
            raise RuntimeError("this package has no native launcher")
        if frontend.NATIVE.call is None:
            print("building the native launcher: about half a minute")
        path = frontend.build()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return {"native": None, "reason": str(error)}, 1
    print(f"native launcher: {path}")
    return {"native": path, "reason": ""}, 0


def _show(frontend: Any, options: argparse.Namespace) -> tuple[list[dict[str, Any]] | dict[str, str], int]:
    package = frontend.DISPATCH.package
    if options.source is not None:
        text = package.variants[options.source].source().decode()
        print(text, end="")
        return {"source": text}, 0
    variants = _variants(frontend, every=False)
    replaced = package.kernel["replaces"]
    print(f"{package.kernel['title']}, in place of {replaced}" if replaced else package.kernel["title"])
    print(f"exported by evo {package.manifest['evo_version']} at {package.manifest['exported_at']}")
    if hasattr(frontend, "NATIVE"):
        print(f"native launcher: {frontend.NATIVE.reason or 'in use'}")
    for v, name in zip(variants, _names(variants), strict=True):
        print(f"{name}\n  candidate {v['candidate']}: {v['unavailable'] or 'runs here'}")
        if v["rebuilt"]:
            print(f"  built from its source on this machine, because {v['rebuilt']}")
        if v["standing"] == "compiled":
            print(f"  found on {v['measured_arch']} and never timed on this architecture")
        for p in (v, *v["points"]):
            if r := p["recorded"]:
                served = r["disturbed"] or r["speedup_high"] >= 1
                at = "" if p is v else f"{'serves' if served else 'leaves to PyTorch'} {p['workload']}: "
                print(f"  {at}{r['how']} on {r['device']}: {r['own_us']:.2f} us, speed-up over PyTorch {_gain(r)}")
    return variants, 0


def _check(frontend: Any, options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    if options.batch_invariant and not frontend.DISPATCH.batch:
        print(f"--batch-invariant: no dimension of {frontend.DISPATCH.package.name} is a batch", file=sys.stderr)
        return [], 2
    seed = torch.seed() % 2**31 if options.seed is None else options.seed
    variants = _variants(frontend, options.all)
    for v, name in zip(variants, _names(variants), strict=True):
        v["right"] = None
        if v["unavailable"]:
            print(f"{name}\n  not checked: {v['unavailable']}")
            continue
        found = list(verdicts(frontend, v["variant"], seed, max(0, options.cases)))
        v["right"] = not any(c.reason for c in found) and any(c.on_variant for c in found)
        v["seed"] = seed
        # JSON knows no infinity.
        v["cases"] = [{**asdict(c), "error": c.error if isfinite(c.error) else None} for c in found]
        v["varies"] = varies = _varies(frontend, v["variant"])
        print(name)
        for c in found:
            if options.verbose or c.reason:
                verdict = f"WRONG  {c.case}: {c.reason}" if c.reason else f"right  {c.case}: error {c.error:.3g}"
                print(f"  {verdict} [{c.path}]")
        print(f"  {_summary(found)} (seed {seed})")
        if varies is not None:
            verdict = "REFUSED" if options.batch_invariant else "no"
            print(f"  the same bits in any batch: {f'{verdict}: {varies}' if varies else 'yes'}")
    damaged = list(frontend.DISPATCH.package.damaged())
    for fault in damaged:
        print(f"DAMAGED  {fault}; export it again", file=sys.stderr)
    checked = [v["right"] for v in variants if v["right"] is not None]
    if not checked:
        print("no variant of this package runs on this machine: every call is left to PyTorch")
    refused = options.batch_invariant and any(v.get("varies") for v in variants)
    return variants, 0 if checked and all(checked) and not damaged and not refused else 1


def _varies(frontend: Any, index: int) -> str | None:
    """As `Dispatch.varies`; also why it does not run, where it has failed by now."""
    try:
        found: str | None = frontend.DISPATCH.varies(index)
    except (Unavailable, Busy) as reason:
        return str(reason)
    return found


def _summary(found: list[Verdict]) -> str:
    wrong = sum(bool(c.reason) for c in found)
    own = [c for c in found if c.on_variant]
    worst = max(own, key=lambda c: c.error, default=None)
    cases = f"{len(own)} cases on it, {len(found) - len(own)} left to PyTorch"
    errors = f"largest error {worst.error:.3g}, PyTorch's {worst.torch_error:.3g}, in case {worst.case}" if worst else ""
    return f"{f'{wrong} WRONG' if wrong else 'right'}: {cases}\n  {errors or 'NO CASE USED IT'}"


def _cost_of_any_batch(frontend: Any, index: int, rounds: int) -> dict[str, Any] | None:
    try:
        served_by, ratio = cost_of_any_batch(frontend, index, max(1, rounds))
    except (Unavailable, Busy, ValueError) as reason:
        print(f"  in any batch: PyTorch ({reason})")
        return None
    print(f"  in any batch: variant {served_by}, {ratio:.3f} of this one's time")
    return {"variant": served_by, "ratio": ratio}


def _bench(frontend: Any, options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    variants = _variants(frontend, options.all)
    print(f"  {'how':6}  {'own us':>9}  {'torch us':>9}  speed-up (95% interval)")
    for v, name in zip(variants, _names(variants), strict=True):
        print(name)
        if v["unavailable"]:
            print(f"  not timed: {v['unavailable']}")
        else:
            compared = compare(frontend, v["variant"], max(1, options.rounds))
            v["timings"] = [_figures(how, torch_us, own) for how, (torch_us, own) in compared.items()]
            if options.batch_invariant:
                v["batch_invariant"] = _cost_of_any_batch(frontend, v["variant"], options.rounds)
        for t in (*v.get("timings", ()), *filter(None, [v["recorded"]])):
            torch_us = "-" if t["torch_us"] is None else f"{t['torch_us']:.2f}"
            before = f"  before the export, {t['device']}" if "device" in t else ""
            print(f"  {t['how']:6}  {t['own_us']:9.2f}  {torch_us:>9}  {_gain(t)}{before}")
    return variants, 0 if any("timings" in v for v in variants) else 1
