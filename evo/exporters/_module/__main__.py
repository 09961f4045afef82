"""python -m PACKAGE check | bench | show"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

import torch

from ._bench import compare
from ._check import check
from ._launcher import MANIFEST, Dispatch


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=MANIFEST["kernel"]["title"])
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="compare every variant with PyTorch and float64")
    checking.add_argument("--seed", type=int, default=None, help="of the inputs (default: another each time)")
    checking.add_argument("-v", "--verbose", action="store_true", help="one line a case")
    timing = commands.add_parser("bench", help="time every variant beside PyTorch")
    timing.add_argument("--rounds", type=int, default=30, help="pairs of samples (default: 30)")
    commands.add_parser("show", help="what was exported, and where it comes from")
    options = parser.parse_args()
    frontend = import_module(".frontend", __package__)
    dispatch: Dispatch = frontend.DISPATCH
    if options.command == "show":
        return _show(dispatch)
    if options.command == "bench":
        return _bench(frontend, dispatch, max(1, options.rounds))
    seed = torch.seed() % 2**31 if options.seed is None else options.seed
    return _check(frontend, dispatch, seed, options.verbose)


def _names() -> list[str]:
    """One a variant, all of one width."""
    names = [f"{i} {v['workload']['key']} {v['arch']}" for i, v in enumerate(MANIFEST["variants"])]
    return [name.ljust(max(map(len, names))) for name in names]


def _show(dispatch: Dispatch) -> int:
    kernel = MANIFEST["kernel"]
    print(f"{kernel['title']}, in place of {kernel['replaces']}; exported by evo {MANIFEST['evo_version']}")
    print(f"on {MANIFEST['exported_at']}")
    for index, name in enumerate(_names()):
        state = dispatch.unavailable(index)
        print(f"{name}  candidate {MANIFEST['variants'][index]['candidate']}: {state or 'runs here'}")
        _tell_rebuilt(dispatch, index)
    return 0


def _tell_rebuilt(dispatch: Dispatch, index: int) -> None:
    if dispatch.rebuilt(index):
        print(f"  built from its source on this machine, because {dispatch.rebuilt(index)}")


def _check(frontend: Any, dispatch: Dispatch, seed: int, verbose: bool) -> int:
    checked = failed = 0
    for index, name in enumerate(_names()):
        state = dispatch.unavailable(index)
        if state:
            print(f"{name}  not checked: {state}")
            continue
        _tell_rebuilt(dispatch, index)
        verdicts = list(check(frontend, dispatch, index, seed))
        for v in verdicts:
            if verbose or v.reason:
                verdict = f"WRONG  {v.case}: {v.reason}" if v.reason else f"right  {v.case}: error {v.error:.3g}"
                print(f"  {verdict} [{v.path}]")
        own = [v for v in verdicts if v.on_variant]
        wrong = sum(1 for v in verdicts if v.reason)
        checked += bool(own)
        failed += bool(wrong or not own)
        worst = max(own, key=lambda v: v.error, default=None)
        summary = f"error {worst.error:.3g}, PyTorch's {worst.torch_error:.3g}" if worst else "no case used it"
        result = f"{wrong} WRONG" if wrong else "right"
        left = len(verdicts) - len(own)
        print(f"{name}  {result}: {len(own)} cases on it, {left} left to PyTorch; {summary} (seed {seed})")
    if not checked:
        print("no variant of this package runs on this machine: every call is left to PyTorch")
    return 1 if failed or not checked else 0


def _bench(frontend: Any, dispatch: Dispatch, rounds: int) -> int:
    timed = 0
    names = _names()
    print(f"{'variant'.ljust(len(names[0]))}  {'how':5}  {'own us':>9}  {'torch us':>9}  speed-up (95% interval)")
    for index, name in enumerate(names):
        state = dispatch.unavailable(index)
        if state:
            print(f"{name}  not timed: {state}")
            continue
        for c in compare(frontend, dispatch, index, rounds):
            faster = f"{1 / c.ratio:.3f} ({1 / c.high:.3f} to {1 / c.low:.3f})"
            print(f"{name}  {c.how:5}  {c.own_us:9.2f}  {c.torch_us:9.2f}  {faster}")
        timed += 1
    return 0 if timed else 1


if __name__ == "__main__":
    sys.exit(main())
