"""`return_mean` and `return_rstd` of the norms: the statistics behind the results, by a variant or PyTorch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from evo.export import find_exporter
from tests.export.exports import request_for
from tests.runtime.conftest import FLOAT64, NORMS, TRAINED, Importer

Call = dict[str, Any]
NAMES = {"layernorm": "layer_norm", "rmsnorm": "rms_norm", "add_layernorm": "add_layer_norm", "add_rmsnorm": "add_rms_norm"}
SINGLE = "rows=64,cols=96,dtype=float32"
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class Norm:
    """The function of a package, and calls of it."""

    def __init__(self, module: ModuleType) -> None:
        (self.name,) = {*NAMES.values()} & {*module.__all__}
        self.module, self.own = module, getattr(module, self.name)
        self.centred, self.added = "layer" in self.name, "add" in self.name
        self.statistics = ("mean", "rstd") if self.centred else ("rstd",)
        self.tensors = ("x", "residual") if self.added else ("input",)

    def call(self, *shape: int, axes: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
        ends = shape[len(shape) - axes :]
        found: Call = {name: torch.randn(shape, dtype=torch.float64).mul(3).add(1).to(dtype) for name in self.tensors}
        found |= {} if self.added else {"normalized_shape": ends}
        found |= {n: torch.randn(ends).to(dtype) for n in (("weight", "bias") if self.centred else ("weight",))}
        return found | {"eps": 1e-5} | options

    def flags(self) -> Iterator[dict[str, bool]]:
        """Each way to ask for them, the empty one last."""
        for asked in product((True, False), repeat=len(self.statistics)):
            yield {f"return_{name}": flag for name, flag in zip(self.statistics, asked, strict=True)}

    @property
    def all(self) -> dict[str, bool]:
        return next(self.flags())

    def expected(self, call: Call) -> dict[str, torch.Tensor]:
        """Results and statistics in float64, less the dtype's rounding of the sum."""
        x = call["x"] + call["residual"] if self.added else call["input"]
        over = tuple(range(-len(call.get("normalized_shape", (0,))), 0))
        wide = x.double()
        mean = wide.mean(over, keepdim=True) if self.centred else torch.zeros_like(wide)
        rstd = ((wide - mean).square().mean(over, keepdim=True) + call["eps"]).rsqrt()
        y = (wide - mean) * rstd * call["weight"] + (call["bias"] if self.centred else 0)
        found = {"y": y, **({"sum": x} if self.added else {}), **({"mean": mean} if self.centred else {}), "rstd": rstd}
        shapes = {**dict.fromkeys(found, x.shape), **dict.fromkeys(self.statistics, x.shape[: x.ndim - len(over)])}
        return {name: t.reshape(shapes[name]) for name, t in found.items()}

    def check(self, results: Any, call: Call, flags: dict[str, bool]) -> None:
        """Values, dtypes and shapes of all results."""
        wanted = {n: t for n, t in self.expected(call).items() if n not in self.statistics or flags[f"return_{n}"]}
        dtype = call[self.tensors[0]].dtype
        assert type(results) is tuple
        for (name, theirs), ours in zip(wanted.items(), results, strict=True):
            own = dtype if name not in self.statistics else torch.float64 if dtype == torch.float64 else torch.float32
            tolerance = TOLERANCES[own]
            assert (ours.dtype, ours.shape) == (own, theirs.shape), name
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)
            assert not (ours.requires_grad and name in self.statistics)


