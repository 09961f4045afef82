"""What the exported function does with any arguments: PyTorch's result, by a variant or by PyTorch itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from tests.runtime.conftest import (
    Importer,
    agree,
    fitting,
    is_of,
    layer,
    left_to_pytorch,
    on_variant,
    own,
    refused_in_pytorchs_words,
    theirs,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["Python", "native", "rmsnorm, Python", "rmsnorm, native"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    """Launched from Python, and natively: the same calls, the same answers."""
    kernel = "_rmsnorm" if "rmsnorm" in request.param else ""
    if "native" in request.param:
        return request.getfixturevalue(f"native{kernel}")
    return request.getfixturevalue("use")(request.getfixturevalue(f"exported{kernel}"))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.one_of(st.integers(1, 40), st.integers(41, 1100)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    affine=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    layout=st.sampled_from(["plain", "offset", "transposed", "strided", "expanded", "cube"]),
    eps=st.sampled_from([1e-5, 1e-12, 0.5]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_layout_gives_pytorchs_result(
    module: ModuleType,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    affine: tuple[bool, bool],
    layout: str,
    eps: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = {
        "plain": lambda: torch.randn(rows, cols),
        "offset": lambda: torch.randn(rows * cols + 1)[1:].view(rows, cols),
        "transposed": lambda: torch.randn(cols, rows).t(),
        "strided": lambda: torch.randn(rows, 2 * cols)[:, ::2],
        "expanded": lambda: torch.randn(1, cols).expand(rows, cols),
        "cube": lambda: torch.randn(1, rows, cols).transpose(0, 1),
    }[layout]()
    x = (3 * x + 10).to(dtype)
    weight, bias = (torch.randn(cols, dtype=dtype) if wanted else None for wanted in affine)
    if cols > 3:  # of two equal values every rounding is a whole unit of the result
        on_variant(module, x, (cols,), weight, bias, eps)
    else:
        assert own(module)(*fitting(module, (x, (cols,), weight, bias, eps))).shape == x.shape


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e15, 0.0, 1e-30])
def test_extreme_values_come_out_as_pytorchs(module: ModuleType, value: float) -> None:
    x = torch.randn(9, 96)
    x[4] = value
    x[6, 3] = value
    result = on_variant(module, x, (96,), torch.randn(96), torch.randn(96))
    assert result[[0, 1, 2, 3, 5, 7, 8]].isfinite().all()


def test_every_way_to_write_a_call_takes_the_nearest_variant(module: ModuleType) -> None:
    on_variant(module, torch.randn(5, 4, 24), (4, 24), torch.randn(4, 24), torch.randn(4, 24))
    on_variant(module, torch.randn(4, 24), [4, 24])
    on_variant(module, torch.randn(2, 3, 96), torch.Size([96]))
    on_variant(module, torch.randn(96), (96,))
    on_variant(module, torch.randn(4, 96), (96,), None, None, 1)
    for cols, index in ((96, 0), (64, 0), (1024, 1), (4096, 1)):
        assert f"variant {index} " in module.explain(torch.randn(64, cols), (cols,))
    assert "variant 2 " in module.explain(torch.randn(64, 96, dtype=torch.bfloat16), (96,))
    named = {"input": torch.randn(8, 96), "normalized_shape": (96,), "weight": torch.randn(96), "eps": 1e-3}
    agree(own(module)(**named), theirs(module)(**named))


LEFT: list[tuple[str, Callable[[], tuple[Any, ...]]]] = [
    ("nothing was tuned for float64 on this device", lambda: (torch.randn(4, 96).double(), (96,), None, None, 1e-5)),
    ("nothing was tuned for float16 on this device", lambda: (torch.randn(4, 96, dtype=torch.float16), (96,))),
    (
        "nothing was tuned for weight_dtype=float32",
        lambda: (torch.randn(4, 96).bfloat16(), (96,), torch.randn(96), torch.randn(96)),
    ),
    ("weight is not contiguous", lambda: (torch.randn(4, 96), (96,), torch.randn(192)[::2])),
    ("cols=70000 is not within", lambda: (torch.randn(1, 70_000), (70_000,))),
    ("holds no memory", lambda: (torch.randn(0, 96), (96,))),
    ("eps is not", lambda: (torch.randn(4, 96), (96,), None, None, 0.0)),
    ("eps is not", lambda: (torch.randn(4, 96), (96,), None, None, float("nan"))),
    ("eps is not", lambda: (torch.randn(4, 96), (96,), None, None, 2_000_000)),
    ("gradients", lambda: (torch.randn(4, 96), (96,), torch.randn(96, requires_grad=True))),
    ("negates", lambda: (torch._neg_view(torch.randn(4, 96)), (96,))),
    ("negates", lambda: (torch.randn(4, 96), (96,), torch._neg_view(torch.randn(96)))),
    ("holds no memory", lambda: (torch._efficientzerotensor((4, 96)), (96,))),
    ("subclass", lambda: (torch.randn(4, 96).as_subclass(Marked), (96,))),
    ("subclass", lambda: (torch.randn(4, 96), (96,), torch.randn(96).as_subclass(Marked))),
]


class Marked(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")  # PyTorch's own, of rms_norm
@pytest.mark.parametrize(("reason", "make"), LEFT, ids=[f"{i} {reason}" for i, (reason, _) in enumerate(LEFT)])
def test_what_a_variant_cannot_do_is_left_to_pytorch(
    module: ModuleType, reason: str, make: Callable[[], tuple[Any, ...]]
) -> None:
    left_to_pytorch(module, reason, *make())


def released() -> torch.Tensor:
    """A view into a storage that was given back, as sharded training does."""
    x = torch.randn(5, 96)[1:]
    x.untyped_storage().resize_(0)
    return x


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.randn(2, 96), torch.randn(3, 96)])


WRONG: list[Callable[[], tuple[Any, ...]]] = [
    lambda: (torch.randn(4, 96), (95,)),
    lambda: (torch.randn(4, 96), ()),
    lambda: (torch.randn(4, 96), (96.0,)),
    lambda: (torch.randn(4, 96), 96),
    lambda: (torch.randn(4, 96), None),
    lambda: (torch.randn(96), (4, 96)),
    lambda: (torch.randn(()), (1,)),
    lambda: (torch.randn(4, 96), (96,), torch.randn(95)),
    lambda: (torch.randn(4, 96), (96,), torch.randn(1, 96)),
    lambda: (torch.randn(4, 96), (96,), [1.0] * 96),
    lambda: (torch.randn(4, 96), (96,), torch.randn(96, device="meta")),
    lambda: (torch.randn(4, 96), (96,), None, None, "1e-5"),
    lambda: (torch.randint(9, (4, 96)), (96,)),
    lambda: (None, (2,)),
    lambda: (torch.randn(4, 96).to_sparse(), (96,)),
    lambda: (released(), (96,)),
]


@pytest.mark.parametrize("make", WRONG)
def test_what_pytorch_refuses_is_refused_in_its_words(module: ModuleType, make: Callable[[], tuple[Any, ...]]) -> None:
    if make is WRONG[-1] and is_of("rmsnorm", module):
        pytest.skip("PyTorch's own rms_norm reads the memory that is not there")
    refused_in_pytorchs_words(module, *make())


def test_tensors_without_an_address_are_pytorchs(module: ModuleType) -> None:
    assert own(module)(torch.randn(4, 96, device="meta"), (96,)).device.type == "meta"
    args = fitting(module, (nested(), (96,), torch.randn(96), torch.randn(96)))
    assert "plain array" in module.explain(*args)
    if hasattr(module, "layer_norm"):  # PyTorch's rms_norm cannot
        agree(own(module)(*args).to_padded_tensor(0), theirs(module)(*args).to_padded_tensor(0))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(4, 96))
        assert own(module)(fake, (96,)).shape == (4, 96)


def test_a_lazily_cloned_tensor_is_not_copied(module: ModuleType) -> None:
    x, wide = torch._lazy_clone(torch.randn(4, 96)), torch._lazy_clone(torch.randn(4, 96, dtype=torch.float64))
    on_variant(module, x, (96,))
    left_to_pytorch(module, "float64", wide, (96,), None, None, 1e-5)
    assert torch._C._is_cow_tensor(x)
    assert torch._C._is_cow_tensor(wide)


def test_gradients_flow_as_they_do_through_pytorchs(module: ModuleType) -> None:
    x = torch.randn(4, 96, requires_grad=True)
    found = [torch.autograd.grad(f(x, (96,)).square().sum(), x)[0] for f in (own(module), theirs(module))]
    assert torch.equal(*found)
    with torch.no_grad():
        assert not on_variant(module, x, (96,)).requires_grad
    with torch.inference_mode():
        assert on_variant(module, x, (96,)).is_inference()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # PyTorch's own forward mode uses it
def test_functorch_sees_pytorchs_operation(module: ModuleType) -> None:
    x, tangent = torch.randn(3, 4, 96), torch.randn(3, 4, 96)
    ours, torchs = (lambda x, f=f: f(x, (96,)) for f in (own(module), theirs(module)))
    agree(torch.func.vmap(ours)(x), torch.func.vmap(torchs)(x))
    agree(torch.func.grad(lambda x: ours(x).square().sum())(x), torch.func.grad(lambda x: torchs(x).square().sum())(x))
    agree(torch.func.functionalize(ours)(x), torchs(x))
    for a, b in zip(torch.func.jvp(ours, (x,), (tangent,)), torch.func.jvp(torchs, (x,), (tangent,)), strict=True):
        agree(a, b)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        assert "forward-mode" in module.explain(dual, (96,))
        agree(forward_ad.unpack_dual(ours(dual)).tangent, forward_ad.unpack_dual(torchs(dual)).tangent)


def test_modes_see_pytorchs_operation(module: ModuleType) -> None:
    x = torch.randn(4, 96)
    with FlopCounterMode(display=False):
        left_to_pytorch(module, "dispatch mode", x, (96,))
    with torch.device("cpu"):
        left_to_pytorch(module, "function mode", x, (96,))
    with torch.autocast("cpu", torch.bfloat16):
        left_to_pytorch(module, "autocast", x, (96,))
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        on_variant(module, x, (96,))


def test_compiling_and_tracing_record_pytorchs_operation(module: ModuleType) -> None:
    x, w = torch.randn(4, 96), torch.randn(96)
    compiled = torch.compile(own(module), backend="eager", fullgraph=True)
    agree(compiled(x, (96,), w), theirs(module)(x, (96,), w))
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(lambda x: own(module)(x, (96,)), (x,))
        scripted = torch.jit.script(layer(module)(96))
    other = torch.randn(4, 96)
    agree(traced(other), theirs(module)(other, (96,)))
    agree(scripted(other).detach(), theirs(module)(other, (96,)))


def test_the_layer_stands_in_for_pytorchs(module: ModuleType) -> None:
    base = layer(module).__base__
    assert base in (torch.nn.LayerNorm, torch.nn.RMSNorm)
    options = {"eps": 1e-3, "bias": False} if base is torch.nn.LayerNorm else {"eps": 1e-3}
    ours, torchs = (made((4, 24), **options) for made in (layer(module), base))
    torch.nn.init.normal_(torchs.weight)
    ours.load_state_dict(torchs.state_dict())
    assert repr(ours) == repr(torchs)
    x = torch.randn(7, 4, 24)
    ours(x).sum().backward()
    assert ours.weight.grad is not None
    with torch.no_grad():
        assert module.explain(x, (4, 24), ours.weight, eps=ours.eps).startswith("variant")
        agree(ours(x), torchs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_eps_is_pytorchs_default_of_rms_norm(
    exported_rmsnorm: Path, native_rmsnorm: ModuleType, use: Importer, dtype: torch.dtype
) -> None:
    """Where it decides the result; of layer_norm it is an error, which PyTorch raises."""
    for module in (use(exported_rmsnorm), native_rmsnorm):
        x = (1e-4 * torch.randn(5, 96)).to(dtype)
        result = on_variant(module, x, (96,), None, None, None)
        assert result.abs().max() < 1.5
        assert on_variant(module, x, (96,), None, None, 1e-12).abs().max() > 1.5


def test_a_result_that_pytorch_lays_out_channels_last_is_its_own(
    exported_rmsnorm: Path, native_rmsnorm: ModuleType, use: Importer
) -> None:
    x = torch.randn(2, 5, 6, 96)
    for module in (use(exported_rmsnorm), native_rmsnorm):
        last = x.to(memory_format=torch.channels_last)
        assert left_to_pytorch(module, "channels", last, (96,)).stride() == last.stride()
        on_variant(module, x, (96,))
        on_variant(module, x.transpose(1, 2), (96,))


def test_threads_share_a_variant(module: ModuleType) -> None:
    """Each over problems of its own, so that arguments which got mixed up would show."""

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(1 + seed, 96 + seed, generator=generator)
            agree(own(module)(x, (96 + seed,)), theirs(module)(x, (96 + seed,)))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))  # raises what one of them raised
