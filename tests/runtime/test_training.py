"""A package of a forward with its backward: gradients by variants, equal to PyTorch's, of every order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from evo.errors import UsageError
from evo.export import find_exporter
from tests.export.exports import request_for
from tests.runtime.conftest import Importer, is_of, layer, own, theirs

pytestmark = pytest.mark.slow

SIZES = "rows=64,cols=96,dtype=float32"
STATISTICS = {"rmsnorm": "rstd=true", "layernorm": "mean=true,rstd=true"}
SHAPES = [((64, 96), (96,)), ((3, 7, 96), (96,)), ((5, 4, 24), (4, 24)), ((96,), (96,))]


def export(out: Path, sizes: str, kernel: str) -> Path:
    parts = [request_for("cpu", "native", out, sizes, kernel=kernel)]
    parts.append(request_for("cpu", "native", out, SIZES, kernel=f"{kernel}_backward"))
    find_exporter("module").export(*parts)
    return out


@pytest.fixture(scope="module", params=list(STATISTICS))
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, natively: Importer, raced: object
) -> ModuleType:
    kernel = str(request.param)
    out = tmp_path_factory.mktemp("trained") / f"trained_{kernel}"
    found = natively(export(out, f"{SIZES},{STATISTICS[kernel]}", kernel))
    found.backward.also_serve(measure=False)
    return found


@pytest.fixture
def module(loaded: ModuleType) -> Iterator[ModuleType]:
    torch.manual_seed(0)
    yield loaded
    loaded.also_serve(gradients=True, slower=False)


@pytest.fixture
def launches(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many problems the backward's variants were asked for since the last time: each is asked once, until cleared."""
    dispatch = module.backward.frontend.DISPATCH
    asked: list[object] = []
    found = dispatch._find
    monkeypatch.setattr(dispatch, "_find", lambda key: (asked.append(key), found(key))[1])

    def count() -> int:
        number = len(asked)
        asked.clear()
        module.also_serve(slower=False)  # forgets what is known
        return number

    count()
    return count


def arguments(
    module: ModuleType, shape: tuple[int, ...] = (6, 96), normalized: tuple[int, ...] = (96,), affine: bool = True
) -> tuple[Any, ...]:
    """Of a call that records the gradients of all its tensors."""
    x = torch.randn(shape) * (1 + torch.rand(*shape[:1], *(1 for _ in shape[1:]))) + 1
    vectors = [torch.randn(normalized) + 1 for _ in range(2 if is_of("layernorm", module) else 1)]
    weights = [t.requires_grad_() for t in vectors] if affine else [None for _ in vectors]
    return x.requires_grad_(), normalized, *weights, 1e-5


def leaves_of(call: tuple[Any, ...]) -> list[torch.Tensor]:
    return [t for t in call if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(("shape", "normalized"), SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_are_pytorchs_and_by_variants(
    module: ModuleType, launches: Callable[[], int], shape: tuple[int, ...], normalized: tuple[int, ...], affine: bool
) -> None:
    call = arguments(module, shape, normalized, affine)
    leaves = leaves_of(call)
    assert module.explain(*call).startswith("variant")
    result, expected = own(module)(*call), theirs(module)(*call)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(expected)
    found = [torch.autograd.grad(y, leaves, upstream) for y in (result, expected)]
    for ours, torchs in zip(*found, strict=True):
        assert ours.shape == torchs.shape
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
    assert launches() == 1


def test_gradients_of_gradients_are_pytorchs(module: ModuleType) -> None:
    call, found = arguments(module), []
    leaves = leaves_of(call)
    for function in (own(module), theirs(module)):
        first = torch.autograd.grad(function(*call).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), leaves))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # asked for by PyTorch's own tracing
def test_gradients_by_compiled_autograd_are_pytorchs(module: ModuleType) -> None:
    call = arguments(module)
    leaves = leaves_of(call)
    expected = torch.autograd.grad(theirs(module)(*call).square().sum(), leaves)
    result = own(module)(*call).square().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        result.backward()
    for leaf, torchs in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, torchs, rtol=1e-4, atol=1e-4)


