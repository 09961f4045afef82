"""Exported packages with the native launcher on a GPU: operators of PyTorch's with gradients, in graphs, on any stream."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from evo.problem.space import Value
from tests.gpu.conftest import Launched, export
from tests.runtime.conftest import fitting, flash_attentions_rule, is_norm, is_of, own, serve, theirs

pytestmark = pytest.mark.gpu

WORKLOADS = {
    "layernorm": ("rows=64,cols=1024,dtype=float16", "rows=64,cols=1024,dtype=float32"),
    "rmsnorm": ("rows=64,cols=1024,dtype=float16", "rows=64,cols=1024,dtype=float32"),
    "attention": [
        f"batch=2,heads=4,kv_heads=4,q_len=128,kv_len=128,head_dim=64,dtype=float16{kind}"
        for kind in ("", ",causal=true", ",attn_mask=true", ",attn_mask=true,additive=true")
    ],
    "softmax": ("rows=64,cols=1024,dtype=float16", "rows=64,cols=1024,dtype=float32"),
}


@pytest.fixture(scope="module", params=sorted(WORKLOADS))
def loaded(request: pytest.FixtureRequest, launched: Launched, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    out = tmp_path_factory.mktemp("export") / f"{request.param}_natively"
    return launched(export(request.param, out, [(text, {}) for text in WORKLOADS[request.param]]), "native")


@pytest.fixture
def module(loaded: ModuleType) -> Iterator[ModuleType]:
    yield loaded
    serve(loaded)


def arguments(module: ModuleType, *, grad: bool = False, dtype: torch.dtype = torch.float16, device: str = "cuda") -> Any:
    draw = lambda *shape: torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)  # noqa: E731
    if is_of("softmax", module):
        return draw(70, 1024), -1
    if is_norm(module):
        return fitting(module, (draw(70, 1024), (1024,), draw(1024), draw(1024)))
    return tuple(draw(2, 4, 200, 64) for _ in range(3))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.device, a.stride()) == (b.dtype, b.device, b.stride())
    tolerance = 1e-4 if a.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def tensors(args: Any) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor)]


def test_pytorch_finds_nothing_wrong_with_the_operator(module: ModuleType) -> None:
    for grad in (False, True):
        found = torch.library.opcheck(module.frontend.NATIVE.operator, arguments(module, grad=grad))
        assert set(found.values()) == {"SUCCESS"}


def test_recorded_calls_have_pytorchs_gradients(module: ModuleType) -> None:
    args = arguments(module, grad=True)
    assert ("gradients" in module.explain(*args)) is not is_of("softmax", module)
    serve(module, gradients=True)
    assert module.explain(*args).endswith("native launcher")
    results = own(module)(*args), theirs(module)(*args)
    close(*results)
    upstream = torch.randn_like(results[0])
    for a, b in zip(*(torch.autograd.grad(y, tensors(args), upstream) for y in results), strict=True):
        close(a, b)


def test_autocast_gives_what_it_gives_with_pytorch(module: ModuleType) -> None:
    for dtype in (torch.float16, torch.float32):
        args = arguments(module, dtype=dtype)
        with torch.autocast("cuda", torch.float16):
            close(own(module)(*args), theirs(module)(*args))
            close(module.frontend.NATIVE.operator(*args), theirs(module)(*args))
            if is_of("attention", module):
                assert module.explain(*args).startswith("variant")


def test_the_operator_follows_streams_and_is_captured(module: ModuleType) -> None:
    args = arguments(module)
    expected = theirs(module)(*args)
    operator = module.frontend.NATIVE.operator
    close(operator(*args), expected)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # on another stream it would read what is not written yet
        late = args[0].clone()
        result = operator(late, *args[1:])
    side.synchronize()
    close(result, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator(*args)
    for _ in range(2):
        args[0].copy_(torch.randn_like(args[0]))
        captured.zero_()
        graph.replay()
        close(captured, theirs(module)(*args))


def test_a_captured_training_step_learns(module: ModuleType) -> None:
    """Forward and backward in one graph, as PyTorch's make_graphed_callables does it."""
    serve(module, gradients=True)
    args = arguments(module, grad=True)
    leaves = tensors(args)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(own(module)(*args).square().sum(), leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(own(module)(*args).sum(), leaves)
    graph.replay()
    for a, b in zip(found, torch.autograd.grad(theirs(module)(*args).sum(), leaves), strict=True):
        close(a, b)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # importing the compiler warns of itself
def test_a_compiled_graph_holds_the_operator_and_replays(module: ModuleType) -> None:
    module.also_serve(compiled=True)
    args = arguments(module)
    seen: set[Any] = set()

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        seen.update(node.target for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch.compiler.reset()
    compiled = torch.compile(lambda x, *rest: own(module)(x * 2, *rest), backend=backend, fullgraph=True)
    close(compiled(*args), theirs(module)(args[0] * 2, *args[1:]))
    assert module.frontend.NATIVE.operator in seen


@pytest.mark.parametrize("loaded", ["rmsnorm"], indirect=True)
def test_every_variant_of_rms_norm_passes_its_own_check(loaded: ModuleType) -> None:
    """What no eps means in float16 is decided here, too."""
    for index in range(len(loaded.variants())):
        verdicts = list(importlib.import_module(f"{loaded.__name__}.runtime.trial").verdicts(loaded.frontend, index, 7))
        assert [v for v in verdicts if v.reason] == []
        assert sum(v.on_variant for v in verdicts) >= 20


@pytest.mark.parametrize("loaded", ["attention"], indirect=True)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shipped", [False, True])
def test_errors_with_masks_follow_flash_attentions_rule(loaded: ModuleType, additive: bool, shipped: bool) -> None:
    module = importlib.import_module("evo.ready.attention") if shipped else loaded
    module.also_serve(measure=False, slower=True)
    flash_attentions_rule(module, torch.float16, torch.device("cuda", 0), additive=additive)


# -- a forward with its backward ----------------------------------------------------------------------------------

DTYPES = (torch.float16, torch.float32)


@pytest.fixture(scope="module", params=["launch", "last_block"])
def trained(request: pytest.FixtureRequest, launched: Launched, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Its sums over the rows are finished by a second launch, or by the block that ends last."""
    texts = [f"rows=4096,cols=1024,dtype={str(dtype).removeprefix('torch.')}" for dtype in DTYPES]
    forward = [(f"{text},rstd=true", dict[str, Value]()) for text in texts]
    backward = [(text, {"finish": str(request.param)}) for text in texts]
    out = tmp_path_factory.mktemp("export") / f"rmsnorm_trained_by_{request.param}"
    return launched(export("rmsnorm", out, forward, backward), "native")


def step(module: ModuleType, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The result and the gradients of a call that variants serve in both passes."""
    args = x, (1024,), weight, 1e-5
    assert module.explain(*args).endswith("native launcher"), module.explain(*args)
    result = module.rms_norm(*args)
    return result.detach(), *torch.autograd.grad(result, (x, weight), dy)


def drawn(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, weight, dy = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((rows, 1024), 1024, (rows, 1024)))
    return x.requires_grad_(), weight.requires_grad_(), dy


def check(
    module: ModuleType, found: tuple[torch.Tensor, ...], x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> None:
    """Errors of the gradients are at most twice PyTorch's, which in float32 may be those of any order of summation."""
    result, *own = found
    close(result, theirs(module)(x, (1024,), weight, 1e-5).detach())
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.autograd.grad(theirs(module)(wide[0], (1024,), wide[1], 1e-5), wide, dy.double())
    rstd = (wide[0].detach().square().mean(1, keepdim=True) + 1e-5).rsqrt().float()
    pytorchs = module.backward.frontend.comparable(dy, x.detach(), (1024,), rstd, weight.detach(), [True, True])
    for gradients in zip(own, pytorchs, exact, strict=True):
        error, its = ((t.double() - gradients[2]).abs().max().item() for t in gradients[:2])
        assert error <= 2 * its


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 70, 4099])
def test_gradients_by_a_backward_are_within_twice_pytorchs_errors(
    trained: ModuleType, rows: int, dtype: torch.dtype
) -> None:
    tensors = drawn(rows, dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        found = step(trained, *tensors)
    assert not {event.name for event in profile.events()} & {"aten::rms_norm", "aten::_fused_rms_norm"}
    check(trained, found, *tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_step_reads_what_is_there_at_each_replay(trained: ModuleType, dtype: torch.dtype) -> None:
    tensors, side = drawn(4099, dtype), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(trained, *tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(trained, *tensors)
    for _ in range(3):
        for t in tensors:
            t.detach().copy_(torch.randn_like(t))
        for t in found:
            t.fill_(torch.nan)
        graph.replay()
        check(trained, found, *tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, step(trained, *tensors), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_by_a_backward_repeat_to_the_last_bit(trained: ModuleType, dtype: torch.dtype) -> None:
    tensors = drawn(4099, dtype)
    first = step(trained, *tensors)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(step(trained, *tensors), first, strict=True))
