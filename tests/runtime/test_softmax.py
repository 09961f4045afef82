"""What the exported softmax does with any arguments: PyTorch's result, by a variant or by PyTorch itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from tests.runtime.conftest import agree, left_to_pytorch, on_variant, refused_in_pytorchs_words

pytestmark = pytest.mark.slow

INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module", params=["Python", "native"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    """Launched from Python, and natively: the same calls, the same answers."""
    if request.param == "native":
        return request.getfixturevalue("native_softmax")
    return request.getfixturevalue("use")(request.getfixturevalue("exported_softmax"))


def strictly(own: torch.Tensor, torchs: torch.Tensor) -> None:
    """Relative errors, as results are about one over the number of columns."""
    rtol = 2e-5 if own.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(own, torchs, rtol=rtol, atol=1e-30, equal_nan=True)


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), max_size=3),
    cols=st.one_of(st.integers(1, 40), st.integers(41, 1100)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(["plain", "offset", "transposed", "strided", "expanded"]),
    by_number=st.booleans(),
    named=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_and_layout_gives_pytorchs_result(
    module: ModuleType,
    shape: list[int],
    cols: int,
    dtype: torch.dtype,
    layout: str,
    by_number: bool,
    named: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = {
        "plain": lambda: torch.randn(*shape, cols),
        "offset": lambda: torch.randn(*shape, cols + 1)[..., 1:],
        "transposed": lambda: torch.randn(cols, *shape).movedim(0, -1),
        "strided": lambda: torch.randn(*shape, 2 * cols)[..., ::2],
        "expanded": lambda: torch.randn(cols).expand(*shape, cols),
    }[layout]()
    x = (3 * x + 10).to(dtype)
    dim, options = len(shape) if by_number else -1, {"dtype": dtype} if named else {}
    strictly(on_variant(module, x, dim, **options), functional.softmax(x, dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38, -3e38, 0.0, 1e-30])
def test_extreme_values_come_out_as_pytorchs(module: ModuleType, value: float, dtype: torch.dtype) -> None:
    x = torch.randn(9, 97, dtype=dtype)
    x[4] = value
    x[6, 3] = value
    x[8, 96] = value
    x[7, 1:] = value
    own = on_variant(module, x, -1)
    strictly(own, functional.softmax(x, -1))
    assert own[[0, 1, 2, 3, 5]].isfinite().all()


LEFT: list[tuple[str, Callable[[], tuple[Any, ...]]]] = [
    ("nothing was tuned for float64", lambda: (torch.randn(4, 96, dtype=torch.float64), -1)),
    ("nothing was tuned for float16", lambda: (torch.randn(4, 96, dtype=torch.float16), -1)),
    ("cols=70000 is not within", lambda: (torch.randn(1, 70_000), -1)),
    ("holds no memory", lambda: (torch.randn(0, 96), -1)),
    ("holds no memory", lambda: (torch.randn(4, 0), -1)),
    ("dim is not", lambda: (torch.randn(4, 96), 0)),
    ("dim is not", lambda: (torch.randn(4, 96), -2)),
    ("dim is not", lambda: (torch.randn(4, 3, 96), 1)),
    ("dim is not", lambda: (torch.randn(()), -1)),
    ("dim is not", lambda: (torch.randn(()), 0)),
    ("dim is not", lambda: (torch.randn(4, 96), torch.tensor(1))),
    ("dtype is not", lambda: (torch.randn(4, 96), -1, 3, torch.float64)),
    ("dtype is not", lambda: (torch.randn(4, 96), -1, 3, torch.bfloat16)),
    ("dtype is not", lambda: (torch.randint(9, (4, 96)), -1, 3, torch.float32)),
    ("negates", lambda: (torch._neg_view(torch.randn(4, 96)), -1)),
    ("subclass", lambda: (torch.randn(4, 96).as_subclass(Marked), -1)),
]


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(("reason", "make"), LEFT, ids=[f"{i} {reason}" for i, (reason, _) in enumerate(LEFT)])
def test_what_a_variant_cannot_do_is_left_to_pytorch(
    module: ModuleType, reason: str, make: Callable[[], tuple[Any, ...]]
) -> None:
    left_to_pytorch(module, reason, *make())


WRONG: list[Callable[[], tuple[Any, ...]]] = [
    lambda: (torch.randn(4, 96), 2),
    lambda: (torch.randn(4, 96), -3),
    lambda: (torch.randn(4, 96), 2**70),
    lambda: (torch.randn(4, 96), -(2**70)),
    lambda: (torch.randn(4, 96), 1.0),
    lambda: (torch.randn(4, 96), "1"),
    lambda: (torch.randn(4, 96), (1,)),
    lambda: (torch.randn(4, 96), -1, 3, "float32"),
    lambda: (torch.randn(4, 96), -1, 3, torch.int32),
    lambda: (torch.randint(9, (4, 96)), -1),
    lambda: (torch.randn(4, 96, dtype=torch.complex64), -1),
    lambda: (torch.randn(4, 96).to_sparse(), -1),
    lambda: (None, -1),
    lambda: ([1.0, 2.0], 0),
]


@pytest.mark.parametrize("make", WRONG)
def test_what_pytorch_refuses_is_refused_in_its_words(module: ModuleType, make: Callable[[], tuple[Any, ...]]) -> None:
    refused_in_pytorchs_words(module, *make())


def test_without_dim_pytorchs_warning_is_of_the_same_line(module: ModuleType) -> None:
    """The axis it chooses is the last one of two dimensions, and the first one of three."""

    def warned(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[Any]:
        with pytest.warns(UserWarning, match="Implicit dimension choice for softmax") as told:
            result = function(x)
        return [result.tolist(), *((w.filename, w.lineno) for w in told)]

    for x in (torch.randn(2, 3, 96), torch.randn(3, 96)):
        assert "dim is not the last axis" in module.explain(x)
        of_function, of_module = warned(functional.softmax, x), warned(torch.nn.Softmax(), x)
        assert warned(module.softmax, x) == of_function
        assert warned(module.Softmax(), x) == of_module
        with module.patch():
            assert warned(torch.nn.Softmax(), x) == of_module
            assert warned(lambda x: functional.softmax(x, None, 4), x) != of_module  # the level is passed on


def test_every_way_to_write_a_call(module: ModuleType) -> None:
    x = torch.randn(2, 3, 96)
    for args, options in (((), {"dim": -1}), ((2,), {}), ((-1, 5), {}), ((), {"dim": 2, "dtype": torch.float32})):
        on_variant(module, x, *args, **options)
    agree(module.softmax(input=x, dim=-1), functional.softmax(x, dim=-1))
    assert "variant 1 " in module.explain(x.bfloat16(), -1)
    layer = module.Softmax(-1)
    assert repr(layer) == repr(torch.nn.Softmax(-1))
    assert isinstance(layer, torch.nn.Softmax)
    agree(layer(x), functional.softmax(x, -1))


def test_tensors_without_an_address_and_modes_are_pytorchs(module: ModuleType) -> None:
    x = torch.randn(4, 96)
    assert module.softmax(x.to("meta"), -1).device.type == "meta"
    with FakeTensorMode() as mode:
        assert module.softmax(mode.from_tensor(x), -1).shape == (4, 96)
    with FlopCounterMode(display=False):
        left_to_pytorch(module, "dispatch mode", x, -1)
    with torch.device("cpu"):
        left_to_pytorch(module, "function mode", x, -1)
    with torch.autocast("cpu", torch.bfloat16):
        left_to_pytorch(module, "autocast", x, -1)
    agree(torch.func.vmap(lambda x: module.softmax(x, -1))(x), functional.softmax(x, -1))
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(lambda x: module.softmax(x, -1), (x,))
    agree(traced(2 * x), functional.softmax(2 * x, -1))


def test_gradients_are_pytorchs(module: ModuleType) -> None:
    x = torch.randn(4, 96, requires_grad=True)
    own, torchs = (torch.autograd.grad(f(x, -1).square().sum(), x)[0] for f in (module.softmax, functional.softmax))
    torch.testing.assert_close(own, torchs, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert not on_variant(module, x, -1).requires_grad
    with torch.inference_mode():
        assert on_variant(module, x, -1).is_inference()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripts_have_pytorchs_function(module: ModuleType) -> None:
    x = torch.randn(4, 96)
    scripts = [torch.jit.script(module.softmax), torch.jit.script(module.Softmax(-1))]
    with module.patch():
        scripts.append(torch.jit.script(torch.nn.Softmax(-1)))
    for script in scripts:
        assert torch.equal(script(x, -1) if script is scripts[0] else script(x), functional.softmax(x, -1))


def test_models_have_it_by_a_patch(module: ModuleType) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 96), torch.nn.Softmax(dim=-1)).requires_grad_(False)
    x, before = torch.randn(4, 8), functional.softmax
    expected = model(x)
    with module.patch(), torch.profiler.profile() as profile:
        assert functional.softmax is module.softmax
        agree(model(x), expected)
    assert functional.softmax is before
    assert "aten::softmax" not in {event.name for event in profile.events()}
    patch = module.patch(model)
    assert type(model[1]) is module.Softmax
    agree(model(x), expected)
    patch.undo()
    assert type(model[1]) is torch.nn.Softmax


def test_both_launchers_pass_the_packages_own_check(module: ModuleType) -> None:
    trial = import_module(f"{module.__name__}.runtime.trial")
    for index in range(2):
        found = list(trial.verdicts(module.frontend, index, 7))
        assert [v for v in found if v.reason] == []
        assert sum(v.on_variant for v in found) >= 20


def test_what_is_public(module: ModuleType) -> None:
    assert module.__all__ == ["Softmax", "also_serve", "build", "explain", "patch", "softmax", "variants"]
