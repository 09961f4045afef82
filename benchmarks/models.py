"""Is `evo.ready.patch(model)` worth it in a model of Hugging Face's Transformers? Random weights, nothing downloaded.

    python benchmarks/models.py llama [--layers 8] [--prompt 2048] [--batch 1] [--dtype bfloat16] [--device cuda]
        [--attention-gradients] [--without prefill|decode|step]... [--build] [--rounds 10] [--tiny] [--json]
    python benchmarks/models.py gpt2 [--prompt 1024] ...

Sizes of Llama-3-8B, with so many of its layers, or of GPT-2-medium. --tiny: a model for a CPU, to see that this runs. Native
launchers should be built first, which --build does; calls that record gradients are PyTorch's without them.
Measured, patched and not taking turns in one process, by the wall clock until the GPU has finished:
  prefill   tokens/s of a forward of the prompt, in inference mode
  decode    tokens/s of a further token with a cache that holds the prompt
  step      tokens/s of one training step: forward, loss, backward, AdamW
and, before that, which way each call of a package's function goes in it. Then how far logits of the prompt's last tokens are
from those of the unpatched model, beside how far these are from its own with another of PyTorch's back ends of attention.

Speed-ups below 1 are slow-downs, and marked. Exit code: 0 measured; 1 no call was served by a variant, or the patched model
is more than twice as far off as PyTorch's back ends are apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

import torch
import transformers
from exported import machine, race, timed_within, watch
from torch.nn.attention import SDPBackend, sdpa_kernel

import evo.ready

SAMPLE_S = 50e-3
COMPARED = 64
"""Logits are of so many tokens at the prompt's end."""
PARTS = ("prefill", "decode", "step")
PACKAGES = ("rmsnorm", "layernorm", "add_rmsnorm", "add_layernorm", "attention")
LLAMA = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
TINY_LLAMA = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"n_embd": 1024, "n_head": 16, "n_positions": 1024}
TINY_GPT2 = {"vocab_size": 1000, "n_embd": 256, "n_head": 4, "n_positions": 1024, "bos_token_id": 1, "eos_token_id": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("llama", "gpt2"))
    parser.add_argument("--layers", type=int, help="8 of Llama, GPT-2-medium's 24; --tiny: 2")
    parser.add_argument("--prompt", type=int, help="tokens; 2048, of GPT-2 1000")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--attention-gradients", action="store_true", help="attention serves calls that record gradients")
    parser.add_argument("--without", action="append", choices=PARTS, default=[])
    parser.add_argument("--build", action="store_true", help="build the native launchers that are missing")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layers = options.layers or (2 if options.tiny else 8 if options.model == "llama" else 24)
    prompt = options.prompt or (2048 if options.model == "llama" else 1000)
    if min(layers, prompt, options.batch, options.rounds) < 1 or (options.model == "gpt2" and prompt >= 1024):
        raise SystemExit("--layers, --prompt, --batch and --rounds are at least 1, and --prompt of gpt2 at most 1023")
    try:
        place = torch.empty(0, device=options.device).device
    except (RuntimeError, AssertionError) as error:
        raise SystemExit(f"PyTorch has no device {options.device!r} here: {str(error).splitlines()[0]}") from None
    for name in PACKAGES if options.build else ():
        getattr(evo.ready, name).build()
    if options.attention_gradients:
        evo.ready.attention.also_serve(gradients=True)
    model = model_of(options, layers, place)
    ids = torch.randint(0, model.config.vocab_size, (options.batch, prompt + 1), device=place)
    with evo.ready.patch(model) as patch:
        patched = str(patch)
    found: dict[str, Any] = {
        "model": f"{options.model}{', tiny' if options.tiny else ''}, {layers} layers, prompt {options.batch} x {prompt}, "
        f"{options.dtype}",
        "machine": f"{machine(place)}, Transformers {transformers.__version__}",
        "launchers": {name: "native" if frontend_of(name)._call is not None else "Python" for name in PACKAGES},
        "patched": patched.splitlines(),
        "calls": {},
        "timings": {},
    }
    talk: Callable[..., None] = (lambda *_, **__: None) if options.json else print
    talk(found["model"], found["machine"], found["launchers"], patched, sep="\n")
    for part in (part for part in PARTS if part not in options.without):
        run, tokens = WORK[part](model, ids)
        with evo.ready.patch(model):
            run()  # what is compiled or raced at first calls
            with counting() as calls:
                run()
        found["calls"][part] = dict(calls)
        talk(f"\n{part}: calls", *(f"  {number:4} {way}" for way, number in sorted(calls.items())), sep="\n")
        raced = race(
            {
                "plain": timed_within(nullcontext, run, place),
                "patched": timed_within(partial(evo.ready.patch, model), run, place),
            },
            options.rounds, watch(), SAMPLE_S,
        )  # fmt: skip
        for way in ("plain", "patched"):
            timing = raced.timing(way, "plain")
            rate = 1e6 * tokens / timing.us
            found["timings"][f"{part}, {way}"] = {"tokens_per_s": rate, **asdict(timing)}
            talk(f"  {part:8} {way:8} {rate:12.1f} tokens/s{'' if way == 'plain' else f'  {timing.gain} over plain'}"
                 f"{'  SLOWER' if timing.low > 1 else ''}{'  ! disturbed' if timing.disturbed else ''}")  # fmt: skip
        model.zero_grad()
    found["logits"] = apart(model, ids[:, :-1])
    for what, number in found["logits"].items():
        talk(f"{what}: {number:.4g}")
    served = sum(n for calls in found["calls"].values() for way, n in calls.items() if ": variant" in way)
    if not served:
        print("no call of this model was served by a variant: all that was measured is PyTorch", file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=1))
    ours, theirs, largest = found["logits"].values()
    near = ours <= 2 * max(theirs, torch.finfo(model.dtype).eps * largest)
    return 0 if served and near else 1


