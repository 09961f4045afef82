"""Models of Transformers after `evo.ready.patch(model)`: tiny ones with random weights, beside themselves as they were."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import evo.ready
from evo.export import find_exporter
from tests.ended import run_python
from tests.export.exports import request_for

pytestmark = [
    # What PyTorch says of rms_norm with a float32 weight beside 16 bits.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]
ROOT = Path(__file__).parent.parent
LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 99, "n_positions": 64, "n_embd": 64, "n_layer": LAYERS, "n_head": 4}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
DRY_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _encoder(**more: Any) -> dict[str, Any]:
    wanted = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {name: SIZES[name] for name in wanted} | more


MODELS: dict[str, Callable[..., Any]] = {
    "llama": lambda **k: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **k)),
    "mistral": lambda **k: tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=5, **k)),
    "qwen2": lambda **k: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, **k)),
    "qwen3": lambda **k: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES, **k)),
    "gemma": lambda **k: tf.GemmaForCausalLM(tf.GemmaConfig(**SIZES, **k)),
    "gemma2": lambda **k: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SIZES, **k)),
    "gemma3": lambda **k: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SIZES, sliding_window=5, **k)),
    "gpt2": lambda **k: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, **DRY, **k)),
    "vit": lambda **k: tf.ViTForImageClassification(tf.ViTConfig(**_encoder(image_size=32, patch_size=8), **k)),
    "bert": lambda **k: tf.BertForMaskedLM(tf.BertConfig(**_encoder(vocab_size=99), **DRY_BERT, **k)),
}
REPLACED = {
    "llama": {"LlamaRMSNorm": 5, "the addition before LlamaDecoderLayer.post_attention_layernorm": 2},
    "mistral": {"MistralRMSNorm": 5, "the addition before MistralDecoderLayer.post_attention_layernorm": 2},
    "qwen2": {"Qwen2RMSNorm": 5, "the addition before Qwen2DecoderLayer.post_attention_layernorm": 2},
    "qwen3": {"Qwen3RMSNorm": 9, "the addition before Qwen3DecoderLayer.post_attention_layernorm": 2},
    "gemma": {"GemmaRMSNorm": 5, "the addition before GemmaDecoderLayer.post_attention_layernorm": 2},
    "gemma2": {"Gemma2RMSNorm": 9, "the addition before Gemma2DecoderLayer.pre_feedforward_layernorm": 2},
    "gemma3": {"Gemma3RMSNorm": 13, "the addition before Gemma3DecoderLayer.pre_feedforward_layernorm": 2},
    "gpt2": {"LayerNorm": 5, "the addition before GPT2Block.ln_2": 2},
    "vit": {"LayerNorm": 5, "the addition before ViTLayer.layernorm_after": 2},
    "bert": {
        "LayerNorm": 6,
        "the addition before BertEmbeddings.LayerNorm": 1,
        "the addition before BertSelfOutput.LayerNorm": 2,
        "the addition before BertOutput.LayerNorm": 2,
    },
}
"""With 2 layers, beside the attention of the configuration, for which Gemma 2 does not ask "sdpa"."""
WRITERS = sorted({*MODELS} - {"vit", "bert"})


def made(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model whose weights, those of norms too, are random."""
    torch.manual_seed(0)
    model = MODELS[name](**options)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.to(dtype).eval()


def inputs(name: str) -> dict[str, torch.Tensor]:
    """A batch, of which one text is shorter, and begins with padding."""
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    ids, mask = torch.randint(3, 99, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def results(model: Any, name: str) -> list[torch.Tensor]:
    """Logits where there is no padding, the loss and all gradients, in float32."""
    model.zero_grad()
    given = inputs(name)
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
    found = model(**given)
    found.loss.backward()
    seen = given["attention_mask"].bool() if "attention_mask" in given else ...
    gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]
    return [found.logits[seen].detach().float(), found.loss.detach().float(), *gradients]


