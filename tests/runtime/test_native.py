"""The native launcher of LayerNorm: an operator of PyTorch's, with gradients, in graphs, under every transform."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional

pytestmark = pytest.mark.slow

Args = tuple[Any, ...]
PYTORCHS_OWN = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
"""Its forward-mode rules are scripts, which it warns of."""


@pytest.fixture(autouse=True)
def as_at_first(native: ModuleType) -> Iterator[None]:
    torch.manual_seed(0)
    yield
    native.also_serve(gradients=False, compiled=False)


@pytest.fixture
def operator(native: ModuleType) -> Any:
    return native.frontend.NATIVE.operator


def rows(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return (2 * torch.randn(shape) + 1).to(dtype).requires_grad_(grad)


CALLS: list[Callable[[], Args]] = [
    lambda: (rows(5, 96, grad=True), (96,), rows(96, grad=True), rows(96, grad=True), 1e-5),
    lambda: (rows(5, 96, grad=True), (96,), None, rows(96, grad=True), 1e-3),
    lambda: (rows(5, 96, grad=True), (96,), rows(96, grad=True), None, 1e-5),
    lambda: (rows(5, 96), (96,), rows(96, grad=True), rows(96), 1e-5),
    lambda: (rows(2, 3, 4, 24, grad=True), [4, 24]),
    lambda: (rows(96, 5).t().requires_grad_(), (96,), rows(96), rows(96)),
    lambda: (rows(7, 256, dtype=torch.bfloat16, grad=True), (256,), rows(256, dtype=torch.bfloat16, grad=True)),
    lambda: (rows(5, 96, dtype=torch.float64, grad=True), (96,), rows(96, dtype=torch.float64, grad=True)),
    lambda: (rows(5, 96), (96,)),
]


def tensors(args: Args) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]


def close(own: torch.Tensor, torchs: torch.Tensor) -> None:
    tolerance = 3e-2 if own.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(own, torchs, rtol=tolerance, atol=tolerance)


def test_calls_go_through_it_and_say_so(native: ModuleType) -> None:
    assert native.frontend._call is not None
    assert native.frontend.NATIVE.reason == ""
    assert native.explain(rows(5, 96), (96,)).endswith("native launcher")


def test_every_variant_passes_its_own_check_through_it(native: ModuleType) -> None:
    verdicts_of = import_module(f"{native.__name__}.runtime.trial").verdicts
    for index in range(len(native.variants())):
        verdicts = list(verdicts_of(native.frontend, index, seed=3))
        assert [v for v in verdicts if v.reason] == []
        assert sum(v.on_variant for v in verdicts) >= 20
        assert all(f"variant {index} " in v.path for v in verdicts if v.on_variant)


@pytest.mark.parametrize("make", CALLS)
def test_pytorch_finds_nothing_wrong_with_the_operator(operator: Any, make: Callable[[], Args]) -> None:
    found = torch.library.opcheck(operator, make())
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("make", CALLS)
def test_recorded_calls_have_pytorchs_gradients(native: ModuleType, make: Callable[[], Args]) -> None:
    args = make()
    wanted = tensors(args)
    served = args[0].dtype != torch.float64
    assert native.explain(*args).startswith("PyTorch" if wanted or not served else "variant")
    native.also_serve(gradients=True)
    assert native.explain(*args).startswith("variant" if served else "PyTorch")
    own, torchs = native.layer_norm(*args), functional.layer_norm(*args)
    assert own.requires_grad is torchs.requires_grad is bool(wanted)
    close(own, torchs)
    if wanted:
        upstream = torch.randn_like(own)
        for a, b in zip(*(torch.autograd.grad(y, wanted, upstream) for y in (own, torchs)), strict=True):
            assert torch.equal(a, b)  # PyTorch's own backward pass, of the same mean and deviation


def test_the_numbers_agree_that_the_gradients_are_right(native: ModuleType) -> None:
    native.also_serve(gradients=True)
    x, w, b = rows(3, 8, grad=True), rows(8, grad=True), rows(8, grad=True)
    single = lambda x, w, b: native.layer_norm(x, (8,), w, b, 1e-2)  # noqa: E731
    assert native.explain(x, (8,), w, b, 1e-2).startswith("variant")
    with pytest.warns(UserWarning, match="not of double precision"):
        assert torch.autograd.gradcheck(single, (x, w, b), eps=1e-2, atol=2e-2, rtol=1e-2)
    grad = torch.autograd.grad(single(x, w, b).square().sum(), x, create_graph=True)[0]
    twice = torch.autograd.grad(grad.square().sum(), (x, w))
    grad = torch.autograd.grad(functional.layer_norm(x, (8,), w, b, 1e-2).square().sum(), x, create_graph=True)[0]
    for a, c in zip(twice, torch.autograd.grad(grad.square().sum(), (x, w)), strict=True):
        close(a, c)
    double = tuple(t.detach().double().requires_grad_() for t in (x, w, b))
    assert torch.autograd.gradcheck(single, double)
    assert torch.autograd.gradgradcheck(single, double)


def graph_of(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[set[Any], Any]:
    """What torch.compile sees in one graph, and what comes of it."""
    seen: set[Any] = set()

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        seen.update(node.target for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    return seen, compiled(*args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_has_pytorchs_operation_or_the_operator(
    native: ModuleType, operator: Any, dynamic: bool
) -> None:
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return native.layer_norm(x * 2, (96,), w) + 1  # type: ignore[no-any-return]

    x, w = rows(6, 96), rows(96)
    expected = functional.layer_norm(x * 2, (96,), w) + 1
    seen, result = graph_of(block, x, w, dynamic=dynamic)
    assert operator not in seen
    close(result, expected)
    native.also_serve(compiled=True)
    seen, result = graph_of(block, x, w, dynamic=dynamic)
    assert operator in seen
    close(result, expected)
    w.requires_grad_()
    assert operator not in graph_of(block, x, w, dynamic=dynamic)[0]
    native.also_serve(gradients=True)
    seen, result = graph_of(block, x, w, dynamic=dynamic)
    assert operator in seen
    (own,) = torch.autograd.grad(result.sum(), w)
    close(own, torch.autograd.grad((functional.layer_norm(x * 2, (96,), w) + 1).sum(), w)[0])


def test_what_nothing_is_tuned_for_is_not_the_operator_in_a_graph(native: ModuleType, operator: Any) -> None:
    native.also_serve(compiled=True)
    seen, _ = graph_of(lambda x: native.layer_norm(x, (96,)), rows(6, 96, dtype=torch.float64))
    assert operator not in seen


def test_an_exported_program_holds_the_operator(native: ModuleType, operator: Any) -> None:
    native.also_serve(compiled=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 96), native.LayerNorm(96)).eval().requires_grad_(False)
    x = rows(4, 8)
    program = torch.export.export(model, (x,), strict=True)
    assert any(node.target is operator for node in program.graph.nodes)
    close(program.module()(x), model(x))


TRANSFORMS: list[Callable[[Callable[..., torch.Tensor]], Any]] = [
    lambda f: torch.func.vmap(f)(torch.arange(480.0).view(5, 96).cos()),
    lambda f: torch.func.grad(lambda x: f(x).square().sum())(torch.arange(96.0).cos()),
    lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.arange(480.0).view(5, 96).cos()),
    lambda f: torch.func.jvp(f, (torch.arange(96.0).cos(),), (torch.ones(96),))[1],
    lambda f: torch.func.jacrev(f)(torch.arange(96.0).cos()),
]


@PYTORCHS_OWN
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_those_of_pytorchs_function(native: ModuleType, operator: Any, transform: Any) -> None:
    native.also_serve(gradients=True)
    weight = rows(96)
    expected = transform(lambda x: functional.layer_norm(x, (96,), weight))
    for function in (native.layer_norm, operator):
        close(transform(lambda x, f=function: f(x, (96,), weight)), expected)


@PYTORCHS_OWN
def test_forward_mode_and_autocast_are_pytorchs(native: ModuleType, operator: Any) -> None:
    x = rows(4, 96)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert "forward-mode" in native.explain(dual, (96,))
        expected = forward_ad.unpack_dual(functional.layer_norm(dual, (96,))).tangent
        for function in (native.layer_norm, operator):
            close(forward_ad.unpack_dual(function(dual, (96,))).tangent, expected)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            expected = functional.layer_norm(x.to(dtype), (96,))
            for function in (native.layer_norm, operator):
                result = function(x.to(dtype), (96,))
                assert result.dtype == expected.dtype
                close(result, expected)


def test_the_operator_takes_what_no_variant_does(operator: Any) -> None:
    for x in (rows(4, 96, dtype=torch.float16), rows(0, 96), torch._neg_view(rows(4, 96)), rows(4, 192)[:, ::2]):
        close(operator(x, (96,)), functional.layer_norm(x, (96,)))
    assert operator(torch.empty(4, 96, device="meta"), (96,)).shape == (4, 96)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        operator(rows(4, 96), (95,))


def test_threads_share_it(native: ModuleType) -> None:
    faults: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for i in range(200):
                x = torch.full((1 + seed, 96 + i % 7), float(seed)).cumsum(1)
                close(native.layer_norm(x, (x.shape[1],)), functional.layer_norm(x, (x.shape[1],)))
                if i % 20 == seed:
                    native.frontend.DISPATCH.clear()
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_variant_that_fails_is_not_tried_again(native: ModuleType) -> None:
    x, dispatch = rows(3, 96), native.frontend.DISPATCH
    loaded = dict(dispatch._loaded)
    native.layer_norm(x, (96,))
    dispatch.retire(0, -1, "a launch failed")
    assert "a launch failed" in native.explain(x, (96,))
    assert torch.equal(native.layer_norm(x, (96,)), functional.layer_norm(x, (96,)))
    dispatch._loaded.clear()
    dispatch._loaded.update(loaded)
    dispatch.clear()
    assert native.explain(x, (96,)).startswith("variant 0")


def test_a_profiler_sees_its_calls(native: ModuleType, operator: Any) -> None:
    with torch.autograd.profiler.profile() as profile:
        native.layer_norm(rows(5, 96), (96,))
    assert operator.name() in {event.name for event in profile.function_events}


def test_arguments_are_counted(native: ModuleType) -> None:
    with pytest.raises(TypeError, match="5 arguments are wanted"):
        native.frontend._call(rows(3, 96))
