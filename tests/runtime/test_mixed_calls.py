"""Norms with float32 weights beside inputs of 16 bits, as a package serves them: the values and gradients of float32
arithmetic, rounded once."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch.nn import functional

from evo.export import find_exporter
from tests.export.exports import request_for
from tests.runtime.conftest import Importer

pytestmark = pytest.mark.slow

NAMES = {
    "rmsnorm": "rms_norm", "layernorm": "layer_norm", "add_rmsnorm": "add_rms_norm", "add_layernorm": "add_layer_norm",
}  # fmt: skip
SHORT = "rows=64,cols=96,dtype=bfloat16"
PYTHON = [*NAMES]
NATIVE = [f"{name}, native" for name in ("layernorm", "add_rmsnorm")]
"""One with a bias and one of two results: each takes half a minute to build."""


@pytest.fixture(scope="module", params=[*PYTHON, *NATIVE])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Packages of both passes, of weights in float32 and in bfloat16."""
    kernel, _, launcher = request.param.partition(", ")
    out = tmp_path_factory.mktemp("export") / f"mixed_{kernel}"
    saved = "rstd=true" if "rms" in kernel else "mean=true,rstd=true"
    both = [f"{SHORT}{weights}" for weights in (",weight_dtype=float32", "")]
    forward = request_for("cpu", "native", out, *(f"{w},{saved}" for w in both), kernel=kernel)
    backward = request_for("cpu", "native", out, *both, kernel=f"{kernel}_backward")
    find_exporter("module").export(forward, backward)
    importer: Importer = request.getfixturevalue("natively" if launcher else "use")
    module = importer(out)
    module.backward.also_serve(measure=False)
    return module


@pytest.fixture
def module(loaded: ModuleType) -> ModuleType:
    torch.manual_seed(0)
    loaded.also_serve(measure=False, slower=True)
    return loaded


def name_of(module: ModuleType) -> str:
    return next(name for name in (*NAMES.values(),) if hasattr(module, name))


def tensors(module: ModuleType, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """What is normalised, and weights that bfloat16 would round."""
    name = name_of(module)
    inputs = [(2 * torch.randn(7, 96)).to(dtype) for _ in range(2 if name.startswith("add") else 1)]
    return [*inputs, *(torch.randn(96) for _ in range(1 if "rms" in name else 2))]


def called(module: ModuleType, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    shape = () if name_of(module).startswith("add") else ((96,),)
    found = getattr(module, name_of(module))(given[0], *shape, *given[1:], eps=1e-5)
    return found if isinstance(found, tuple) else (found,)


def exact(module: ModuleType, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """In float64, of the sum as it is rounded, whose gradients are those of a sum."""
    wide = [t.double() for t in given]
    norm = functional.rms_norm if "rms" in name_of(module) else functional.layer_norm
    if not name_of(module).startswith("add"):
        return (norm(wide[0], (96,), *wide[1:], eps=1e-5),)
    total = wide[0] + wide[1]
    total = total + ((given[0] + given[1]).double() - total).detach()
    return norm(total, (96,), *wide[2:], eps=1e-5), total


def explained(module: ModuleType, given: list[torch.Tensor]) -> str:
    shape = () if name_of(module).startswith("add") else ((96,),)
    return str(module.explain(given[0], *shape, *given[1:], eps=1e-5))


def rounded_once(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """But for float32's errors: half of a step, of 2^-7 of a number at most."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8 * 1.01, atol=1e-5)


def test_a_variant_for_them_gives_results_that_are_rounded_once(module: ModuleType) -> None:
    given = tensors(module)
    assert "weight_dtype=float32" in explained(module, given)
    found, wanted = called(module, given), exact(module, given)
    for one, other in zip(found, wanted, strict=True):
        rounded_once(one, other)


def test_weights_of_the_inputs_dtype_have_their_own_variant(module: ModuleType) -> None:
    given = [t.bfloat16() for t in tensors(module)]
    way = explained(module, given)
    assert way.startswith("variant")
    assert "weight_dtype" not in way
    found, wanted = called(module, given), exact(module, given)
    for one, other in zip(found, wanted, strict=True):
        rounded_once(one, other)


def test_other_pairs_of_dtypes_are_pytorchs(module: ModuleType) -> None:
    short = tensors(module, torch.float16)
    *inputs, weight = tensors(module)[: -1 if "layer" in name_of(module) else None]
    halves = [weight.half() for _ in range(2 if "layer" in name_of(module) else 1)]
    others = {
        "nothing was tuned for float16": short,
        "weight_dtype is none of same, float32": [*inputs, *halves],
    }
    if "layer" in name_of(module):
        others["bias is not of the dtype that the kernel takes"] = [*inputs, weight, weight.bfloat16()]
    for reason, given in others.items():
        assert explained(module, given).startswith(f"PyTorch: {reason}")


def test_without_a_weight_the_bias_says_which(module: ModuleType) -> None:
    if "layer" not in name_of(module):
        pytest.skip("it has no bias")
    *inputs, weight, bias = tensors(module)
    for given in ([*inputs, None, bias], [*inputs, weight, None]):
        assert "weight_dtype=float32" in explained(module, given)
        found = called(module, given)
        none = [t if t is not None else torch.full((96,), float(t is not bias and given[-1] is bias)) for t in given]
        rounded_once(found[0], exact(module, none)[0])


def test_gradients_are_those_of_float32_weights(module: ModuleType) -> None:
    given = tensors(module)
    ours, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    assert "weight_dtype=float32" in explained(module, ours)
    dy = torch.randn(2, 7, 96).bfloat16()
    found, wanted = called(module, ours), exact(module, theirs)
    torch.autograd.backward(found, [*dy[: len(found)]])
    torch.autograd.backward(wanted, [*dy[: len(found)].double()])
    inputs = len(given) - (1 if "rms" in name_of(module) else 2)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.grad is not None
        assert one.grad.dtype == one.dtype
        tolerance = {"rtol": 2**-7, "atol": 2e-2} if number < inputs else {"rtol": 1e-5, "atol": 1e-4}
        torch.testing.assert_close(one.grad.double(), other.grad.double(), **tolerance)


def test_gradients_that_no_variant_gives_and_gradients_of_gradients_are_pytorchs(module: ModuleType) -> None:
    given = [t.requires_grad_() for t in tensors(module)]
    wide = [t.detach().clone().requires_grad_() for t in given]
    module.also_serve(gradients=True)
    each = []
    for call, leaves in ((called, given), (exact, wide)):
        y = call(module, leaves)[0]
        first = torch.autograd.grad(y.float().square().sum(), leaves, create_graph=True)
        each.append((first, torch.autograd.grad(first[-1].float().square().sum(), leaves[0])))
    for ours, theirs in zip(*each, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).abs().max() < 0.03 * other.abs().max() + 0.03


def test_its_check_finds_every_variant_right(module: ModuleType) -> None:
    if name_of(module).startswith("add"):
        pytest.skip("its cases have inputs of several shapes, which are none of PyTorch's sum")
    trial = __import__("importlib").import_module(f"{module.__name__}.runtime.trial")
    for frontend in (module.frontend, module.backward.frontend):
        for number in range(2):
            verdicts = list(trial.verdicts(frontend, number, 3, 4))
            assert [v for v in verdicts if v.reason] == []
            assert sum(v.on_variant for v in verdicts) >= 15
