"""Existing models with the functions of an exported package in the place of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional


@pytest.fixture(scope="module", params=["Python", "native"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "native":
        return request.getfixturevalue("native")
    return request.getfixturevalue("use")(request.getfixturevalue("exported"))


class Block(nn.Module):
    """Of a transformer, as GPT-2 has it."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 4, batch_first=True)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        found: torch.Tensor = x + self.narrow(functional.gelu(self.widen(self.second(x))))
        return found


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.LayerNorm(96))


def counted(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each call of layer_norm takes."""
    ways: list[str] = []
    inner = module.frontend.layer_norm

    def told(*args: object, **named: object) -> object:
        ways.append(module.explain(*args, **named))
        return inner(*args, **named)

    monkeypatch.setattr(module.frontend, "layer_norm", told)
    return ways


def test_the_function_is_replaced_until_the_block_ends(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = counted(module, monkeypatch)
    net, x, before = model().eval(), torch.randn(2, 5, 96), functional.layer_norm
    with torch.no_grad():
        expected = net(x)
        with module.patch() as patch:
            assert len(patch) == 1
            torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
    assert functional.layer_norm is before
    assert len(ways) == 5
    assert all(w.startswith("variant") for w in ways)


def test_the_modules_of_one_model_are_replaced(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = counted(module, monkeypatch)
    net, other, x = model().eval(), model().eval(), torch.randn(2, 5, 96)
    expected, keys = net(x), list(net.state_dict())
    patch = module.patch(net)
    assert len(patch) == 5
    assert all(type(m) is module.LayerNorm for m in net.modules() if isinstance(m, nn.LayerNorm))
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
        other(x)
    assert len(ways) == 5
    assert list(net.state_dict()) == keys
    patch.undo()
    patch.undo()
    assert not any(type(m) is module.LayerNorm for m in net.modules())


def test_a_model_has_to_be_one(module: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"a model is a torch\.nn\.Module, got int"):
        module.patch(5)


def test_patches_end_in_any_order(module: ModuleType) -> None:
    before = functional.layer_norm
    first = module.patch()
    functional.layer_norm = theirs = lambda *a, **k: before(*a, **k)
    try:
        first.undo()
        assert functional.layer_norm is theirs  # what somebody else has put there stays
    finally:
        functional.layer_norm = before
    with pytest.raises(ZeroDivisionError), module.patch():
        1 / 0  # noqa: B018
    assert functional.layer_norm is before


def test_a_patched_model_learns_as_the_original(native: ModuleType) -> None:
    """Loss by loss, over steps of training with the forward passes on variants."""

    def losses(prepare: Callable[[nn.Module], object]) -> list[float]:
        net = model()
        prepare(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        x, wanted = torch.randn(2, 4, 7, 96, generator=generator)
        found = []
        for _ in range(50):
            loss = functional.mse_loss(net(x), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses(lambda net: None)
    native.also_serve(gradients=True)
    try:
        own = losses(native.patch)
        x = torch.randn(4, 7, 96, requires_grad=True)
        assert native.explain(x, (96,)).startswith("variant")
    finally:
        native.also_serve(gradients=False)
    assert own[-1] < 0.9 * own[0]
    torch.testing.assert_close(torch.tensor(own), torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_a_patched_model_compiles_without_a_break(native: ModuleType) -> None:
    native.also_serve(compiled=True)
    try:
        net, x = model().eval().requires_grad_(False), torch.randn(2, 5, 96)
        expected = net(x)
        with native.patch():
            compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    finally:
        native.also_serve(compiled=False)


def test_the_folder_of_the_package_stays_as_it_was(native: ModuleType, exported: Path) -> None:
    here = Path(str(native.__file__)).parent
    kept = {p.relative_to(exported) for p in exported.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert {p.relative_to(here) for p in here.rglob("*") if p.is_file() and "__pycache__" not in p.parts} == kept
