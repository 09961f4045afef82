"""Is an exported package worth it in a model? A transformer of GPT-2's size, built here from plain PyTorch.

    python benchmarks/transformer.py --package exported/layernorm [--package exported/attention]
        [--layers 12] [--width 768] [--heads 12] [--sequence 1024] [--vocabulary 50257] [--batch 8] [--dtype bfloat16]
        [--device cuda] [--rounds 10] [--steps 50] [--without compile]... [--json]

Build the packages' native launchers first (python -m PACKAGE build): calls that record gradients, and compiled ones, are
PyTorch's without them. Measured, taking turns in one process, by the wall clock until the GPU has finished:
  forward   in inference mode:  eager; patched (the packages' own patch()); torch.compile; torch.compile with ours
            (also_serve(compiled=True))
  step      forward, backward, AdamW:  the same, and patched with also_serve(gradients=True), which torch.compile with
            ours has, too. Calls that record gradients are else PyTorch's, and `patched` is then what asking costs
and, before that, how many calls went which way: of eager ways what `explain` says of each, of compiled ones the nodes of
the graph. Then the losses of `--steps` training steps from equal weights and data, patched and not; loss_curves.py says
when they count as equal. --without leaves out: compile, timing, curves.

Speed-ups below 1 are slow-downs, and marked. Exit code: 0 measured, and the loss curves are equal; 1 they are not, or no
call of the model was served by a variant.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import gpt
import torch
from exported import Package, Sample, Timing, add_packages, load_all, machine, race, timed_within, watch
from loss_curves import judge, sample, train
from torch.nn import functional

SAMPLE_S = 20e-3
SEED = 0
PARTS = ("compile", "timing", "curves")


@dataclass(frozen=True)
class Way:
    name: str
    ours: bool = False
    gradients: bool = False
    compiled: bool = False


FORWARD = (
    Way("eager"),
    Way("patched", ours=True),
    Way("torch.compile", compiled=True),
    Way("torch.compile with ours", ours=True, compiled=True),
)
STEP = (
    Way("eager"),
    Way("patched", ours=True),
    Way("patched, gradients", ours=True, gradients=True),
    Way("torch.compile", compiled=True),
    Way("torch.compile with ours", ours=True, gradients=True, compiled=True),
)
CURVES = STEP[1:3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_packages(parser)
    for name, value in (("layers", 12), ("width", 768), ("heads", 12), ("sequence", 1024), ("vocabulary", 50257)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--without", action="append", choices=PARTS, default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape = shape_of(options)
    packages = load_all(options.package)
    talk = not options.json
    found: dict[str, Any] = {"model": str(shape), "machine": machine(shape.place)}
    found["launchers"] = {p.folder.name: p.launcher for p in packages}
    if talk:
        print(f"{found['model']}\n{found['machine']}")
        print(*(f"{name}: {launcher} launcher" for name, launcher in found["launchers"].items()), sep="\n", flush=True)
    found |= speeds(shape, packages, options, talk)
    right = served(found) > 0
    if "curves" not in options.without:
        found["curves"] = curves(shape, packages, options.steps)
        right &= all(c["equal"] for c in found["curves"]["judged"].values() if c["ours"])
        if talk:
            tell_curves(found["curves"])
    if not served(found):
        print("no call of this model was served by a variant: all that was measured is PyTorch", file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=1, default=asdict))
    return 0 if right else 1


def shape_of(options: argparse.Namespace) -> gpt.Shape:
    if min(getattr(options, n) for n in ("layers", "width", "heads", "sequence", "vocabulary", "batch", "steps")) < 1:
        raise SystemExit("sizes of the model, --batch and --steps must be at least 1")
    if options.width % options.heads:
        raise SystemExit(f"--width {options.width} is no multiple of --heads {options.heads}")
    try:
        place = torch.empty(0, device=options.device).device
    except (RuntimeError, AssertionError) as error:
        raise SystemExit(f"PyTorch has no device {options.device!r} here: {str(error).splitlines()[0]}") from None
    sizes = {n: getattr(options, n) for n in ("layers", "width", "heads", "sequence", "vocabulary", "batch")}
    return gpt.Shape(**sizes, dtype=getattr(torch, options.dtype), place=place)


@contextmanager
def in_force(packages: Sequence[Package], way: Way) -> Iterator[None]:
    with ExitStack() as patches:
        for package in packages if way.ours else ():
            package.module.also_serve(gradients=way.gradients, compiled=way.compiled)
            patches.enter_context(package.module.patch())
        try:
            yield
        finally:
            for package in packages:
                package.module.also_serve(gradients=False, compiled=False)


def speeds(shape: gpt.Shape, packages: list[Package], options: argparse.Namespace, talk: bool) -> dict[str, Any]:
    model = gpt.Model(shape, SEED)
    training = gpt.Training(model, shape)
    tokens = gpt.batches(shape, 1, SEED + 1)[0]

    def forward(logits: Callable[..., Any]) -> object:
        with torch.inference_mode():
            return logits(model, tokens[:, :-1])

    def step(loss: Callable[..., Any]) -> object:
        return training.step(tokens, loss)

    found: dict[str, Any] = {"calls": {}, "seconds_to_compile": {}, "timings": {}}
    for what, ways, run, function in (("forward", FORWARD, forward, gpt.logits), ("step", STEP, step, gpt.loss)):
        contenders: dict[str, Sample] = {}
        for way in ways:
            if way.compiled and "compile" in options.without:
                continue
            subject, nodes = compiled(function) if way.compiled else (function, Counter())
            with in_force(packages, way), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler, about itself
                begin = time.perf_counter()
                with nullcontext() if way.compiled else counting(packages, nodes):
                    run(subject)
                if way.compiled:
                    found["seconds_to_compile"][f"{what}, {way.name}"] = time.perf_counter() - begin
            found["calls"][f"{what}, {way.name}"] = dict(nodes)
            # `also_serve` empties the packages' tables, and a first run fills them.
            during = partial(in_force, packages, way)
            contenders[way.name] = timed_within(during, partial(run, subject), shape.place)
        if talk:
            tell_calls(found, what)
        if "timing" not in options.without:
            raced = race(contenders, options.rounds, watch(), SAMPLE_S)
            found["timings"][what] = [
                {"way": name, "over": over, **asdict(raced.timing(name, over))} for name, over in pairs(contenders)
            ]
            if talk:
                tell_timings(what, [(name, over, raced.timing(name, over)) for name, over in pairs(contenders)])
    return found


def pairs(contenders: Iterable[str]) -> list[tuple[str, str]]:
    """Who is compared with whom."""
    wanted = [(name, "eager") for name in contenders]
    return wanted + [("torch.compile with ours", "torch.compile")] * ("torch.compile" in contenders)


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], Counter[str]]:
    """Compiled in one graph, apart from other ways of it: the compiler keeps what it made with the code object, of which
    this has its own. And how often the operations at issue are in the graph, when it has been called."""
    nodes: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        for node in graph.graph.nodes:
            name = getattr(node.target, "__name__", str(node.target))
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace.startswith("evo_"):
                nodes[f"{node.target.namespace}: operator of the package"] += 1
            elif name in ("layer_norm", "scaled_dot_product_attention"):
                nodes[f"{name}: PyTorch's operation"] += 1
        return torch._dynamo.lookup_backend("inductor")(graph, example)

    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, backend=backend, fullgraph=True, dynamic=False), nodes


@contextmanager
def counting(packages: Sequence[Package], said: Counter[str]) -> Iterator[None]:
    """Counts the ways that calls of replaced functions take."""
    before = {p.function: getattr(functional, p.function) for p in packages}

    def counted(package: Package, current: Callable[..., Any]) -> Callable[..., Any]:
        own = current is getattr(package.module, package.function)

        def call(*args: Any, **options: Any) -> Any:
            said[f"{package.function}: {package.explain(*args, **options) if own else 'PyTorch, not patched'}"] += 1
            return current(*args, **options)

        return call

    try:
        for package in packages:
            setattr(functional, package.function, counted(package, before[package.function]))
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)


def served(found: dict[str, Any]) -> int:
    return sum(n for calls in found["calls"].values() for way, n in calls.items() if ": variant" in way)


def curves(shape: gpt.Shape, packages: Sequence[Package], steps: int) -> dict[str, Any]:
    theirs, left_out = sample(shape, steps, SEED)
    ways = (Way("eager"), Way("eager again"), *CURVES)
    own = {way.name: train(shape, steps, SEED, in_force(packages, way)) for way in ways}
    eager = own["eager"]
    judged = {}
    for way in ways:
        verdict = judge(own[way.name], list(theirs.values()), len(CURVES))
        apart = max(abs(a - b) for a, b in zip(own[way.name], eager, strict=True))
        judged[way.name] = {
            **{"ours": way.ours, "equal": verdict.equal, "from_eager": apart, "last": own[way.name][-1]},
            **asdict(verdict),
        }
    spread = max(max(losses) - min(losses) for losses in zip(*theirs.values(), strict=True))
    return {"steps": steps, "spread": spread, "judged": judged, "left_out": left_out, "losses": {**theirs, **own}}


def tell_calls(found: dict[str, Any], what: str) -> None:
    print(f"\n{what}: which way calls went")
    for name, calls in found["calls"].items():
        if name.startswith(f"{what}, "):
            took = found["seconds_to_compile"].get(name)
            print(f"  {name.removeprefix(f'{what}, ')}" + (f" (first call {took:.1f} s)" if took else ""))
            for way, count in sorted(calls.items()):
                print(f"    {count:4} {way}")


def tell_timings(what: str, timings: Sequence[tuple[str, str, Timing]]) -> None:
    for name, over, timing in timings:
        slower = "  SLOWER" if timing.low > 1 else ""
        print(f"  {what:8} {name:24} {timing.us:10.1f} us  {timing.gain} over {over}{slower}", flush=True)
    if any(timing.disturbed for _, _, timing in timings):
        print("  ! something slowed this down while it was timed: do not trust the figure")


def tell_curves(found: dict[str, Any]) -> None:
    names = [name for name in found["losses"] if name not in found["judged"]]
    print(f"\nlosses of {found['steps']} steps; PyTorch's own differ by up to {found['spread']:.3g}:")
    for name in names:
        print(f"  {name:36} {found['losses'][name][0]:.5f} to {found['losses'][name][-1]:.5f}")
    for name, reason in found["left_out"].items():
        print(f"  {name:36} left out: {reason}")
    for name, c in found["judged"].items():
        first = found["losses"][name][0]
        verdict = "equal" if c["equal"] else f"NOT EQUAL at {c['outside']} steps"
        print(f"  {name:36} {first:.5f} to {c['last']:.5f}  {verdict}: {c['worst']:.2f} of what is allowed "
              f"(+-{c['allowed_there']:.3g} at step {c['step']}), {c['from_eager']:.3g} from eager")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
