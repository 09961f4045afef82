"""A call has the same bits whether or not it records gradients, so that checkpoints change no gradient."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from evo.export import ExportRequest, find_exporter
from evo.problem.genome import Genome
from tests.export.exports import request_for
from tests.runtime.conftest import Importer, is_of, is_trained, own, theirs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")]

NORMS = {"layernorm": "mean=true,rstd=true", "rmsnorm": "rstd=true"}
ROWS = (1, 33, 64, 1500, 4096)
"""Near what the forward was tuned for with statistics, without them, or in neither way."""


def request(kernel: str, out: Path, *problems: tuple[str, dict[str, Any]]) -> ExportRequest:
    """Of problems, each with what its genome has other than the default one: results differ in the last place."""
    found = request_for("cpu", "native", out, *(workload for workload, _ in problems), kernel=kernel)
    items = [
        replace(item, genome=Genome.of({**item.genome.parameters, **other}))
        for item, (_, other) in zip(found.items, problems, strict=True)
    ]
    return replace(found, items=tuple(items))


def of_norm(kernel: str, out: Path) -> Path:
    """Without statistics tuned at 64 and at 4096 rows, with them at 64 alone; and the backward."""
    few, many = ("rows=64,cols=96,dtype=float32", "rows=4096,cols=96,dtype=float32")
    narrow, wide = {"simd_bits": 128, "unroll": 1}, {"simd_bits": 128, "unroll": 4}
    forward = request(kernel, out, (few, narrow), (f"{few},{NORMS[kernel]}", {}), (many, wide))
    find_exporter("module").export(forward, request(f"{kernel}_backward", out, (few, {})))
    return out


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    exported: Path,
    exported_rmsnorm: Path,
    exported_softmax: Path,
    exported_attention: Path,
) -> dict[str, Path]:
    made = {f"trained {kernel}": of_norm(kernel, tmp_path_factory.mktemp("same") / f"same_{kernel}") for kernel in NORMS}
    others = {"softmax": exported_softmax, "attention": exported_attention}
    return {**made, "layernorm": exported, "rmsnorm": exported_rmsnorm, **others}


@pytest.fixture(scope="module", params=["native", "Python"])
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    scope="module", params=["trained layernorm", "trained rmsnorm", "layernorm", "rmsnorm", "softmax", "attention"]
)
def loaded(
    request: pytest.FixtureRequest,
    launcher: str,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    natively: Importer,
    use: Importer,
    raced: object,
) -> ModuleType:
    folder = folders[request.param]
    if launcher == "native":
        return natively(folder)
    name = f"python_{request.param.replace(' ', '_')}"
    return use(Path(shutil.copytree(folder, tmp_path_factory.mktemp("python") / name)))


@pytest.fixture
def module(loaded: ModuleType, launcher: str) -> Iterator[ModuleType]:
    """Serving calls that record gradients, for which some packages have to be asked."""
    torch.manual_seed(0)
    if not is_trained(loaded) and not is_of("softmax", loaded):
        loaded.also_serve(gradients=True)
    yield loaded
    loaded.also_serve(compiled=False)


def arguments(module: ModuleType, rows: int = 64) -> tuple[Any, ...]:
    """Of a call; tensors record no gradients."""
    if is_of("attention", module):
        return (*(torch.randn(2, 4, min(rows, 128), 64) for _ in range(3)), torch.randn(min(rows, 128), min(rows, 128)))
    x = torch.randn(rows, 96) * (1 + torch.rand(rows, 1)) + 1
    if is_of("softmax", module):
        return x, -1
    vectors = [torch.randn(96) + 1 for _ in range(2 if is_of("layernorm", module) else 1)]
    return x, (96,), *vectors, 1e-5


def recording(call: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in call)


@pytest.mark.parametrize("rows", ROWS)
def test_a_call_has_the_same_bits_whether_or_not_it_records_gradients(module: ModuleType, launcher: str, rows: int) -> None:
    call = arguments(module, rows)
    recorded = recording(call)
    way = module.explain(*recorded)
    assert way.startswith("variant")
    assert way.endswith(f"{launcher} launcher")
    assert module.explain(*call) == way
    result = own(module)(*recorded)
    assert result.requires_grad
    assert torch.equal(own(module)(*call), result)
    with torch.no_grad():
        assert torch.equal(own(module)(*recorded), result)
    with torch.inference_mode():
        assert torch.equal(own(module)(*call), result)
    torch.testing.assert_close(result, theirs(module)(*recorded), rtol=1e-4, atol=1e-4)


class Block(torch.nn.Module):
    """The function between two layers, with parameters of its own."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        x, *rest = arguments(module)
        self.module, size = module, x.shape[-1]
        self.first, self.last = torch.nn.Linear(size, size), torch.nn.Linear(size, 3)
        self.own = torch.nn.ParameterList(t for t in rest if isinstance(t, torch.Tensor))
        self.rest = rest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors = iter(self.own)
        rest = [next(tensors) if isinstance(t, torch.Tensor) else t for t in self.rest]
        return self.last(own(self.module)(self.first(x), *rest))