def test_gradients_are_freed_with_what_was_kept_and_are_none_of_what_changed_since(module: ModuleType) -> None:
    call = arguments(module)
    result = own(module)(*call).sum()
    result.backward()
    with pytest.raises(RuntimeError, match="second time"):
        result.backward()
    result = own(module)(*call).sum()
    with torch.no_grad():
        call[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_hooks_run_once_where_gradients_are_recorded(module: ModuleType) -> None:
    found = []
    for function in (own(module), theirs(module)):
        torch.manual_seed(1)
        call, calls = arguments(module), []
        leaves = leaves_of(call)
        for leaf in leaves:
            leaf.register_hook(lambda g, calls=calls: (calls.append(1), 2 * g)[1])
        found.append(torch.autograd.grad(function(*call).square().sum(), leaves, create_graph=True))
        assert len(calls) == len(leaves)
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)


def test_a_frozen_weight_or_input_has_no_gradient(module: ModuleType, launches: Callable[[], int]) -> None:
    call = arguments(module)
    leaves = leaves_of(call)
    for frozen in leaves:
        for leaf in leaves:
            leaf.requires_grad_(leaf is not frozen)
            leaf.grad = None
        own(module)(*call).square().sum().backward()
        wanted = [leaf for leaf in leaves if leaf is not frozen]
        expected = torch.autograd.grad(theirs(module)(*call).square().sum(), wanted)
        assert frozen.grad is None
        for leaf, torchs in zip(wanted, expected, strict=True):
            torch.testing.assert_close(leaf.grad, torchs, rtol=1e-4, atol=1e-4)
        assert launches() == int(frozen is not leaves[0])  # where none of the input is wanted, PyTorch does both passes


def test_gradients_of_some_of_what_was_recorded_are_pytorchs(module: ModuleType) -> None:
    call = arguments(module)
    for leaf in leaves_of(call):
        found = [torch.autograd.grad(f(*call).square().sum(), leaf)[0] for f in (own(module), theirs(module))]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_model_learns_as_with_pytorchs(module: ModuleType, launches: Callable[[], int]) -> None:
    norm, losses = layer(module).__base__, []
    assert norm is not None
    for patched in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(96, 96), norm(96), torch.nn.Linear(96, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if patched:
            module.patch(model)
            assert type(model[1]) is layer(module)
        losses.append([])
        for _ in range(20):
            x = torch.randn(32, 96)
            loss = (model(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert launches() == 1
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=1e-4)


def test_it_can_be_turned_off(module: ModuleType) -> None:
    module.also_serve(gradients=False)
    assert "gradients are being recorded" in module.explain(*arguments(module))


def test_calls_that_record_nothing_are_served_where_all_variants_give_statistics(module: ModuleType) -> None:
    with torch.no_grad():
        call = arguments(module)
        assert module.explain(*call).startswith("variant")
        expected = theirs(module)(*call)
        torch.testing.assert_close(own(module)(*call), expected, rtol=1e-5, atol=1e-5)
        found = module.frontend.served(module.frontend.DISPATCH, *call)  # by the Python launcher
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_package_within_is_one_of_its_own(module: ModuleType) -> None:
    backward, (x, weight, *bias) = module.backward, (t.detach() for t in leaves_of(arguments(module)))
    mean = x.mean(1) if bias else x.new_zeros(6)
    rstd = ((x - mean[:, None]).square().mean(1) + 1e-5).rsqrt()
    statistics = (mean, rstd) if bias else (rstd,)
    call = torch.randn(6, 96), x, (96,), *statistics, weight, *bias, [True, True, *(True for _ in bias)]
    assert backward.explain(*call).startswith("variant")
    for found, exact in zip(backward.frontend.SUBJECT(*call), backward.frontend.exact(*call), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        ("rmsnorm", "rmsnorm_backward takes rstd, which none of .* of rmsnorm gives: search it for .* with rstd=true, too"),
        ("layernorm", "takes mean and rstd, which none of .* gives: search it for .* with mean=true,rstd=true, too"),
    ],
)
def test_a_backward_without_its_forwards_outputs_is_refused(tmp_path: Path, forward: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        export(tmp_path / "wanting", SIZES, forward)
    assert not (tmp_path / "wanting").exists()
