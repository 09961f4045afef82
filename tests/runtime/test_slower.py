"""What was measured to be slower than PyTorch is left to PyTorch, unless it is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.export.module import EXPORTER, _advice, remarks
from evo.ready import _figure, _variant
from evo.runtime import cpu
from tests.export.exports import edit_manifest, manifest_of, request_for
from tests.runtime.conftest import Importer, not_tuned

HERE = cpu.model()
SLOWER = {"ratio": 1.25, "ratio_low": 1.2, "ratio_high": 1.3}
TIE = {"ratio": 1.02, "ratio_low": 0.99, "ratio_high": 1.05}


def timed(
    figures: dict[str, float],
    variants: tuple[int, ...] = (0,),
    *,
    disturbed: bool = False,
    stage: str = "final",
    device: str = HERE,
    beside: str = torch.__version__,
) -> Any:
    """A change to a manifest: what was measured of these variants, beside which version of PyTorch."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["measured_on"] = [{"torch": beside} for _ in manifest["measured_on"]]
        for index in variants:
            timing = {"stage": stage, "median_us": 2.0, "torch_us": 1.6, "disturbed": disturbed, **figures}
            manifest["variants"][index].update(timing=timing, record={"device": device})

    return change


def ways(module: Any, *columns: int) -> list[str]:
    """How calls are explained, all of them right."""
    found = []
    for cols in columns:
        x, weight = torch.randn(33, cols), torch.randn(cols)
        own, theirs = (f.layer_norm(x, (cols,), weight) for f in (module, functional))
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)
        found.append(module.explain(x, (cols,), weight))
    return found


def test_a_slower_variant_is_left_to_pytorch_unless_asked_for(copy_of: Path, use: Importer) -> None:
    edit_manifest(copy_of, timed(SLOWER))
    module = use(copy_of)
    near, far = ways(module, 100, 1000)
    assert near.startswith(f"PyTorch: measured to be faster at 64x96 on {HERE}, where a variant has 0.80 times its speed; ")
    assert "also_serve(slower=True)" in near
    assert far.startswith("variant 1 ")
    module.also_serve(slower=True)
    assert [way.split(" (")[0] for way in ways(module, 100, 1000)] == ["variant 0", "variant 1"]
    module.also_serve(untuned=None)
    assert ways(module, 100)[0].startswith("variant 0 ")
    module.also_serve(slower=False)
    assert ways(module, 100)[0].startswith("PyTorch: measured")


def test_a_variant_that_was_disturbed_is_not_said_to_be_measured(copy_of: Path) -> None:
    edit_manifest(copy_of, timed(SLOWER, disturbed=True))
    assert "1 right, its time not known (the machine was too busy)" in _advice(copy_of)[0]
    variant = _variant(manifest_of(copy_of)["variants"][0])
    assert (variant.speedup, _figure(variant)) == (None, "right; its time is not known")


def test_the_export_and_what_is_shipped_say_what_is_left(copy_of: Path) -> None:
    edit_manifest(copy_of, timed(SLOWER))
    [remark] = remarks(copy_of)
    assert remark.startswith("rows=64,cols=96,dtype=float32,")
    assert f": left to PyTorch on native (measured to be faster at 64x96 on {HERE}, where a variant has 0.80" in remark
    variant = _variant(manifest_of(copy_of)["variants"][0])
    assert (round(variant.speedup or 0.0, 2), variant.slower) == (0.8, True)
    assert _figure(variant) == f"0.80 times PyTorch's speed on {HERE}, so left to it"


@pytest.mark.parametrize(
    ("figures", "how"),
    [(TIE, {}), (SLOWER, {"disturbed": True}), (SLOWER, {"stage": "search"}), (SLOWER, {"device": "another CPU"})],
)
def test_only_an_undisturbed_final_on_such_a_device_is_a_reason(
    copy_of: Path, use: Importer, figures: dict[str, float], how: dict[str, Any]
) -> None:
    edit_manifest(copy_of, timed(figures, **how))
    assert ways(use(copy_of), 96)[0].startswith("variant 0 ")


def test_a_slower_variant_can_still_be_checked_and_timed(copy_of: Path, command: Any) -> None:
    def change(manifest: dict[str, Any]) -> None:
        del manifest["variants"][1:]
        timed(SLOWER)(manifest)

    edit_manifest(copy_of, change)
    for way in (["check"], ["bench", "--rounds", "1"]):
        code, text = command(copy_of, *way, "--json")
        assert code == 0, text
        [variant] = json.loads(text)
        assert variant.get("right", True)
        assert variant.get("timings", True)


def test_none_is_compiled_from_a_slower_one(attention_copy: Any, use: Importer) -> None:
    folder = attention_copy()
    edit_manifest(folder, timed(SLOWER))
    module = use(folder)
    module.also_serve(untuned=True)
    assert "; measured to be faster at 2x4x4x128x128x64" in not_tuned(module, 32)


def test_on_a_gpu_the_figures_of_such_a_gpu_count(
    tmp_path: Path, use: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled here, and loaded nowhere: measured on sm_90, and built from that for sm_89."""
    out = tmp_path / "layernorm_for_gpus"
    request = request_for("cuda", "sm_90", out, "rows=64,cols=1024,dtype=float16")
    EXPORTER.export(replace(request, builds=("sm_90", "sm_89")))
    edit_manifest(out, timed(SLOWER, device="such a GPU"))
    dispatch, key = use(out).frontend.DISPATCH, (0, torch.float16, 64, 1024, 0, 0, 0, 0, 0)
    for capability, name in (((9, 0), "such a GPU"), ((9, 0), "another"), ((8, 9), "another"), ((8, 6), "another")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0, found=capability: found)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0, found=name: found)
        for asked in (False, True):
            dispatch.also_serve(slower=asked)  # else it says that no GPU is there to load it
            left = name == "such a GPU" and not asked
            assert ("measured to be faster at 64x1024 on such a GPU" in dispatch[key]) is left