@pytest.fixture(scope="module", params=[*NAMES, "layernorm, native"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Packages of both passes, whose forward gives the statistics, with the Python launcher and a native one."""
    kernel, _, native = request.param.partition(", ")
    if native:
        found: ModuleType = request.getfixturevalue("trained")(f"trained_{kernel}")
        return found
    out: Path = tmp_path_factory.mktemp("export") / f"statistics_{kernel}"
    saved = TRAINED["trained_layernorm" if "layer" in kernel else "trained_rmsnorm"]
    parts = [f"{sizes},{saved}" for sizes in (SINGLE, FLOAT64, NORMS[2])]
    backward = request_for("cpu", "native", out, SINGLE, FLOAT64, kernel=f"{kernel}_backward")
    find_exporter("module").export(request_for("cpu", "native", out, *parts, kernel=kernel), backward)
    importer: Importer = request.getfixturevalue("use")
    return importer(out)


@pytest.fixture
def norm(loaded: ModuleType) -> Iterator[Norm]:
    torch.manual_seed(0)
    loaded.also_serve(measure=False, gradients=True)
    yield Norm(loaded)
    loaded.also_serve(gradients=False)


SHAPES: list[tuple[tuple[int, ...], int, torch.dtype]] = [
    ((7, 96), 1, torch.float32),
    ((3, 5, 96), 1, torch.float32),
    ((96,), 1, torch.float32),
    ((5, 2, 4, 24), 2, torch.float32),
    ((2, 6, 256), 1, torch.bfloat16),
    ((2, 3, 96), 1, torch.float64),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "axes", "dtype"), SHAPES, ids=str)
def test_a_variant_gives_what_is_asked_for(norm: Norm, shape: tuple[int, ...], axes: int, dtype: torch.dtype) -> None:
    call = norm.call(*shape, axes=1 if norm.added else axes, dtype=dtype)
    for flags in norm.flags():
        if any(flags.values()):
            assert norm.module.explain(**call, **flags).startswith("variant")
            assert norm.module.explain(**call, **flags).endswith("Python launcher")
            norm.check(norm.own(**call, **flags), call, flags)


@pytest.mark.slow
def test_a_call_that_asks_for_none_is_as_ever(norm: Norm) -> None:
    call, flags = norm.call(7, 96), [*norm.flags()][-1]
    assert not any(flags.values())
    plain = norm.own(**call)
    assert isinstance(plain, tuple) is norm.added
    for one, other in zip((plain,), (norm.own(**call, **flags),), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert norm.module.explain(**call, **flags) == norm.module.explain(**call)
    assert norm.own(**call, **norm.all)[0].equal(plain[0] if norm.added else plain)
    operator = norm.module.frontend.NATIVE.operator
    assert norm.module.explain(**call).endswith("native launcher" if operator else "Python launcher")
    assert operator is None or str(operator._schema).endswith("-> Tensor")


def gradients(norm: Norm, call: Call, function: Callable[..., Any]) -> tuple[Any, list[torch.Tensor]]:
    """The results of a function, and gradients of all tensors of the call from its differentiable ones."""
    call = {n: t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    found = function(**call)
    of = found[: 1 + norm.added] if isinstance(found, tuple) else (found,)
    loss = sum((y.double() * (i + 1)).sin().sum() for i, y in enumerate(of))
    leaves = [t for t in call.values() if isinstance(t, torch.Tensor)]
    return found, list(torch.autograd.grad(loss, leaves))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_differentiable_and_statistics_are_not(norm: Norm, dtype: torch.dtype, served: bool) -> None:
    norm.module.also_serve(gradients=served)
    call = norm.call(3, 5, 96, dtype=dtype)
    wanted = gradients(norm, call, lambda **given: norm.module.frontend._original(*given.values()))[1]
    for flags in norm.flags():
        found, each = gradients(norm, call, lambda flags=flags, **given: norm.own(**given, **flags))
        if any(flags.values()):
            norm.check(found, call, flags)
            assert ("Recorded" in type(found[0].grad_fn).__name__) is served
        for ours, theirs in zip(each, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=10 * TOLERANCES[dtype], atol=10 * TOLERANCES[dtype])
    recorded = {**call, norm.tensors[0]: call[norm.tensors[0]].requires_grad_()}
    way = norm.module.explain(**recorded, **norm.all)
    assert way.startswith("variant" if served else "PyTorch: gradients are being recorded")


@pytest.mark.slow
def test_a_step_is_served_whose_backward_is(loaded: ModuleType, use: Importer, tmp_path: Path) -> None:
    """As a package serves at first: what trains by variants of both passes."""
    fresh = Norm(use(Path(shutil.copytree(Path(loaded.__file__ or "").parent, tmp_path / "fresh_statistics"))))
    for frozen in (False, True):
        call = fresh.call(7, 96)
        call[fresh.tensors[0]].requires_grad_(not frozen)
        call["weight"].requires_grad_()
        way = fresh.module.explain(**call, **fresh.all)
        assert way.startswith("PyTorch: no variant of the backward serves it" if frozen else "variant")
        found = fresh.own(**call, **fresh.all)
        assert ("Recorded" in type(found[0].grad_fn).__name__) is not frozen
        fresh.check(found, call, fresh.all)


@pytest.mark.slow
def test_the_backward_notices_statistics_that_were_written_to(norm: Norm) -> None:
    call = norm.call(7, 96)
    call[norm.tensors[0]].requires_grad_()
    y, *_, rstd = norm.own(**call, return_rstd=True)
    rstd.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


LEFT: dict[str, tuple[str, Callable[[Norm], Call]]] = {
    "a dtype": ("nothing was tuned for float16", lambda norm: norm.call(7, 96, dtype=torch.float16)),
    "an eps": ("eps is not a float", lambda norm: norm.call(7, 96, eps=1e-13)),
    "no memory": ("an argument holds no memory", lambda norm: norm.call(0, 96)),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LEFT)
def test_pytorch_gives_what_no_variant_does(norm: Norm, what: str) -> None:
    reason, make = LEFT[what]
    call = make(norm)
    for flags in norm.flags():
        if any(flags.values()):
            assert norm.module.explain(**call, **flags).startswith(f"PyTorch: {reason}")
            norm.check(norm.own(**call, **flags), call, flags)


@pytest.mark.parametrize("axes", [1, 2])
def test_pytorch_gives_them_where_no_variant_does(exported: Path, exported_rmsnorm: Path, use: Importer, axes: int) -> None:
    for folder in (exported, exported_rmsnorm):
        norm = Norm(use(folder))
        call = norm.call(5, 4, 24 * axes, axes=axes) if axes == 2 else norm.call(3, 7, 96)
        for flags in norm.flags():
            if any(flags.values()):
                assert norm.module.explain(**call, **flags).startswith("PyTorch: ")
                norm.check(norm.own(**call, **flags), call, flags)


@pytest.mark.slow
def test_they_are_those_of_meta_and_fake_tensors_too(norm: Norm) -> None:
    call = norm.call(3, 5, 96)
    forms = [(t.shape, t.dtype) for t in norm.own(**call, **norm.all)]
    meta = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    assert [(t.shape, t.dtype) for t in norm.own(**meta, **norm.all)] == forms
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
        assert [(t.shape, t.dtype) for t in norm.own(**fake, **norm.all)] == forms


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
def test_torch_compile_makes_one_graph_of_such_a_call(norm: Norm, recorded: bool) -> None:
    call = norm.call(3, 5, 96)
    call[norm.tensors[0]].requires_grad_(recorded)
    compiled = torch.compile(lambda given: norm.own(**given, **norm.all), backend="aot_eager", fullgraph=True)
    found = compiled(call)
    norm.check(found, call, norm.all)
    if recorded:
        wanted = gradients(norm, call, lambda **given: norm.module.frontend._original(*given.values()))[1][0]
        loss = sum((y.double() * (i + 1)).sin().sum() for i, y in enumerate(found[: 1 + norm.added]))
        (ours,) = torch.autograd.grad(loss, [call[norm.tensors[0]]])  # type: ignore[arg-type]
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_autocast_leaves_such_a_call_to_pytorch(norm: Norm) -> None:
    call = norm.call(3, 5, 96)
    with torch.autocast("cpu", torch.bfloat16):
        plain = norm.own(**call)
        found = norm.own(**call, **norm.all)
        assert norm.module.explain(**call, **norm.all) == "PyTorch: autocast is enabled"
    assert found[0].equal(plain[0] if norm.added else plain)
    norm.check(found, call, norm.all)


def test_the_default_eps_of_rms_norm_is_that_of_its_result(exported_rmsnorm: Path, use: Importer) -> None:
    norm = Norm(use(exported_rmsnorm))
    for dtype in (torch.float32, torch.float64):
        x = torch.full((3, 96), 1e-5, dtype=dtype)
        y, rstd = norm.own(x, (96,), return_rstd=True)
        torch.testing.assert_close(y, x * rstd[:, None])
        assert torch.equal(y, functional.rms_norm(x, (96,)))


@pytest.mark.slow
def test_bad_input_is_told_as_pythons_functions_do(norm: Norm) -> None:
    call = norm.call(7, 96)
    with nullcontext() if norm.centred else pytest.raises(TypeError, match="unexpected keyword argument 'return_mean'"):
        norm.own(**call, return_mean=True)
    with pytest.raises(TypeError, match="positional arguments"):
        norm.own(*call.values(), True, True, True)
    with pytest.raises(TypeError):
        norm.own(**{**call, norm.tensors[0]: None}, return_rstd=True)


LATER = """
def later(input, normalized_shape, weight=None, bias=None, eps=1e-05, scale=1.0):
    return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps) * scale


FUNCTION = Function(
    original=later,
"""


def test_an_argument_of_a_later_pytorch_is_not_taken_with_them(copy_of: Path, use: Importer) -> None:
    stated = (copy_of / "function.py").read_text()
    for old, new in (
        ("FUNCTION = Function(\n", LATER), ('    original="torch.nn.functional.layer_norm",\n', ""),
        ('    operator="aten.layer_norm(input, normalized_shape, weight, bias, eps)",\n', ""),
    ):  # fmt: skip
        assert old in stated
        stated = stated.replace(old, new)
    (copy_of / "function.py").write_text(stated.replace('"""\n', '"""\n\nimport torch\n', 1))
    norm = Norm(use(copy_of))
    call = norm.call(7, 96)
    norm.check(norm.own(**call, **norm.all), call, norm.all)
    assert torch.equal(norm.own(**call, scale=2.0), 2 * norm.own(**call, scale=1.0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        norm.own(**call, scale=2.0, return_rstd=True)
