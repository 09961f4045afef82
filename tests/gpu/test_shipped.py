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
package.also_serve(slower=True, measure=False)
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
