"""A package of a forward with its backward: gradients by variants, equal to PyTorch's, of every order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from evo.errors import UsageError
from evo.export import find_exporter
from tests.export.exports import request_for
from tests.runtime.conftest import Importer

pytestmark = pytest.mark.slow

SIZES = "rows=64,cols=96,dtype=float32"
SHAPES = [((64, 96), (96,)), ((3, 7, 96), (96,)), ((5, 4, 24), (4, 24)), ((96,), (96,))]


def export(out: Path, sizes: str, kernel: str = "rmsnorm") -> Path:
    parts = [request_for("cpu", "native", out, sizes, kernel=kernel)]
    parts.append(request_for("cpu", "native", out, SIZES, kernel=f"{kernel}_backward"))
    find_exporter("module").export(*parts)
    return out


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, natively: Importer, raced: object) -> ModuleType:
    found = natively(export(tmp_path_factory.mktemp("trained") / "trained_rmsnorm", f"{SIZES},rstd=true"))
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


def arguments(shape: tuple[int, ...], normalized: tuple[int, ...], weight: bool = True) -> list[torch.Tensor]:
    x = torch.randn(shape) * (1 + torch.rand(*shape[:1], *(1 for _ in shape[1:]))) + 1
    made = [x, *([torch.randn(normalized) + 1] if weight else [])]
    return [t.requires_grad_() for t in made]


@pytest.mark.parametrize(("shape", "normalized"), SHAPES, ids=str)
@pytest.mark.parametrize("weight", [True, False])
def test_gradients_are_pytorchs_and_by_variants(
    module: ModuleType, launches: Callable[[], int], shape: tuple[int, ...], normalized: tuple[int, ...], weight: bool
) -> None:
    leaves = arguments(shape, normalized, weight)
    x, *rest = leaves
    call = (x, normalized, *(rest or [None]), 1e-5)
    assert module.explain(*call).startswith("variant")
    result, expected = module.rms_norm(*call), functional.rms_norm(*call)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(expected)
    found = [torch.autograd.grad(y, leaves, upstream) for y in (result, expected)]
    for own, torchs in zip(*found, strict=True):
        assert own.shape == torchs.shape
        torch.testing.assert_close(own, torchs, rtol=1e-4, atol=1e-4)
    assert launches() == 1


def test_gradients_of_gradients_are_pytorchs(module: ModuleType) -> None:
    leaves = arguments((6, 96), (96,))
    found = []
    for function in (module.rms_norm, functional.rms_norm):
        first = torch.autograd.grad(function(*leaves[:1], (96,), leaves[1], 1e-5).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), leaves))
    for own, torchs in zip(*found, strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-4, atol=1e-3)


def test_hooks_run_once_where_gradients_are_recorded(module: ModuleType) -> None:
    found = []
    for function in (module.rms_norm, functional.rms_norm):
        torch.manual_seed(1)
        leaves, calls = arguments((6, 96), (96,)), []
        for leaf in leaves:
            leaf.register_hook(lambda g, calls=calls: (calls.append(1), 2 * g)[1])
        result = function(leaves[0], (96,), leaves[1], 1e-5).square().sum()
        found.append(torch.autograd.grad(result, leaves, create_graph=True))
        assert len(calls) == 2
    for own, torchs in zip(*found, strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-4, atol=1e-4)


def test_a_frozen_weight_or_input_has_no_gradient(module: ModuleType, launches: Callable[[], int]) -> None:
    x, weight = arguments((6, 96), (96,))
    for frozen, asked in ((weight, 1), (x, 0)):  # where no gradient of the input is wanted, PyTorch does both passes
        x.requires_grad_()
        weight.requires_grad_()
        frozen.requires_grad_(False)
        x.grad = weight.grad = None
        module.rms_norm(x, (96,), weight, 1e-5).square().sum().backward()
        wanted = weight if frozen is x else x
        (expected,) = torch.autograd.grad(functional.rms_norm(x, (96,), weight, 1e-5).square().sum(), wanted)
        assert frozen.grad is None
        torch.testing.assert_close(wanted.grad, expected, rtol=1e-4, atol=1e-4)
        assert launches() == asked


def test_a_model_learns_as_with_pytorchs(module: ModuleType, launches: Callable[[], int]) -> None:
    losses = []
    for patched in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.RMSNorm(96), torch.nn.Linear(96, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if patched:
            module.patch(model)
            assert type(model[1]) is module.RMSNorm
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
    leaves = arguments((6, 96), (96,))
    module.also_serve(gradients=False)
    assert "gradients are being recorded" in module.explain(leaves[0], (96,), leaves[1], 1e-5)


def test_calls_that_record_nothing_are_served_where_all_variants_give_statistics(module: ModuleType) -> None:
    with torch.no_grad():
        x, weight = arguments((6, 96), (96,))
        assert module.explain(x, (96,), weight, 1e-5).startswith("variant")
        expected = functional.rms_norm(x, (96,), weight, 1e-5)
        torch.testing.assert_close(module.rms_norm(x, (96,), weight, 1e-5), expected, rtol=1e-5, atol=1e-5)


def test_the_package_within_is_one_of_its_own(module: ModuleType) -> None:
    backward, (x, weight) = module.backward, arguments((6, 96), (96,))
    x, weight, dy = x.detach(), weight.detach(), torch.randn(6, 96)
    rstd = (x.square().mean(1) + 1e-5).rsqrt()
    call = dy, x, (96,), rstd, weight, [True, True]
    assert backward.explain(*call).startswith("variant")
    for own, exact in zip(backward.rms_norm_backward(*call), backward.frontend.exact(*call), strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        ("rmsnorm", "rmsnorm_backward takes rstd, which none of .* of rmsnorm gives: search it for .* with rstd=true, too"),
        ("layernorm", "layernorm_backward takes mean and rstd, which none of .* of layernorm gives: export it alone"),
    ],
)
def test_a_backward_without_its_forwards_outputs_is_refused(tmp_path: Path, forward: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        export(tmp_path / "wanting", SIZES, forward)
    assert not (tmp_path / "wanting").exists()
