"""`add_rms_norm` and `add_layer_norm`: a sum and its norm in one, as a package serves them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.export import find_exporter
from tests.export.exports import request_for
from tests.runtime.conftest import FLOAT64, NORMS, Importer


@pytest.fixture(scope="module", params=["add_rmsnorm", "add_layernorm", "add_layernorm, native"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Packages of both passes, with the Python launcher and a native one."""
    kernel, _, launcher = request.param.partition(", ")
    out = tmp_path_factory.mktemp("export") / f"exported_{kernel}"
    saved = "rstd=true" if kernel == "add_rmsnorm" else "mean=true,rstd=true"
    forward = request_for("cpu", "native", out, *NORMS, f"{FLOAT64},{saved}", f"{NORMS[0]},{saved}", kernel=kernel)
    backward = request_for("cpu", "native", out, NORMS[0], FLOAT64, kernel=f"{kernel}_backward")
    find_exporter("module").export(forward, backward)
    importer: Importer = request.getfixturevalue("natively" if launcher else "use")
    return importer(out)


@pytest.fixture
def module(loaded: ModuleType) -> ModuleType:
    torch.manual_seed(0)
    loaded.also_serve(measure=False, slower=True)
    return loaded


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


LOSSES: dict[str, Any] = {
    "both results": lambda y, total: (y * y + 3 * total.sin()).sum(),
    "the norm alone": lambda y, total: (y * y).sum(),
    "the sum alone": lambda y, total: total.sin().sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("constant", [None, 0, 1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_the_composition(module: ModuleType, loss: str, constant: int | None) -> None:
    args = made(module, 2, 5, 96)
    theirs, ours = ([t.clone().requires_grad_(i != constant) for i, t in enumerate(args)] for _ in range(2))
    served = constant != 0  # a package trains the first tensor
    assert module.explain(*ours).startswith("variant" if served else "PyTorch: no variant of the backward serves it")
    for call, tensors in ((own(module), ours), (lambda *t: composed(module, *t), theirs)):
        LOSSES[loss](*call(*tensors)).backward()
    for one, other in zip(ours, theirs, strict=True):
        zero = torch.zeros_like(one)
        found, wanted = (zero if t.grad is None else t.grad for t in (one, other))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_backwards_variant_gives_them_of_both_tensors_at_once(module: ModuleType) -> None:
    x, residual, *vectors = (t.requires_grad_() for t in made(module, 7, 96))
    y, total = own(module)(x, residual, *vectors)
    dy, dsum = torch.randn(2, 7, 96)
    found = torch.autograd.grad([y, total], [x, residual, *vectors], [dy, dsum])
    wide = total.detach()
    mean = wide.mean(1) if len(vectors) == 2 else torch.zeros(7)
    rstd = ((wide - mean[:, None]).square().mean(1) + (1e-5 if len(vectors) == 2 else 1e-6)).rsqrt()
    saved = [mean, rstd] if len(vectors) == 2 else [rstd]
    backward, mask = module.backward, [True] * (2 + len(vectors))
    call = getattr(backward, "add_rms_norm_backward", None) or backward.add_layer_norm_backward
    args = dy, dsum, wide, *saved, *(t.detach() for t in vectors), mask
    assert backward.explain(*args).startswith("variant")
    for one, other in zip((found[0], *found[2:]), call(*args), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], found[1])


@pytest.mark.slow
def test_gradients_can_be_differentiated(module: ModuleType) -> None:
    x, residual, *vectors = (t.double() for t in made(module, 2, 96))
    given = [t.requires_grad_() for t in (x, residual)]

    def both(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y, total = own(module)(x, residual, *vectors)
        return y * total

    assert torch.autograd.gradgradcheck(both, given, atol=1e-3, fast_mode=True)


@pytest.mark.slow
def test_a_module_has_pytorchs_parameters_and_takes_nobodys_place(module: ModuleType) -> None:
    cls = getattr(module, "AddRMSNorm", None) or module.AddLayerNorm
    plain = cls.__bases__[0](96)
    added = cls(96)
    with torch.no_grad():
        for p in plain.parameters():
            p.normal_()
    added.load_state_dict(plain.state_dict())
    x, residual = torch.randn(7, 96), torch.randn(7, 96)
    with torch.no_grad():
        agree(added(x, residual), (plain(x + residual), x + residual))
    with module.patch() as patch:
        assert len(patch) == 0
