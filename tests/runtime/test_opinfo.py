"""PyTorch's own samples of the two operations, with its tolerances: eps below 0, no rows, masks, dropout, every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from evo.errors import UsageError
from evo.export import find_exporter
from evo.targets import find_target
from tests.export.exports import request_for

pytestmark = pytest.mark.slow

opinfo = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")

WHOLE = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
HALF = {"cpu": WHOLE["cpu"], "cuda": WHOLE["cuda"][1:]}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def arch() -> tuple[str, str]:
    """Target and architecture."""
    try:
        return ("cuda", find_target("cuda").device().arch) if device() == "cuda" else ("cpu", "native")
    except UsageError as error:
        pytest.skip(str(error))


def built(kernel: str, workloads: list[str], out: Path, use: Callable[[Path], ModuleType], launchers: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVO_KERNELS_CACHE", str(launchers))
        find_exporter("module").export(request_for(*arch(), out, *workloads, kernel=kernel))
        module = use(out)
        module.build()
        module.also_serve(gradients=True)
        return module


@pytest.fixture(scope="module")
def layernorm(tmp_path_factory: pytest.TempPathFactory, use: Any, launchers: Path) -> Any:
    """For the numbers of columns that the samples have."""
    names = [str(dtype).removeprefix("torch.") for dtype in WHOLE[device()]]
    workloads = [f"rows=8,cols={cols},dtype={name}" for cols in (1, 2, 6) for name in names]
    return built("layernorm", workloads, tmp_path_factory.mktemp("export") / "opinfo_layernorm", use, launchers)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory, use: Any, launchers: Path) -> Any:
    sizes = "batch=4,heads=4,kv_heads=4,q_len=64,kv_len=64,head_dim=64"
    names = [str(dtype).removeprefix("torch.") for dtype in HALF[device()]]
    workloads = [f"{sizes},dtype={name},causal={causal}" for name in names for causal in ("false", "true")]
    return built("attention", workloads, tmp_path_factory.mktemp("export") / "opinfo_attention", use, launchers)


def samples(name: str, dtype: torch.dtype) -> Iterator[Any]:
    (info,) = (op for op in opinfo.op_db if op.name == name)
    torch.manual_seed(0)
    yield from info.sample_inputs(device(), dtype, requires_grad=True)


def widened(value: Any) -> Any:
    """Heads of 64 where the samples have 8, which no variant is for; as a leaf of its own."""
    if not isinstance(value, torch.Tensor) or value.shape[-1:] != (8,):
        return value
    return value.detach().repeat(*[1] * (value.dim() - 1), 8).requires_grad_(value.requires_grad)


def compare(own: Any, theirs: Any, args: list[Any], options: dict[str, Any], tolerance: dict[str, float]) -> None:
    """Results without and with gradients, and the gradients."""
    for recording in (False, True):
        results = []
        for function in (own, theirs):
            torch.manual_seed(1)  # of dropout
            with torch.set_grad_enabled(recording):
                results.append(function(*args, **options))
        torch.testing.assert_close(results[0], results[1], equal_nan=True, **tolerance)
        assert results[0].stride() == results[1].stride()
    wanted = [a for a in [*args, *options.values()] if isinstance(a, torch.Tensor) and a.requires_grad]
    upstream = torch.ones_like(results[0])
    found = [torch.autograd.grad(y, wanted, upstream, allow_unused=True) for y in results]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", WHOLE[device()], ids=str)
def test_layer_norm_agrees_on_pytorchs_samples(layernorm: Any, dtype: torch.dtype) -> None:
    served = 0
    # PyTorch's own tolerance for float32 (toleranceOverride of the sample's operation); those of assert_close otherwise.
    tolerance = {"atol": 1e-5, "rtol": 1e-3} if dtype == torch.float32 else {}
    for sample in samples("nn.functional.layer_norm", dtype):
        args = [sample.input, *sample.args]
        served += layernorm.explain(*args, **sample.kwargs).startswith("variant")
        compare(layernorm.layer_norm, torch.nn.functional.layer_norm, args, sample.kwargs, tolerance)
    assert served >= 4


@pytest.mark.parametrize("wide", [False, True], ids=["8", "64"])
@pytest.mark.parametrize("dtype", HALF[device()], ids=str)
def test_attention_agrees_on_pytorchs_samples(attention: Any, dtype: torch.dtype, wide: bool) -> None:
    served, theirs = 0, torch.nn.functional.scaled_dot_product_attention
    change = widened if wide else lambda value: value
    for sample in samples("nn.functional.scaled_dot_product_attention", dtype):
        args = [change(a) for a in (sample.input, *sample.args)]
        served += attention.explain(*args, **sample.kwargs).startswith("variant")
        # Two roundings of values up to 9, where weighted values cancel: PyTorch's samples of 8 never get to a variant.
        roundings = 8 * torch.finfo(dtype).eps
        tolerance = {"atol": roundings, "rtol": roundings} if wide and dtype != torch.float32 else {}
        compare(attention.scaled_dot_product_attention, theirs, args, sample.kwargs, tolerance)
    assert served >= 1 if wide else served == 0