def step(block: Block, x: torch.Tensor, around: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """The result and all gradients."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    result = around(block, x)
    result.float().square().sum().backward()
    return [result, *(t.grad for t in (x, *block.parameters()) if t.grad is not None)]


def plainly(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_checkpoint_changes_no_bit_of_results_and_gradients(
    module: ModuleType, autocast: bool, reentrant: bool
) -> None:
    block, (x, *_) = Block(module), arguments(module)

    def within(block: Block, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(block, x, use_reentrant=reentrant)
        return found

    with torch.autocast("cpu", enabled=autocast):
        expected, found = step(block, x, plainly), step(block, x, within)
    assert len(found) == len(expected) == 2 + len(list(block.parameters()))
    for ours, plain in zip(found, expected, strict=True):
        assert torch.equal(ours, plain)


def test_gradients_are_pytorchs_and_can_be_differentiated(module: ModuleType) -> None:
    call, found = recording(arguments(module, 33)), []
    leaves = [t for t in call if isinstance(t, torch.Tensor)]
    for function in (own(module), theirs(module)):
        first = torch.autograd.grad(function(*call).square().sum(), leaves, create_graph=True)
        found.append((*first, *torch.autograd.grad(sum(t.square().sum() for t in first), leaves)))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-3)


def test_a_raced_problem_has_the_same_bits_in_both_ways(module: ModuleType) -> None:
    module.also_serve(measure=True, slower=True)
    try:
        call = arguments(module, 200)
        recorded = recording(call)
        ends = time.monotonic() + 60
        # A race that a busy machine disturbs is held again, and decides later: of the backward later than of the forward,
        # and until then recorded calls are PyTorch's.
        while True:
            told = [module.explain(*call), module.explain(*recorded)]
            plain, result = own(module)(*call), own(module)(*recorded)
            stays = told == [module.explain(*call), module.explain(*recorded)]
            if stays and (told[0] == told[1] or time.monotonic() > ends):
                break
            assert time.monotonic() < ends + 60, f"what serves the call never stays: {told}"
            time.sleep(0.1)
        assert told[0] == told[1] or (is_trained(module) and told[1] == "PyTorch: no variant of the backward serves it")
        for way, found, args in zip(told, (plain, result), (call, recorded), strict=True):
            if way.startswith("PyTorch"):  # its own results for the two calls may differ in the last place
                assert torch.equal(found, theirs(module)(*args))
        if not told[1].startswith("PyTorch"):
            assert torch.equal(plain, result)
    finally:
        module.also_serve(measure=False, slower=False)


def test_a_compiled_call_has_the_same_bits_as_an_eager_one(module: ModuleType, launcher: str) -> None:
    if launcher == "Python":
        pytest.skip("graphs hold the native launcher's operator alone")
    module.also_serve(compiled=True, **({} if is_of("softmax", module) else {"gradients": True}))
    torch.compiler.reset()
    compiled = torch.compile(lambda *args: own(module)(*args), backend="aot_eager", fullgraph=True)
    call = arguments(module)
    recorded = recording(call)
    found = compiled(*recorded)
    assert found.requires_grad
    assert torch.equal(found, own(module)(*call))
    with torch.no_grad():
        assert torch.equal(compiled(*recorded), found)
    leaves = [t for t in recorded if isinstance(t, torch.Tensor)]
    both = (torch.autograd.grad(y.square().sum(), leaves) for y in (found, theirs(module)(*recorded)))
    for ours, torchs in zip(*both, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