def model_of(options: argparse.Namespace, layers: int, place: torch.device) -> Any:
    if options.model == "llama":
        config: Any = transformers.LlamaConfig(
            **(TINY_LLAMA if options.tiny else LLAMA), num_hidden_layers=layers, max_position_embeddings=8192
        )
        cls: Any = transformers.LlamaForCausalLM
    else:
        config = transformers.GPT2Config(**(TINY_GPT2 if options.tiny else GPT2), **DRY, n_layer=layers)
        cls = transformers.GPT2LMHeadModel
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, options.dtype))
    try:
        with place:
            return cls(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def frontend_of(name: str) -> Any:
    return import_module(f"evo.ready.{name}.frontend")


Run = Callable[[], object]


def prefill(model: Any, ids: torch.Tensor) -> tuple[Run, int]:
    given = ids[:, :-1]

    def run() -> object:
        with torch.inference_mode():
            return model.eval()(given, use_cache=False, logits_to_keep=1)

    return run, given.numel()


def decode(model: Any, ids: torch.Tensor) -> tuple[Run, int]:
    with torch.inference_mode():
        cache = model.eval()(ids[:, :-1], use_cache=True, logits_to_keep=1).cache

    def run() -> object:
        with torch.inference_mode():
            found = model(ids[:, -1:], cache=cache, use_cache=True)
            cache.crop(-1)
            return found

    return run, len(ids)


def step(model: Any, ids: torch.Tensor) -> tuple[Run, int]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def run() -> object:
        loss = model.train()(ids[:, :-1], labels=ids[:, :-1], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        return loss

    return run, ids[:, :-1].numel()


WORK = {"prefill": prefill, "decode": decode, "step": step}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Which way calls of the packages' functions take."""
    said: Counter[str] = Counter()
    before = []
    for name in PACKAGES:
        frontend = frontend_of(name)
        native = frontend._call is not None
        place = "_call" if native else "served"
        inner = getattr(frontend, place)

        def counted(
            *args: Any, name: str = name, frontend: Any = frontend, native: bool = native, inner: Any = inner
        ) -> Any:
            way = frontend.NATIVE.explain(*args) if native else frontend.explain(*args[1:])
            said[f"{name}: {way}"] += 1
            return inner(*args)

        before.append((frontend, place, inner))
        setattr(frontend, place, counted)
    try:
        yield said
    finally:
        for frontend, place, inner in before:
            setattr(frontend, place, inner)


OURS = "max |logits of the patched model - of the plain one|"
THEIRS = "max |logits of the plain one with math attention - with PyTorch's default|"


def apart(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Largest differences of logits at the prompt's end, and the largest logit."""

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model.eval()(ids, use_cache=False, logits_to_keep=COMPARED).logits.float()
            return found

    plain = logits()
    with sdpa_kernel(SDPBackend.MATH):
        other = logits()
    with evo.ready.patch(model):
        ours = logits()
    pairs = {OURS: ours, THEIRS: other}
    found = {what: (t - plain).abs().max().item() for what, t in pairs.items()}
    return found | {"max |logit|": plain.abs().max().item()}


if __name__ == "__main__":
    sys.exit(main())
