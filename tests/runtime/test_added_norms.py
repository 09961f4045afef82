"""`add_rms_norm` and `add_layer_norm`: a sum and its norm in one, as a package serves them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.export import find_exporter
from tests.export.exports import request_for
from tests.runtime.conftest import NORMS, Importer


@pytest.fixture(scope="module", params=["add_rmsnorm", "add_layernorm"])
def module(request: pytest.FixtureRequest, use: Importer, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    out = tmp_path_factory.mktemp("export") / f"exported_{request.param}"
    find_exporter("module").export(request_for("cpu", "native", out, *NORMS, kernel=request.param))
    found = use(out)
    found.also_serve(measure=False, slower=True)
    return found


def composed(module: ModuleType, x: Any, residual: Any, *vectors: Any, **options: Any) -> Any:
    norm = functional.rms_norm if hasattr(module, "add_rms_norm") else functional.layer_norm
    options.setdefault("eps", 1e-6 if norm is functional.rms_norm else 1e-5)
    return norm(x + residual, x.shape[-1:], *vectors, **options), x + residual


def own(module: ModuleType) -> Any:
    return getattr(module, "add_rms_norm", None) or module.add_layer_norm


def made(module: ModuleType, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    number = 1 if hasattr(module, "add_rms_norm") else 2
    tensors = [torch.randn(*shape), torch.randn(*shape), *(torch.randn(shape[-1]) for _ in range(number))]
    return [t.to(dtype) for t in tensors]


def agree(found: Any, wanted: Any) -> None:
    tolerance = 1e-4 if wanted[0].dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(found[1], wanted[1]), "the sum is rounded as PyTorch rounds it"


CALLS: dict[str, Any] = {
    "a matrix": lambda m: (made(m, 7, 96), {}),
    "several axes": lambda m: (made(m, 2, 5, 1024), {}),
    "16 bits": lambda m: (made(m, 3, 256, dtype=torch.bfloat16), {"eps": 1e-3}),
    "no weight": lambda m: (made(m, 4, 96)[:2], {}),
    "a tensor that lies otherwise": lambda m: ([made(m, 96, 7)[0].T, *made(m, 7, 96)[1:]], {}),
}
LEFT: dict[str, Any] = {
    "residual has not the shape of x": lambda m: ([made(m, 7, 96)[0], *made(m, 1, 96)[1:]], {}),
    "weight is not contiguous": lambda m: ([*made(m, 7, 96)[:2], torch.randn(192)[::2], *made(m, 7, 96)[3:]], {}),
    "an argument holds no memory": lambda m: (made(m, 0, 96), {}),
    "eps is not a float from": lambda m: (made(m, 7, 96), {"eps": 0.0}),
    "gradients are being recorded": lambda m: ([made(m, 7, 96)[0].requires_grad_(), *made(m, 7, 96)[1:]], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_variant_gives_the_norm_and_the_sum(module: ModuleType, name: str) -> None:
    args, options = CALLS[name](module)
    way = module.explain(*args, **options)
    assert way.startswith("variant"), way
    agree(own(module)(*args, **options), composed(module, *args, **options))


@pytest.mark.slow
@pytest.mark.parametrize("reason", LEFT)
def test_what_no_variant_serves_is_pytorchs_sum_and_norm(module: ModuleType, reason: str) -> None:
    args, options = LEFT[reason](module)
    assert module.explain(*args, **options).startswith(f"PyTorch: {reason}")
    for one, other in zip(own(module)(*args, **options), composed(module, *args, **options), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_gradients_are_pytorchs_also_where_variants_serve_the_forward(module: ModuleType) -> None:
    module.also_serve(gradients=True)
    try:
        args = made(module, 7, 96)
        theirs = [t.clone().requires_grad_() for t in args]
        ours = [t.clone().requires_grad_() for t in args]
        assert module.explain(*ours).startswith("variant")
        for call, tensors in ((own(module), ours), (lambda *t: composed(module, *t), theirs)):
            y, total = call(*tensors)
            (y * y + 3 * total.sin()).sum().backward()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)
    finally:
        module.also_serve(gradients=False)