def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each package's function is asked from here on."""
    found = dict[str, int]()
    for name in ("rmsnorm", "layernorm", "add_rmsnorm", "add_layernorm", "attention"):
        frontend = getattr(evo.ready, name).frontend

        def counted(*args: Any, name: str = name, inner: Any = frontend.served) -> Any:
            found[name] = found.get(name, 0) + 1
            return inner(*args)

        monkeypatch.setattr(frontend, "served", counted)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_are_as_before(name: str) -> None:
    model = made(name)
    before = results(model, name)
    patch = evo.ready.patch(model)
    found = dict(patch.replaced)
    config = type(model.config).__name__
    assert found == REPLACED[name] | ({} if name == "gemma2" else {f"attention of {config}": 1})
    assert len(patch) == sum(found.values())
    now = results(model, name)
    assert len(now) == len(before) > 20
    for ours, theirs in zip(now, before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    patch.undo()
    assert not [m for m in model.modules() if type(m).__module__.startswith("evo.")]
    assert all(map(torch.equal, results(model, name), before))


@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_it_is_as_near_to_float32_as_before(name: str) -> None:
    exact = results(made(name), name)
    model = made(name, torch.bfloat16)
    before = results(model, name)
    with evo.ready.patch(model):
        now = results(model, name)
    assert all(map(torch.equal, results(model, name), before))

    def off(found: list[torch.Tensor]) -> list[float]:
        """Relative error of the logits and of all gradients."""
        parts = [(found[0], exact[0])], [*zip(found[2:], exact[2:], strict=True)]
        return [
            (sum((a - b).square().sum() for a, b in part) / sum(b.square().sum() for _, b in part)).sqrt().item()
            for part in parts
        ]

    for ours, theirs in zip(off(now), off(before), strict=True):
        assert ours <= 1.2 * theirs


@pytest.mark.parametrize("name", WRITERS)
def test_it_generates_the_same_tokens_with_a_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = made(name), inputs(name)
    del given["labels"]

    def write() -> torch.Tensor:
        written: torch.Tensor = model.generate(
            **given, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, use_cache=True
        )
        return written

    before = write()
    assert before.shape == (2, 20)
    asked = calls(monkeypatch)
    with evo.ready.patch(model) as patch:
        assert torch.equal(write(), before)
    kind = "layernorm" if name == "gpt2" else "rmsnorm"
    norms = sum(n for what, n in patch.replaced.items() if what.endswith("Norm"))
    fused = sum(n for what, n in patch.replaced.items() if what.startswith("the addition"))
    assert asked[kind] == 8 * (norms - fused)
    assert asked[f"add_{kind}"] == 8 * fused == 8 * LAYERS
    assert asked.get("attention", 0) == (0 if name == "gemma2" else 8 * LAYERS)
    asked.clear()
    assert torch.equal(write(), before)
    assert not asked


def test_one_model_is_patched_and_once() -> None:
    first, second, given = made("llama"), made("llama"), inputs("llama")
    patch = evo.ready.patch(first)
    again = evo.ready.patch(first)
    assert len(again) == 0
    assert type(second.model.layers[0]) is tf.models.llama.modeling_llama.LlamaDecoderLayer
    assert second.config._attn_implementation == "sdpa"
    again.undo()
    assert isinstance(first.model.layers[0], tf.models.llama.modeling_llama.LlamaDecoderLayer)
    assert type(first.model.layers[0]).__module__ == "evo.transformers"
    torch.testing.assert_close(first(**given).logits, second(**given).logits, rtol=1e-4, atol=1e-5)
    with evo.ready.patch(second):
        patch.undo()
        assert type(second.model.norm).__module__ == "evo.transformers"
        assert second.config._attn_implementation == "evo"
    assert first.config._attn_implementation == second.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_copies_stay_patched_and_files_are_as_before(name: str, tmp_path: Path) -> None:
    model, given = made(name), inputs(name)
    keys = list(model.state_dict())
    patch = evo.ready.patch(model)
    logits = model(**given).logits
    assert list(model.state_dict()) == keys
    torch.save(model, tmp_path / "model.pt")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(tmp_path / "model.pt", weights_only=False)]
    model.save_pretrained(tmp_path)
    assert '"evo"' not in (tmp_path / "config.json").read_text()
    plain = type(model).from_pretrained(tmp_path).eval()
    patch.undo()
    for found in copies:
        assert torch.equal(found(**given).logits, logits)
        assert any(type(m).__module__ == "evo.transformers" for m in found.modules())
    assert torch.equal(plain(**given).logits, model(**given).logits)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**given).logits, model(**given).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    model = made("gemma3", use_cache=False).train()
    expected = results(model, "gemma3")
    with evo.ready.patch(model):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        for ours, theirs in zip(results(model, "gemma3"), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_it_compiles_in_one_graph(name: str) -> None:
    model, given = made(name), inputs(name)
    del given["labels"]
    expected = model(**given).logits
    with evo.ready.patch(model), torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(**given, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bert"])
def test_autocast_gives_the_same_dtype_and_nearly_the_same(name: str) -> None:
    model, given = made(name), inputs(name)
    exact = model(**given).logits
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**given).logits
        with evo.ready.patch(model):
            found = model(**given).logits
    assert found.dtype == expected.dtype
    off, theirs = ((t.float() - exact).norm().item() for t in (found, expected))
    assert off <= 1.2 * theirs


def test_hidden_states_are_recorded_as_before() -> None:
    model, given = made("llama"), inputs("llama")
    expected = model(**given, output_hidden_states=True).hidden_states
    model = made("llama")
    with evo.ready.patch(model):
        found = model(**given, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == LAYERS + 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_cross_attention_of_gpt2_has_its_branch() -> None:
    model, given = made("gpt2", add_cross_attention=True), inputs("gpt2")
    seen = {"encoder_hidden_states": torch.randn(2, 5, 64)}
    alone, expected = model(**given).logits, model(**given, **seen).logits
    assert not torch.allclose(alone, expected)
    with evo.ready.patch(model) as patch:
        assert patch.replaced["the addition before GPT2Block.ln_2"] == LAYERS
        torch.testing.assert_close(model(**given).logits, alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(**given, **seen).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_gemmas_norms_follow_their_weight_however_it_is_written() -> None:
    norm = tf.models.gemma3.modeling_gemma3.Gemma3RMSNorm(64).eval()
    model, x = torch.nn.Sequential(norm), torch.randn(3, 64)
    plain = tf.models.gemma3.modeling_gemma3.Gemma3RMSNorm(64)

    def right() -> None:
        plain.weight = norm.weight
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)

    with evo.ready.patch(model):
        right()
        norm.weight += 1
        right()
        norm.weight.data.mul_(3)  # which its version does not tell
        right()
        norm.load_state_dict({"weight": torch.randn(64)})
        right()
        with torch.inference_mode():
            right()


def wrapped(function: Any) -> Any:
    return functools.wraps(function)(lambda self, *args, **named: function(self, *args, **named))


def test_what_somebody_changed_is_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tf.models.llama.modeling_llama.LlamaDecoderLayer
    derived = type(layer.__name__, (layer,), {"__module__": layer.__module__})
    derived.forward = wrapped(layer.forward)
    model, given = made("llama", attn_implementation="eager"), inputs("llama")
    first, second = model.model.layers
    first.__class__ = derived
    second.post_attention_layernorm.forward = second.post_attention_layernorm.forward  # as accelerate's hooks do
    expected = model(**given).logits
    patch = evo.ready.patch(model)
    lines = str(patch).splitlines()
    assert f"left alone: 1 x additions in LlamaDecoderLayer: its forward was wrapped by {__name__}" in lines
    assert "left alone: 1 x attention of LlamaConfig: it is 'eager', not 'sdpa'" in lines
    assert "replaced: 4 x LlamaRMSNorm" in lines
    assert not [line for line in lines if "replaced" in line and "addition" in line]
    assert type(first) is derived
    torch.testing.assert_close(model(**given).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_asks_for_sdpa_by_name_keeps_its_attention() -> None:
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = tf.FalconForCausalLM(tf.FalconConfig(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    patch = evo.ready.patch(model)
    (told,) = [text for text in patch.left if text.startswith("attention")]
    assert told.startswith("attention of FalconConfig: Falcon")
    assert model.config._attn_implementation == "sdpa"


VARIANTS = """
import json, torch, transformers, evo.ready
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=99, hidden_size=256, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)).eval()
ids = torch.randint(3, 99, (2, 32))
served = {}
for name in ("rmsnorm", "add_rmsnorm", "attention"):
    package = getattr(evo.ready, name)
    package.also_serve(measure=False, slower=True)
    def counted(*args, name=name, inner=package.frontend.served):
        found = inner(*args)
        served[name] = served.get(name, 0) + (found is not None)
        return found
    package.frontend.served = counted
with torch.no_grad():
    expected = model(ids).logits
    patch = evo.ready.patch(model)
    model(ids)  # the first compiles
    served.clear()
    found = model(ids).logits
print(json.dumps([served, (found - expected).abs().max().item(), expected.abs().max().item()]))
"""


@pytest.mark.slow
def test_variants_serve_a_patched_model(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("evo", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    norm = "rows=64,cols=256,dtype=float32"
    attention = "batch=2,heads=4,kv_heads=4,q_len=32,kv_len=32,head_dim=64,dtype=float32,causal=true"
    for kernel, workload in (("rmsnorm", norm), ("add_rmsnorm", norm), ("attention", attention)):
        request = request_for("cpu", "native", tmp_path / "kernels" / kernel, workload, kernel=kernel)
        find_exporter("shipped").export(request)
    own = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_python(tmp_path, "-W", "ignore", "-c", VARIANTS, **own)
    assert done.returncode == 0, done.stderr
    served, off, size = json.loads(done.stdout)
    assert served == {"rmsnorm": 3, "add_rmsnorm": 2, "attention": 2}
    assert off <= 1e-4 * size


def test_transformers_is_not_imported_for_other_models(tmp_path: Path) -> None:
    program = (
        "import sys, torch, evo.ready\n"
        "print(len(evo.ready.patch(torch.nn.Sequential(torch.nn.LayerNorm(8)))), 'transformers' in sys.modules)"
    )
    done = run_python(tmp_path, "-W", "ignore", "-c", program, PYTHONPATH=str(ROOT))
    assert done.stdout.split() == ["1", "False"], done.stderr
