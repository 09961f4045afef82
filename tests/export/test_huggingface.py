"""Hugging Face's `kernels` loads what is exported for it, and kernelize takes its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from owners import huggingface_kernels
from torch import nn
from torch.nn import functional

from evo.export import find_exporter
from tests.export.exports import request_for

WORKLOADS = ("rows=64,cols=96,dtype=float32", "rows=64,cols=256,dtype=bfloat16")
EXPORTER = find_exporter("huggingface")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "evo-layernorm"
    EXPORTER.export(request_for("cpu", "native", out, *WORKLOADS))
    return out


def test_get_local_kernel_loads_the_functions_and_the_layers(folder: Path) -> None:
    kernel = huggingface_kernels().get_local_kernel(folder)
    x = torch.randn(64, 96)
    with torch.no_grad():
        assert kernel.explain(x, (96,)).startswith("variant 0")
        assert torch.allclose(kernel.layer_norm(x, (96,)), functional.layer_norm(x, (96,)), atol=1e-5)
    own, theirs = nn.LayerNorm(96), nn.LayerNorm(96)
    kernel.layers.LayerNorm.forward(own, x).square().sum().backward()
    theirs(x).square().sum().backward()
    assert torch.allclose(own.weight.grad, theirs.weight.grad, atol=1e-5), "gradients are PyTorch's"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernelize_puts_the_layer_into_a_model(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = huggingface_kernels()
    arch = "native" if device == "cpu" else "sm_{}{}".format(*torch.cuda.get_device_capability())
    out = tmp_path / "evo-layernorm"
    EXPORTER.export(request_for(device, arch, out, "rows=64,cols=96,dtype=float32"))

    @kernels.use_kernel_forward_from_hub("LayerNorm")
    class Norm(nn.LayerNorm):
        pass

    model = nn.Sequential(nn.Linear(32, 96), Norm(96, eps=1e-6), nn.Linear(96, 8)).to(device)
    nn.init.normal_(model[1].weight)
    x = torch.randn(64, 32, device=device)
    with torch.no_grad():
        expected = model(x)
    repository = kernels.LocalLayerRepository(out, layer_name="LayerNorm")
    mode = kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping({"LayerNorm": {device: {mode: repository}}}):
        model = kernels.kernelize(model, mode=mode, device=device, use_fallback=False)
    loaded = kernels.get_local_kernel(out)
    called = []
    original = loaded.layers.layer_norm
    monkeypatch.setattr(loaded.layers, "layer_norm", lambda *args: called.append(args) or original(*args))
    with torch.no_grad():
        assert torch.allclose(model(x), expected, atol=1e-4)
        assert loaded.explain(*called[0]).startswith("variant 0")
    assert len(called) == 1


def test_attention_stands_in_for_a_function(tmp_path: Path) -> None:
    kernels = huggingface_kernels()
    text = "batch=1,heads=4,kv_heads=2,q_len=70,kv_len=70,head_dim=64,dtype=float32,causal=true"
    EXPORTER.export(request_for("cpu", "native", tmp_path / "evo-attention", text, kernel="attention"))

    @kernels.use_kernel_forward_from_hub("ScaledDotProductAttention")
    class Attention(nn.Module):
        def forward(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]  # noqa: E501
            raise AssertionError("this is what is replaced")

    repository = kernels.LocalLayerRepository(tmp_path / "evo-attention", layer_name="ScaledDotProductAttention")
    layer = Attention()
    with kernels.use_kernel_mapping({"ScaledDotProductAttention": {"cpu": {kernels.Mode.INFERENCE: repository}}}):
        layer = kernels.kernelize(layer, mode=kernels.Mode.INFERENCE, device="cpu")
    q, k, v = torch.randn(1, 4, 70, 64), torch.randn(1, 2, 70, 64), torch.randn(1, 2, 70, 64)
    with torch.no_grad():
        found = layer(q, k, v, is_causal=True, enable_gqa=True)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(found, expected, atol=1e-4)


def test_the_metadata_names_the_gpu_it_is_for(tmp_path: Path) -> None:
    EXPORTER.export(request_for("cuda", "sm_90", tmp_path / "evo_ln", "rows=64,cols=1024,dtype=float16"))
    metadata = json.loads((tmp_path / "evo_ln/build/torch-cuda/metadata.json").read_text())
    assert (metadata["name"], metadata["backend"]) == ("evo-ln", {"type": "cuda", "archs": ["9.0"]})
    rust: Any = pytest.importorskip("kernels._rust", reason="kernels is not installed")
    found = rust.Metadata.read_from_file(tmp_path / "evo_ln/build/torch-cuda/metadata.json")
    assert found.backend.archs == ["9.0"]


def test_two_exports_of_different_content_do_not_share_a_module(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "evo-layernorm"
    EXPORTER.export(request_for("cpu", "native", other, "rows=64,cols=128,dtype=float32"))
    ids = [json.loads((f / "build/torch-cpu/metadata.json").read_text())["id"] for f in (folder, other)]
    assert ids[0] != ids[1]
    assert all(i.isidentifier() for i in ids)
