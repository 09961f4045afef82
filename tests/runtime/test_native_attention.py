"""Attention's exported package, launched from Python and natively: PyTorch's results, gradients and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.export import find_exporter
from tests.export.exports import request_for

pytestmark = pytest.mark.slow

torchs = functional.scaled_dot_product_attention


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "exported_attention"
    sizes = "batch=2,heads=4,kv_heads=4,q_len=128,kv_len=128,head_dim=64"
    workloads = (f"{sizes},dtype=float32", f"{sizes},dtype=float32,causal=true", f"{sizes},dtype=bfloat16")
    find_exporter("module").export(request_for("cpu", "native", out, *workloads, kernel="attention"))
    return out


@pytest.fixture(scope="module")
def attention(folder: Path, launchers: Path, use: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVO_KERNELS_CACHE", str(launchers))
        module = use(folder)
        module.build()
        yield module


@pytest.fixture(autouse=True)
def as_at_first(attention: ModuleType) -> Iterator[None]:
    torch.manual_seed(0)
    yield
    attention.also_serve(gradients=False, compiled=False)


def qkv(
    *, heads: int = 4, kv_heads: int = 4, q_len: int = 70, kv_len: int = 70, dim: int = 64, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, dtype = options.get("grad", False), options.get("dtype", torch.float32)
    shapes = ((2, heads, q_len, dim), (2, kv_heads, kv_len, dim), (2, kv_heads, kv_len, dim))
    q, k, v = (torch.randn(s).to(dtype).requires_grad_(grad) for s in shapes)
    return q, k, v


def close(own: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 3e-2 if own.dtype == torch.bfloat16 else 1e-4
    assert (own.dtype, own.stride()) == (theirs.dtype, theirs.stride())
    torch.testing.assert_close(own, theirs, rtol=tolerance, atol=tolerance)


SERVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"is_causal": True}),
    ({"q_len": 33, "kv_len": 129}, {"scale": 0.3}),
    ({"kv_heads": 2}, {"enable_gqa": True}),
    ({"dtype": torch.bfloat16}, {"scale": 1}),
]
LEFT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("four dimensions", {"three": True}, {}),
    ("there is a mask", {}, {"attn_mask": torch.zeros(70, 70)}),
    ("not a bool", {}, {"is_causal": 1}),
    ("scale is not", {}, {"scale": 0.0}),
    ("scale is not", {}, {"scale": 10**400}),
    ("unequal lengths", {"q_len": 5}, {"is_causal": True}),
    ("not tuned", {"dim": 40}, {}),
    ("float64 is not", {"dtype": torch.float64}, {}),
    ("gradients", {"grad": True}, {}),
]


@pytest.mark.parametrize(("sizes", "options"), SERVED)
def test_what_a_variant_serves(attention: ModuleType, sizes: dict[str, Any], options: dict[str, Any]) -> None:
    q, k, v = qkv(**sizes)
    own, expected = attention.scaled_dot_product_attention(q, k, v, **options), torchs(q, k, v, **options)
    assert attention.explain(q, k, v, **options).endswith("native launcher")
    close(own, expected)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as projections give it
    own, expected = attention.scaled_dot_product_attention(q, k, v, **options), torchs(q, k, v, **options)
    # Heads that share keys: PyTorch 2.6 computes them elsewhere, and its result is in another order.
    close(own, torch.empty_like(own).copy_(expected) if "enable_gqa" in options else expected)


@pytest.mark.parametrize(("reason", "sizes", "options"), LEFT)
def test_what_is_left_to_pytorch(
    attention: ModuleType, reason: str, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    q, k, v = qkv(**{n: s for n, s in sizes.items() if n != "three"})
    if "three" in sizes:
        q, k, v = q[0], k[0], v[0]
    assert reason in attention.explain(q, k, v, **options)
    try:
        expected = torchs(q, k, v, **options)
    except Exception as error:
        with pytest.raises(type(error)):
            attention.scaled_dot_product_attention(q, k, v, **options)
    else:
        own = attention.scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(own, expected, equal_nan=True)


def test_every_variant_passes_its_own_check_through_it(attention: ModuleType) -> None:
    verdicts_of = import_module(f"{attention.__name__}.runtime.trial").verdicts
    for index in range(len(attention.variants())):
        verdicts = list(verdicts_of(attention.frontend, index, seed=3))
        assert [v for v in verdicts if v.reason] == []
        assert sum(v.on_variant for v in verdicts) >= 15


@pytest.mark.parametrize(("sizes", "options"), [*SERVED, ({"dtype": torch.float64}, {}), ({"dim": 40}, {})])
def test_pytorch_finds_nothing_wrong_with_the_operator(
    attention: ModuleType, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    tests = torch.library.opcheck(attention.frontend.NATIVE.operator, qkv(grad=True, **sizes), options)
    assert set(tests.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("sizes", "options"), SERVED)
def test_recorded_calls_have_pytorchs_gradients(
    attention: ModuleType, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    args = qkv(grad=True, **sizes)
    attention.also_serve(gradients=True)
    assert attention.explain(*args, **options).startswith("variant")
    own, expected = attention.scaled_dot_product_attention(*args, **options), torchs(*args, **options)
    close(own, expected)
    upstream = torch.randn_like(own)
    for a, b in zip(*(torch.autograd.grad(y, args, upstream) for y in (own, expected)), strict=True):
        close(a, b)
    some = torch.autograd.grad(attention.scaled_dot_product_attention(*args, **options), args[1:2], upstream)
    close(some[0], torch.autograd.grad(torchs(*args, **options), args[1:2], upstream)[0])


def test_gradients_can_be_differentiated_where_pytorchs_can(attention: ModuleType) -> None:
    attention.also_serve(gradients=True)
    args = qkv(grad=True, q_len=3, kv_len=3)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = []
        for function in (attention.scaled_dot_product_attention, torchs):
            first = torch.autograd.grad(function(*args).square().mean(), args, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), args))
    for a, b in zip(*found, strict=True):
        close(a, b)


def test_autocast_is_pytorchs_and_served(attention: ModuleType) -> None:
    args = qkv(grad=True)
    attention.also_serve(gradients=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert "bfloat16" in attention.explain(*args)
        expected = torchs(*args)
        for function in (attention.scaled_dot_product_attention, attention.frontend.NATIVE.operator):
            own = function(*args)
            close(own, expected)
            for a, b in zip(*(torch.autograd.grad(y.sum(), args, retain_graph=True) for y in (own, expected)), strict=True):
                torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_has_pytorchs_operation_or_the_operator(attention: ModuleType, dynamic: bool) -> None:
    operator = attention.frontend.NATIVE.operator

    def graph_of(*args: torch.Tensor) -> tuple[set[Any], torch.Tensor]:
        seen: set[Any] = set()

        def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
            seen.update(node.target for node in graph.graph.nodes)
            return torch._dynamo.lookup_backend("aot_eager")(graph, example)

        torch.compiler.reset()
        f = lambda q, k, v: attention.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1  # noqa: E731
        return seen, torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)(*args)

    args = qkv(grad=True)
    expected = torchs(args[0] * 2, *args[1:], is_causal=True) + 1
    assert operator not in graph_of(*args)[0]
    attention.also_serve(compiled=True)
    assert operator not in graph_of(*args)[0]
    attention.also_serve(gradients=True)
    seen, own = graph_of(*args)
    assert operator in seen
    close(own, expected)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), args) for y in (own, expected)), strict=True):
        close(a, b)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_are_those_of_pytorchs_function(attention: ModuleType) -> None:
    q, k, v = qkv()
    for function in (attention.scaled_dot_product_attention, attention.frontend.NATIVE.operator):
        batched = torch.func.vmap(function)(q[:, None], k[:, None], v[:, None])
        torch.testing.assert_close(batched[:, 0], torchs(q, k, v), rtol=1e-4, atol=1e-4)
        found = [torch.func.grad(lambda q, f=f: f(q, k, v).square().sum())(q) for f in (function, torchs)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_the_operator_says_what_it_takes(attention: ModuleType) -> None:
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="this operator takes"):
        attention.frontend.NATIVE.operator(q[0], k[0], v[0])


def test_models_that_call_pytorchs_function_meet_it(attention: ModuleType) -> None:
    mix = torch.nn.MultiheadAttention(256, 4, batch_first=True).requires_grad_(False)
    x, calls = torch.randn(2, 9, 256), []
    expected = mix(x, x, x, need_weights=False)[0]
    call = attention.frontend._call
    attention.frontend._call = lambda *a: calls.append(1) or call(*a)
    try:
        with attention.patch():
            assert functional.scaled_dot_product_attention is attention.scaled_dot_product_attention
            torch.testing.assert_close(mix(x, x, x, need_weights=False)[0], expected, rtol=1e-4, atol=1e-4)
    finally:
        attention.frontend._call = call
    assert calls
    assert functional.scaled_dot_product_attention is torchs
