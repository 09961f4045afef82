"""The native launcher of every kernel: an operator of PyTorch's, with gradients, in graphs, under every transform."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.runtime.conftest import TRAINED, flash_attentions_rule, is_norm, is_of, layer, of, own, serve, theirs

pytestmark = pytest.mark.slow

Args = tuple[Any, ...]
Options = dict[str, Any]
PYTORCHS_OWN = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
"""Its forward-mode rules are scripts, which it warns of."""


def test_new_sizes_are_arithmetic_and_no_table_grows_with_them(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = native.frontend.DISPATCH
    monkeypatch.setattr(importlib.import_module(type(dispatch).__module__), "_MOST_ENTRIES", 50)
    dispatch.clear()
    for count in range(1, 100):
        x = rows(count, 96)
        torch.testing.assert_close(native.layer_norm(x, (96,)), functional.layer_norm(x, (96,)))
    assert len(dispatch) <= len(dispatch.variants())  # each variant was asked for once
    for count in range(1, 100):
        assert not isinstance(dispatch[-1, torch.float32, count, 96, 0, 0, 0, 0, 0], str)
    assert [key[2] for key in dispatch] == list(range(50, 100))  # the oldest went, one by one
    for count in range(1, 100):
        assert native.explain(rows(1, 96, dtype=torch.float64), (96,)).startswith("PyTorch: nothing was tuned for float64")
        assert "not within" in native.explain(rows(1, 70_000 + count), (70_000 + count,))
    assert len(dispatch) == 50


def operator_of(module: ModuleType) -> Any:
    return module.frontend.NATIVE.operator


def rows(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return (2 * torch.randn(shape) + 1).to(dtype).requires_grad_(grad)


def qkv(length: int = 70, *, kv_heads: int = 4, kv_len: int = 0, dim: int = 64, **options: Any) -> Args:
    dtype, grad = options.get("dtype", torch.float32), options.get("grad", True)
    shapes = ((2, 4, length, dim), (2, kv_heads, kv_len or length, dim), (2, kv_heads, kv_len or length, dim))
    return tuple(torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes)


def plain(module: ModuleType) -> Args:
    """A call that a variant serves."""
    if is_of("attention", module):
        return *qkv(grad=False), torch.randn(2, 1, 70, 70)
    return (rows(6, 96), -1) if is_of("softmax", module) else (rows(6, 96), (96,), rows(96))


SERVED: list[tuple[str, Callable[[], Args], Options]] = [
    ("layernorm", lambda: (rows(5, 96, grad=True), (96,), rows(96, grad=True), rows(96, grad=True), 1e-5), {}),
    ("layernorm", lambda: (rows(5, 96, grad=True), (96,), None, rows(96, grad=True), 1e-3), {}),
    ("layernorm", lambda: (rows(5, 96), (96,), rows(96, grad=True), rows(96)), {}),
    ("layernorm", lambda: (rows(2, 3, 4, 24, grad=True), [4, 24]), {}),
    ("layernorm", lambda: (rows(96, 5).t().requires_grad_(), (96,), rows(96), rows(96)), {}),
    ("layernorm", lambda: (rows(7, 256, dtype=torch.bfloat16, grad=True), (256,)), {}),
    ("rmsnorm", lambda: (rows(5, 96, grad=True), (96,), rows(96, grad=True)), {}),
    ("rmsnorm", lambda: (rows(5, 96), (96,), rows(96)), {"eps": 1e-5}),
    ("rmsnorm", lambda: (rows(2, 3, 4, 24, grad=True), [4, 24], None, 1e-3), {}),
    ("rmsnorm", lambda: (rows(96, 5).t().requires_grad_(), (96,)), {}),
    ("rmsnorm", lambda: (rows(7, 256, dtype=torch.bfloat16), (256,)), {}),
    ("attention", qkv, {}),
    ("attention", qkv, {"is_causal": True}),
    ("attention", lambda: qkv(33, kv_len=129), {"scale": 0.3}),
    ("attention", lambda: qkv(kv_heads=2), {"enable_gqa": True}),
    ("attention", lambda: tuple(t.transpose(1, 2).contiguous().transpose(1, 2).detach() for t in qkv()), {}),
    ("attention", lambda: qkv(dtype=torch.bfloat16), {"scale": 1}),
    ("attention", lambda: (*qkv(33, kv_len=129), torch.rand(33, 129) < 0.7), {"scale": 0.3}),
    ("attention", lambda: (*qkv(kv_heads=2), torch.randn(2, 1, 1, 70)), {"enable_gqa": True}),
    ("softmax", lambda: (rows(5, 96, grad=True), -1), {}),
    ("softmax", lambda: (rows(5, 2, 96).transpose(0, 1), 2), {}),
    ("softmax", lambda: (rows(7, 256, dtype=torch.bfloat16, grad=True), 1), {}),
]
LEFT: list[tuple[str, Callable[[], Args], Options]] = [
    ("layernorm", lambda: (rows(5, 96, dtype=torch.float64, grad=True), (96,)), {}),
    ("rmsnorm", lambda: (rows(5, 96, dtype=torch.float64, grad=True), (96,)), {}),
    ("attention", lambda: qkv(dtype=torch.float64), {}),
    ("attention", lambda: qkv(dim=40), {}),
    ("softmax", lambda: (rows(5, 96, dtype=torch.float64, grad=True), -1), {}),
    ("softmax", lambda: (rows(5, 96, grad=True), 0), {}),
]


def calls(cases: list[tuple[str, Callable[[], Args], Options]]) -> Any:
    return pytest.mark.parametrize(("module", "make", "options"), cases, indirect=["module"])


def tensors(args: Args) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    tolerance = 3e-2 if a.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@calls([*SERVED, *((f"trained_{k}", *case) for k, *case in SERVED if f"trained_{k}" in TRAINED), *LEFT])
def test_pytorch_finds_nothing_wrong_with_the_operator(
    module: ModuleType, make: Callable[[], Args], options: Options
) -> None:
    assert set(torch.library.opcheck(operator_of(module), make(), options).values()) == {"SUCCESS"}


@calls([*SERVED, *LEFT])
def test_calls_have_pytorchs_results_and_gradients(
    module: ModuleType, make: Callable[[], Args], options: Options
) -> None:
    args, served = make(), (make, options) not in [case[1:] for case in LEFT]
    function, pytorchs, wanted = own(module), theirs(module), tensors(args)
    left = not served or (wanted and not is_of("softmax", module))  # whose gradients follow from its result
    assert module.explain(*args, **options).startswith("PyTorch" if left else "variant")
    with torch.no_grad():
        assert module.explain(*args, **options).endswith("native launcher") is served
        result, expected = function(*args, **options), pytorchs(*args, **options)
    close(result, expected)
    assert result.stride() == expected.stride()
    serve(module, gradients=True)
    assert module.explain(*args, **options).startswith("variant" if served else "PyTorch")
    expected = pytorchs(*args, **options)
    upstream = torch.randn_like(expected)
    for result in (function(*args, **options), operator_of(module)(*args, **options)):
        close(result, expected)
        assert result.requires_grad is bool(wanted)
        for some in (wanted, wanted[-1:]) if wanted else ():
            both = (torch.autograd.grad(y, some, upstream, retain_graph=True) for y in (result, expected))
            for a, b in zip(*both, strict=True):
                close(a, b)


def test_gradients_can_be_differentiated(module: ModuleType) -> None:
    serve(module, gradients=True)
    affine = ((8,), rows(8, grad=True)) if is_norm(module) else (-1,)
    args = qkv(3) if is_of("attention", module) else (rows(3, 8, grad=True), *affine)
    wanted, found = tensors(args), []
    for function in (own(module), theirs(module)):
        output = function(*args) if function is own(module) else None  # with a back end chosen, it would be PyTorch's
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            output = function(*args) if output is None else output
            first = torch.autograd.grad(output.square().mean(), wanted, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))
    for a, b in zip(*found, strict=True):
        close(a, b)


def graph_of(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[set[Any], Any]:
    """What torch.compile sees in one graph, and what comes of it."""
    seen: set[Any] = set()

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        seen.update(node.target for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch.compiler.reset()
    return seen, torch.compile(function, backend=backend, fullgraph=True, **options)(*args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_has_pytorchs_operation_or_the_operator(module: ModuleType, dynamic: bool) -> None:
    def block(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return own(module)(x * 2, *rest) + 1  # type: ignore[no-any-return]

    args, operator = plain(module), operator_of(module)
    leaf = args[0 if is_of("softmax", module) else 2]
    expected = theirs(module)(args[0] * 2, *args[1:]) + 1
    for compiled, gradients, recorded, wanted in (
        (False, False, False, False),
        (True, False, False, True),
        (True, False, True, is_of("softmax", module)),
        (True, True, True, True),
    ):
        serve(module, compiled=compiled, gradients=gradients)
        leaf.requires_grad_(recorded)
        seen, result = graph_of(block, *args, dynamic=dynamic)
        assert (operator in seen) is wanted
        close(result, expected)
    (grad,) = torch.autograd.grad(result.sum(), leaf)
    close(grad, torch.autograd.grad((theirs(module)(args[0] * 2, *args[1:]) + 1).sum(), leaf)[0])
    if is_of("attention", module):
        assert operator in graph_of(block, *args[:3], args[3].clone().requires_grad_(), dynamic=dynamic)[0]
    args = tuple(a.detach().double() if isinstance(a, torch.Tensor) else a for a in args)
    assert operator not in graph_of(block, *args, dynamic=dynamic)[0]  # nothing is tuned for it


def test_new_sizes_compile_nothing_anew(module: ModuleType) -> None:
    module.also_serve(compiled=True)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda *args: own(module)(*args), backend="aot_eager", fullgraph=True)
    x, *rest = plain(module)
    for n in range(2, 14):
        args = qkv(n, grad=False) if is_of("attention", module) else (x.new_ones(n, 96), *rest)
        close(compiled(*args), own(module)(*args))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # of one size, and of any


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # asked for by PyTorch's own tracing
def test_compiled_autograd_has_the_same_gradients(module: ModuleType) -> None:
    serve(module, gradients=True)
    args = plain(module)
    x = args[0].requires_grad_()
    (expected,) = torch.autograd.grad(theirs(module)(*args).square().sum(), x)
    result = own(module)(*args).square().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        result.backward()
    assert x.grad is not None
    close(x.grad, expected)


@of("layernorm", "rmsnorm")
def test_an_exported_program_holds_the_operator(module: ModuleType) -> None:
    module.also_serve(compiled=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 96), layer(module)(96)).eval().requires_grad_(False)
    x = rows(4, 8)
    program = torch.export.export(model, (x,), strict=True)
    assert any(node.target is operator_of(module) for node in program.graph.nodes)
    close(program.module()(x), model(x))


TRANSFORMS: list[Callable[[Callable[..., torch.Tensor], torch.Tensor], Any]] = [
    lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, 2 * x])),
]
FORWARD: list[Callable[[Callable[..., torch.Tensor], torch.Tensor], Any]] = [
    lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    lambda f, x: torch.func.jacrev(f)(x),
]


@PYTORCHS_OWN
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_are_those_of_pytorchs_function(module: ModuleType) -> None:
    serve(module, gradients=True)
    x, *rest = qkv(9, grad=False) if is_of("attention", module) else plain(module)
    for transform in [*TRANSFORMS, *(() if is_of("attention", module) else FORWARD)]:
        expected = transform(lambda x: theirs(module)(x, *rest), x)
        for function in (own(module), operator_of(module)):
            close(transform(lambda x, f=function: f(x, *rest), x), expected)


@pytest.mark.parametrize("count", [3, 4])  # attention without and with a mask
def test_autocast_is_pytorchs(module: ModuleType, count: int) -> None:
    """Attention is served in the lower precision, and so are its gradients."""
    serve(module, gradients=True)
    args = plain(module)[:count]
    args[0].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert ("bfloat16" if is_of("attention", module) else "autocast") in module.explain(*args)
        expected = theirs(module)(*args)
        for function in (own(module), operator_of(module)):
            result = function(*args)
            assert result.dtype == expected.dtype
            close(result, expected)
            found = [torch.autograd.grad(y.sum(), args[0], retain_graph=True)[0] for y in (result, expected)]
            torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2)


@of("layernorm", "rmsnorm")
def test_the_operator_takes_what_no_variant_does(module: ModuleType) -> None:
    operator = operator_of(module)
    for x in (rows(4, 96, dtype=torch.float16), rows(0, 96), torch._neg_view(rows(4, 96))):
        close(operator(x, (96,)), theirs(module)(x, (96,)))
    assert operator(torch.empty(4, 96, device="meta"), (96,)).shape == (4, 96)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        operator(rows(4, 96), (95,))


REFUSED: list[tuple[str, Options, Options]] = [
    ("exclude each other", {}, {"attn_mask": torch.zeros(70, 70), "is_causal": True}),
    ("nor of the dtype of query", {"dtype": torch.bfloat16}, {"attn_mask": torch.zeros(70, 70)}),
    ("gradients are being", {}, {"attn_mask": torch.zeros(70, 70, requires_grad=True)}),
    ("subclass", {}, {"attn_mask": torch.zeros(70, 70).as_subclass(type("Own", (torch.Tensor,), {}))}),
    ("shape of attn_mask", {}, {"attn_mask": torch.zeros(70)}),
    ("shape of attn_mask", {}, {"attn_mask": torch.zeros(2, 3, 70, 70)}),
    ("not a bool", {}, {"is_causal": 1}),
    ("scale is not", {}, {"scale": 0.0}),
    ("scale is not", {}, {"scale": 10**400}),
    ("unequal lengths", {"length": 5, "kv_len": 70}, {"is_causal": True}),
    ("nothing was tuned for head_dim=40 (but for head_dim=64; ", {"dim": 40}, {}),
]


@pytest.fixture(params=["native", "Python"])
def attention(request: pytest.FixtureRequest, native_attention: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "Python":
        monkeypatch.setattr(native_attention.frontend, "_call", None)
        monkeypatch.setattr(native_attention.frontend.NATIVE, "explain", None)
    return native_attention


def test_a_back_end_that_was_chosen_is_pytorchs(attention: ModuleType) -> None:
    backends, args = torch.nn.attention.SDPBackend, qkv(grad=False)
    for chosen in (backends.MATH, [backends.FLASH_ATTENTION, backends.EFFICIENT_ATTENTION]):
        with torch.nn.attention.sdpa_kernel(chosen):
            assert "a back end was chosen" in attention.explain(*args)
            assert torch.equal(own(attention)(*args), theirs(attention)(*args))
    with torch.nn.attention.sdpa_kernel([backends.MATH, backends.FLASH_ATTENTION]):  # what is left is still a choice
        assert attention.explain(*args).startswith("variant")


@pytest.mark.parametrize("index", range(3, 7))
def test_variants_for_masks_pass_their_check_and_flash_attentions_rule(attention: ModuleType, index: int) -> None:
    verdicts = list(importlib.import_module(f"{attention.__name__}.runtime.trial").verdicts(attention.frontend, index, 7))
    assert [v for v in verdicts if v.reason] == []
    assert sum(v.on_variant for v in verdicts) >= 20
    dtype = torch.float32 if index < 5 else torch.bfloat16
    flash_attentions_rule(attention, dtype, torch.device("cpu"), additive=index % 2 == 0)


def test_random_cases_are_calls_that_a_causal_variant_serves(attention: ModuleType) -> None:
    trial = importlib.import_module(f"{attention.__name__}.runtime.trial")
    drawn = [v for v in trial.verdicts(attention.frontend, 1, 7, 12) if " rows, " in v.case]
    assert len(drawn) == 12
    assert [v for v in drawn if v.reason or not v.on_variant] == []


@pytest.mark.parametrize(("reason", "sizes", "options"), REFUSED)
def test_attention_that_is_left_to_pytorch(attention: ModuleType, reason: str, sizes: Options, options: Options) -> None:
    args, function = qkv(**sizes, grad=False), attention.scaled_dot_product_attention
    assert reason in attention.explain(*args, **options)
    try:
        expected = theirs(attention)(*args, **options)
    except Exception as error:
        with pytest.raises(type(error)):
            function(*args, **options)
    else:
        torch.testing.assert_close(function(*args, **options), expected, equal_nan=True)


@of("attention")
def test_three_dimensions_are_pytorchs(module: ModuleType) -> None:
    args = [t[0] for t in qkv(grad=False)]
    assert "four dimensions" in module.explain(*args)
    assert torch.equal(module.scaled_dot_product_attention(*args), theirs(module)(*args))
    assert torch.equal(operator_of(module)(*args), theirs(module)(*args))
