"""Shipped kernels on a GPU: a source is compiled at its first call, right, and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ended import run_python

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys, time
from importlib import import_module
import torch
import evo.runtime.nvrtc as nvrtc
from evo.runtime.choice import in_order

package = import_module(f"evo.ready.{name}")
frontend, dispatch = package.frontend, package.frontend.DISPATCH
package.also_serve(slower=True, measure=False, wait=True)
variant = in_order(dispatch.package.variants, 0)[0]
args = frontend.timed(dict(variant.sizes), getattr(torch, variant.dtype), torch.device("cuda", 0), 0)
compile, compiled = nvrtc.Compiler.compile, []
nvrtc.Compiler.compile = lambda self, *options: (compiled.append(1), compile(self, *options))[1]
expected = frontend.ORIGINAL(*args)
torch.cuda.synchronize()
began = time.perf_counter()
result = frontend.SUBJECT(*args)
torch.cuda.synchronize()
seconds = time.perf_counter() - began
close = torch.allclose(result, expected, atol=3e-2, rtol=3e-2)
print(json.dumps([package.explain(*args), bool(close), len(compiled), seconds]))
"""


def first_call(name: str, cache: Path) -> Any:
    """(way, right, compilations, seconds), in a process of its own."""
    own = {"EVO_KERNELS_CACHE": str(cache / "kernels"), "PYTHONPATH": str(ROOT)}
    done = run_python(cache, "-W", "ignore", "-c", PROGRAM.replace("{name}", name), timeout_s=250, **own)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["attention", "layernorm"])
def test_the_first_call_compiles_it_and_later_processes_find_it(name: str, tmp_path: Path) -> None:
    first, second = (first_call(name, tmp_path) for _ in range(2))
    print(f"{name}: first call {first[3]:.3f} s with an empty cache, {second[3]:.3f} s with a full one")
    assert first[0].startswith("variant ")
    assert first[0] == second[0]
    assert first[1]
    assert second[1]
    assert (first[2], second[2]) == (1, 0)
    assert [p.name.partition("-")[0] for p in (tmp_path / "kernels").iterdir()] == ["compiled"]


SAME_BITS = """
import json, sys
from importlib import import_module
import torch
from torch.utils.checkpoint import checkpoint

package = import_module("evo.ready.{name}")
own, launcher = package.frontend.SUBJECT, "{launcher}"
if launcher == "native":
    package.build()
if "{name}" in ("attention",):
    package.also_serve(gradients=True, wait=True)
sizes = [(4096, 1024), (32, 4096), (2048, 2048), (300, 4096), (4096, 1536), (4096, 4096), (48, 4096)]
lengths = [(2, 8, 512, 64), (1, 8, 100, 128), (4, 16, 1024, 64)]
served = []
for dtype in (torch.float16, torch.bfloat16):
    for size in lengths if "{name}" == "attention" else sizes:
        draw = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)
        if "{name}" == "attention":
            args = [draw(*size) for _ in range(3)] + [None, 0.0, False, None, False]
        elif "{name}" == "softmax_forward":
            args = [draw(*size), -1]
        else:
            vectors = [draw(size[1]) for _ in range(2 if "{name}" == "layernorm" else 1)]
            args = [draw(*size), (size[1],), *vectors, 1e-5]
        for t in args:
            if isinstance(t, torch.Tensor):
                t.requires_grad_()
        leaves = [t for t in args if isinstance(t, torch.Tensor)]
        held = leaves[1:] if "{name}" == "attention" else leaves  # PyTorch's gradient of q differs from call to call
        way = package.explain(*args)
        result = own(*args)
        with torch.no_grad():
            plain, plain_way = own(*args), package.explain(*args)
        if way.startswith("variant") or plain_way.startswith("PyTorch"):
            assert torch.equal(plain, result), (size, dtype, way, plain_way)
            found = []
            for around in (own, lambda *a: checkpoint(own, *a, use_reentrant=True)):
                around(*args).float().square().sum().backward()
                found.append([t.grad for t in held])
                for t in leaves:
                    t.grad = None
            assert all(torch.equal(a, b) for a, b in zip(*found)), (size, dtype, way)
        served.append(way.startswith("variant"))
        print(size, dtype, "recorded:", way, "| not:", plain_way, file=sys.stderr)
print(json.dumps(served))
"""


@pytest.mark.parametrize("launcher", ["Python", "native"])
@pytest.mark.parametrize("name", ["attention", "layernorm", "rmsnorm", "softmax_forward"])
def test_a_call_has_the_same_bits_whether_or_not_it_records_gradients(name: str, launcher: str, tmp_path: Path) -> None:
    own = {"EVO_KERNELS_CACHE": str(tmp_path / "kernels"), "PYTHONPATH": str(ROOT)}
    program = SAME_BITS.replace("{name}", name).replace("{launcher}", launcher)
    done = run_python(tmp_path, "-W", "ignore", "-c", program, timeout_s=280, **own)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    assert sum(json.loads(done.stdout.splitlines()[-1])) >= 4, done.stderr
