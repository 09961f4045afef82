"""A package with code for several architectures on a GPU: its own code first, PTX where there is no other."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.export import find_exporter
from evo.targets import find_target
from evo.targets.cuda import driver_version, ptx_advice
from evo.targets.languages.cuda_cpp import nvrtc_version
from tests.export.exports import edit_manifest, request_for

pytestmark = pytest.mark.gpu

TEXTS = ("rows=64,cols=1024,dtype=float16", "rows=64,cols=768,dtype=bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Found on this GPU; built for it, for what is older (sm_80), and as PTX of that."""
    arch = find_target("cuda").device().arch
    if arch in ("sm_75", "sm_80"):
        pytest.skip("nothing older is built for")
    request = request_for("cuda", arch, tmp_path_factory.mktemp("export") / "layernorm_for_several", *TEXTS)
    find_exporter("module").export(replace(request, builds=find_target("cuda").with_intermediate((arch, "sm_80"))))
    return request.out


def way_of(module: ModuleType, cols: int = 1024, dtype: torch.dtype = torch.float16) -> str:
    """How a call goes, after checking what it gives."""
    args: tuple[Any, ...] = (torch.randn(64, cols, device="cuda", dtype=dtype), (cols,))
    own, theirs = module.layer_norm(*args), functional.layer_norm(*args)
    torch.testing.assert_close(own, theirs, rtol=3e-2, atol=3e-2)
    return str(module.explain(*args))


def needs_ptx() -> None:
    if ptx_advice(nvrtc_version(), driver_version()):
        pytest.skip("this driver is older than the compiler: no PTX")


def test_a_gpu_takes_the_code_of_its_own_architecture(folder: Path, use: Callable[[Path], ModuleType]) -> None:
    module, arch = use(folder), find_target("cuda").device().arch
    assert way_of(module).startswith(f"variant 0 (cuda {arch}, float16, ")
    assert way_of(module, 768, torch.bfloat16).startswith(f"variant 1 (cuda {arch}, bfloat16, ")


def test_ptx_of_an_older_architecture_is_right_on_this_gpu(folder: Path, use: Callable[[Path], ModuleType]) -> None:
    needs_ptx()
    module, arch = use(folder), find_target("cuda").device().arch
    with module.frontend.DISPATCH.only(4):
        assert way_of(module).startswith(f"variant 4 (cuda compute_80, float16, tuned for 64x1024 on {arch})")
    verdicts_of = importlib.import_module(f"{module.__name__}.runtime.trial").verdicts
    verdicts = list(verdicts_of(module.frontend, 4, seed=7))
    assert [v for v in verdicts if v.reason] == []
    assert sum(v.on_variant for v in verdicts) >= 20


def test_without_any_code_for_this_gpu_calls_are_pytorchs(
    folder: Path, tmp_path: Path, use: Callable[[Path], ModuleType]
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "layernorm_for_another"))

    def strip(manifest: dict[str, Any]) -> None:
        manifest["variants"] = [{**v, "arch": "sm_999"} for v in manifest["variants"]]

    edit_manifest(copy, strip)
    assert way_of(use(copy)).startswith("PyTorch: nothing was tuned for float16 on this device (there is cuda sm_999 ")
