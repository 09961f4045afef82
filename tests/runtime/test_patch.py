"""Existing models with the functions of an exported package in the place of PyTorch's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.runtime.conftest import Importer, layer, name_of, own, theirs


@pytest.fixture(scope="module", params=["exported", "exported_rmsnorm"])
def module(request: pytest.FixtureRequest, use: Importer) -> ModuleType:
    """Which launcher it has makes no difference to a patch."""
    return use(request.getfixturevalue(request.param))


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, scale=0.2)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def model(norm: Any) -> nn.Module:
    """norm: a class of PyTorch's."""
    torch.manual_seed(0)
    return nn.Sequential(norm(96), nn.Sequential(nn.Linear(96, 96), nn.GELU(), norm(96)))


def counted(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each call of its function takes."""
    ways: list[str] = []
    inner = own(module)

    def told(*args: object, **named: object) -> object:
        ways.append(module.explain(*args, **named))
        return inner(*args, **named)

    monkeypatch.setattr(module.frontend, inner.__name__, told)
    return ways


def test_the_function_is_replaced_until_the_block_ends(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = counted(module, monkeypatch)
    net, x, before = model(layer(module).__base__).eval(), torch.randn(2, 5, 96), theirs(module)
    with torch.no_grad():
        expected = net(x)
        with module.patch() as patch:
            assert len(patch) == 1
            torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
    assert theirs(module) is before
    assert len(ways) == 2
    assert all(w.startswith("variant") for w in ways)


def test_attention_is_replaced_in_modules_that_call_it(attention: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    mix, before = nn.MultiheadAttention(256, 4, batch_first=True).requires_grad_(False), theirs(attention)
    x = torch.randn(2, 9, 256)
    expected = mix(x, x, x, need_weights=False)[0]
    ways = counted(attention, monkeypatch)
    with attention.patch():
        torch.testing.assert_close(mix(x, x, x, need_weights=False)[0], expected, rtol=1e-4, atol=1e-4)
    assert [way.partition(" ")[0] for way in ways] == ["variant"]
    assert functional.scaled_dot_product_attention is before


def test_the_modules_of_one_model_are_replaced(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = counted(module, monkeypatch)
    norm = layer(module).__base__
    net, other, x = model(norm).eval(), model(norm).eval(), torch.randn(2, 5, 96)
    expected, keys = net(x), list(net.state_dict())
    patch = module.patch(net)
    assert len(patch) == 2
    assert all(type(m) is layer(module) for m in net.modules() if isinstance(m, norm))
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
        other(x)
    assert len(ways) == 2
    assert list(net.state_dict()) == keys
    patch.undo()
    patch.undo()
    assert not any(type(m) is layer(module) for m in net.modules())
    with pytest.raises(TypeError, match=r"a model is a torch\.nn\.Module, got int"):
        module.patch(5)


def test_a_module_that_was_parametrised_since_is_pytorchs_again_and_keeps_its_weight(module: ModuleType) -> None:
    norm = layer(module).__base__
    net, x = nn.Sequential(norm(96)), torch.randn(5, 96)
    expected = 2 * net(x)
    patch = module.patch(net)
    nn.utils.parametrize.register_parametrization(net[0], "weight", Doubled())
    patch.undo()
    assert not isinstance(net[0], layer(module))
    torch.testing.assert_close(net(x), expected)
    nn.utils.parametrize.remove_parametrizations(net[0], "weight")
    assert type(net[0]) is norm


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripts_have_pytorchs_function(module: ModuleType, attention: ModuleType) -> None:
    with module.patch(), attention.patch():
        norm, mix = torch.jit.script(layer(module).__base__(96)), torch.jit.script(Attention())
    x = torch.randn(2, 4, 5, 96)
    assert torch.equal(norm(x), layer(module).__base__(96)(x))
    assert torch.equal(mix(x), functional.scaled_dot_product_attention(x, x, x, scale=0.2))


def test_patches_end_in_any_order(module: ModuleType) -> None:
    name, before = name_of(module), theirs(module)
    first = module.patch()
    setattr(functional, name, others := lambda *a, **k: before(*a, **k))
    try:
        first.undo()
        assert theirs(module) is others  # what somebody else has put there stays
    finally:
        setattr(functional, name, before)
    with pytest.raises(ZeroDivisionError), module.patch():
        1 / 0  # noqa: B018
    assert theirs(module) is before
