"""`evo.ready`: shipped kernels are found by their folders and imported when they are asked for, without the engine.

On a CPU, whose C++ compiler stands for NVRTC: a source is compiled when it is first used, tried, and kept."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evo.export import find_exporter
from evo.problem.kernel import FUNCTION_FILES
from evo.problem.loading import template_root
from evo.ready import functions_of
from evo.runtime.package import Package
from tests.ended import run_python
from tests.export.exports import request_for

ROOT = Path(__file__).parent.parent
LAYERNORM = "rows=64,cols=96,dtype=float32"
ATTENTION = "batch=1,heads=2,kv_heads=2,q_len=32,kv_len=32,head_dim=64,dtype=float32"
pytestmark = pytest.mark.xdist_group("ready")  # what is exported serves all of them
UNWANTED = ("optuna", "sqlalchemy", "alembic", "jinja2", "typer", "rich")


RECORD = {"run": "demo", "device": "a device"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages to be shipped: layernorm for CPUs and GPUs, attention for CPUs, rmsnorm for CPUs with its backward."""
    folder = tmp_path_factory.mktemp("shipped")
    cpu = request_for("cpu", "native", folder / "layernorm", LAYERNORM, "rows=8,cols=256,dtype=bfloat16", **RECORD)
    gpu = request_for("cuda", "sm_90", folder / "layernorm", "rows=64,cols=1024,dtype=float16", **RECORD)
    shipped = find_exporter("shipped")
    shipped.export(replace(gpu, builds=("sm_90", "sm_89", "compute_89")), cpu)
    shipped.export(request_for("cpu", "native", folder / "attention", ATTENTION, kernel="attention"))
    pair = (("rmsnorm", f"{LAYERNORM},rstd=true"), ("rmsnorm_backward", LAYERNORM))
    shipped.export(*(request_for("cpu", "native", folder / "rmsnorm", text, kernel=kernel) for kernel, text in pair))
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without what searches, measures and exports, and without a kernel."""
    (tmp_path / "evo").mkdir()
    for name in ("__init__.py", "ready.py", "errors.py"):
        shutil.copy(ROOT / "evo" / name, tmp_path / "evo")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("runtime", "problem"):  # the latter judges variants
        shutil.copytree(ROOT / "evo" / name, tmp_path / "evo" / name, ignore=ignored)
    shutil.copytree(ROOT / "templates", tmp_path / "templates", ignore=ignored)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "README.md").write_text("what lies here\n")
    return tmp_path


def ship(exported: Path, checkout: Path, name: str, as_: str = "") -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(exported / name, checkout / "kernels" / (as_ or name), ignore=ignored))


def python(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(checkout / "cache")}
    return run_python(checkout, "-W", "error::ImportWarning", *arguments, **own)


def told(checkout: Path, program: str) -> Any:
    """What a program prints as JSON."""
    done = python(checkout, "-c", f"import json\n{program}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(checkout: Path, program: str) -> str:
    done = python(checkout, "-c", program)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_function_runs_the_shipped_variant_which_is_compiled_once_or_is_pytorchs(exported: Path, checkout: Path) -> None:
    folder = ship(exported, checkout, "layernorm")
    assert {path.suffix for path in folder.iterdir()} == {".json", ".cu", ".cpp", ".diff"}
    program = (
        "import torch\n"
        "from evo.ready import LayerNorm, layer_norm, layernorm\n"
        "same = layer_norm is layernorm.layer_norm and LayerNorm is layernorm.LayerNorm\n"
        "layernorm.also_serve(measure=False)\n"
        "found = [same]\n"
        "for dtype in (torch.float32, torch.float64):\n"
        "    x = torch.randn(64, 96, dtype=dtype)\n"
        "    close = torch.allclose(layer_norm(x, (96,)), torch.nn.functional.layer_norm(x, (96,)), atol=1e-5)\n"
        "    found += [layernorm.explain(x, (96,)), close]\n"
        "print(json.dumps(found))"
    )
    first = told(checkout, program)
    same, single, single_close, double, double_close = first
    assert same
    assert single_close
    assert double_close
    assert single.startswith("variant 1 (cpu native, float32, tuned for 64x96)")
    assert double.startswith("PyTorch: nothing was tuned for float64 on this device (there is cpu native bfloat16, ")
    cache = checkout / "cache" / "evo-kernels"
    kept = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(kept) == 1
    assert told(checkout, program) == first
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == kept


def test_a_model_uses_all_modules_that_are_shipped_and_a_backward_is_found_within_its_forward(
    exported: Path, checkout: Path
) -> None:
    for name in ("layernorm", "attention", "rmsnorm"):
        ship(exported, checkout, name)
    classes, undone, functions, way = told(
        checkout,
        "import torch\n"
        "from evo import ready\n"
        "from evo.ready import rmsnorm\n"
        "model = torch.nn.Sequential(torch.nn.LayerNorm(96), torch.nn.RMSNorm(96))\n"
        "names = lambda: [type(m).__module__ for m in model]\n"
        "patch = ready.patch(model)\n"
        "classes = [len(patch), *names()]\n"
        "patch.undo()\n"
        "undone = names()\n"
        "with ready.patch() as patch:\n"
        "    functions = [len(patch), torch.nn.functional.rms_norm is rmsnorm.rms_norm]\n"
        "rmsnorm.backward.also_serve(measure=False)\n"
        "x = torch.ones(64, 96)\n"
        "way = rmsnorm.backward.explain(x, x, (96,), torch.ones(64), x[0], [True, True])\n"
        "print(json.dumps([classes, undone, functions, way]))",
    )
    assert classes == [2, "evo.ready.layernorm.frontend", "evo.ready.rmsnorm.frontend"]
    assert undone == ["torch.nn.modules.normalization"] * 2
    assert functions == [3, True]
    assert way.startswith("variant 0 (cpu native, float32, tuned for 64x96 weight dweight)")
    done = python(checkout, "-m", "evo.ready.rmsnorm.backward", "check")
    assert done.returncode == 0, done.stderr
    assert "right: 39 cases on it" in done.stdout, done.stdout


def test_importing_one_kernel_imports_no_other_and_nothing_that_searches(exported: Path, checkout: Path) -> None:
    ship(exported, checkout, "layernorm")
    ship(exported, checkout, "attention")
    first, second, third = told(
        checkout,
        "import sys\n"
        "of = ('evo.ready', 'evo.runtime')\n"
        "known = lambda m: m in of or (m.startswith('evo.ready.') and m.count('.') == 2)\n"
        "def of_evo(): return sorted(m for m in sys.modules if known(m) or m.startswith('evo.') and not m.startswith(of))\n"
        "import evo.ready\n"
        f"first = [of_evo(), [m for m in ('torch', *{UNWANTED}) if m in sys.modules]]\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "from evo.ready import layer_norm\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        f"second = [of_evo(), sorted(new & {{*{UNWANTED}}})]\n"
        "from evo.ready import scaled_dot_product_attention\n"
        "print(json.dumps([first, second, of_evo()]))",
    )
    assert first == [["evo.ready", "evo.runtime"], []]
    loaded, unwanted = second
    of_problem = [m for m in third if m == "evo.errors" or m.startswith("evo.problem")]  # by which functions are stated
    assert [m for m in loaded if m not in of_problem] == ["evo.ready", "evo.ready.layernorm", "evo.runtime"]
    assert unwanted == []
    others = [m for m in third if m not in of_problem]
    assert others == ["evo.ready", "evo.ready.attention", "evo.ready.layernorm", "evo.runtime"]


def test_a_new_kernel_is_found_and_checks_itself_without_a_change_to_any_file(exported: Path, checkout: Path) -> None:
    ship(exported, checkout, "layernorm")
    program = "import evo.ready\nprint(json.dumps(dir(evo.ready)))"
    before = {path: path.read_bytes() for path in checkout.rglob("*.py")}
    assert set(told(checkout, program)) == {
        *("ReadyKernel", "ReadyVariant", "kernels", "packages", "patch"),
        *("LayerNorm", "layer_norm", "layernorm"),
    }
    ship(exported, checkout, "attention")
    added = {"attention", "scaled_dot_product_attention"}
    assert added <= set(told(checkout, program))
    assert told(
        checkout,
        "import torch\n"
        "from evo.ready import attention, scaled_dot_product_attention\n"
        "q = torch.randn(1, 2, 32, 64)\n"
        "y = scaled_dot_product_attention(q, q, q)\n"
        "right = torch.allclose(y, torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-4)\n"
        "attention.also_serve(measure=False)\n"
        "print(json.dumps([right, attention.explain(q, q, q)[:7]]))",
    ) == [True, "variant"]
    done = python(checkout, "-W", "ignore", "-m", "evo.ready.attention", "check", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  right: " in done.stdout
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("names", [("layernorm", "layernorm_again"), ("layer_norm",)])
def test_two_owners_of_one_name_are_refused_and_named(exported: Path, checkout: Path, names: tuple[str, ...]) -> None:
    """Two packages of one function, and a folder that is called like its function."""
    places = [ship(exported, checkout, "layernorm", as_=name) for name in names]
    sentence = refused(checkout, "from evo.ready import layer_norm")
    assert sentence.startswith("ImportError: 'layer_norm' is in ")
    assert all(str(place) in sentence for place in places)
    assert "export one function to one package, which takes all its dtypes and devices" in sentence


def test_what_cannot_be_read_keeps_nobody_from_the_other_kernels(exported: Path, checkout: Path) -> None:
    ship(exported, checkout, "layernorm")
    broken = ship(exported, checkout, "attention")
    (broken / "manifest.json").write_text("{")
    (checkout / "kernels" / "notes").mkdir()
    assert told(checkout, "from evo.ready import layer_norm\nprint(json.dumps(layer_norm.__name__))") == "layer_norm"
    assert f"{broken}/manifest.json is no manifest" in refused(checkout, "import evo.ready; evo.ready.kernels()")
    done = python(checkout, "-m", "evo.ready")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"evo: {broken}/manifest.json is no manifest")


def test_what_is_not_shipped_is_an_attribute_error_that_says_what_is(exported: Path, checkout: Path) -> None:
    assert "there are: nothing yet" in refused(checkout, "import evo.ready; evo.ready.softmax")
    ship(exported, checkout, "layernorm")
    sentence = refused(checkout, "import evo.ready; evo.ready.softmax")
    assert sentence.startswith("AttributeError: no kernel that is shipped with this evo is or has 'softmax'")
    assert sentence.endswith("LayerNorm, layer_norm, layernorm")
    assert refused(checkout, "from evo.ready import softmax").startswith("ImportError: cannot import name 'softmax'")
    done = python(checkout, "-m", "evo.ready.layernrm", "check")
    assert "is or has 'layernrm'; there are: LayerNorm, layer_norm, layernorm" in done.stderr
    assert told(checkout, "import evo.ready\nprint(json.dumps(hasattr(evo.ready, '__wrapped__')))") is False


def test_the_list_of_kernels_tells_what_each_is_for_and_where_it_is_from(exported: Path, checkout: Path) -> None:
    assert python(checkout, "-m", "evo.ready").stdout == "no kernel is shipped with this evo\n"
    ship(exported, checkout, "layernorm")
    program = (
        "import sys, evo.ready\n"
        "from dataclasses import asdict\n"
        "[k] = evo.ready.kernels()\n"
        "print(json.dumps([asdict(k), 'torch' in sys.modules], default=str))"
    )
    kernel, imported = told(checkout, program)
    assert not imported
    assert (kernel["name"], kernel["functions"]) == ("layernorm", ["LayerNorm", "layer_norm"])
    assert kernel["replaces"] == "torch.nn.functional.layer_norm"
    off = dict.fromkeys(("residual", "sum", "mean", "rstd", "weight_dtype"), 0)
    shapes = [{"rows": r, "cols": c, **off} for r, c in ((64, 1024), (64, 96), (8, 256), (64, 1024))]
    assert [v["shape"] for v in kernel["variants"]] == shapes
    assert [(v["arch"], v["standing"], v["dtype"], v["candidate"]) for v in kernel["variants"]] == [
        ("sm_90", "measured", "float16", "test/0"),
        ("native", "measured", "float32", "test/0"),
        ("native", "measured", "bfloat16", "test/1"),
        ("sm_89", "compiled", "float16", "test/0"),
    ]
    assert {(v["run"], v["device"]) for v in kernel["variants"]} == {("demo", "a device")}
    assert json.loads(python(checkout, "-m", "evo.ready", "--json").stdout) == [kernel]
    text = python(checkout, "-m", "evo.ready").stdout
    assert text.startswith("layernorm: LayerNorm, layer_norm: 4 variants (native, sm_89, sm_90)\n")
    assert len(text.splitlines()) == 3, "a line a kernel, and what to do next"
    text = python(checkout, "-m", "evo.ready", "--all").stdout
    assert re.search(r"  in place of torch.nn.functional.layer_norm; all with bias=true\S*\n", text)
    assert re.search(r"  rows=64,cols=1024,dtype=float16 +sm_90 +right; its time is not known\n", text)
    assert re.search(r"  rows=64,cols=1024,dtype=float16 +sm_89 +found on another architecture, ", text)


def test_sources_that_are_almost_the_same_are_stored_once(exported: Path) -> None:
    package = Package("shipped", [str(exported / "layernorm")])
    ninety, eighty_nine = (next(v for v in package.variants if v.arch == arch) for arch in ("sm_90", "sm_89"))
    assert eighty_nine.source() == ninety.source().replace(b"sm_90", b"sm_89") != ninety.source()
    assert sum(path.suffix == ".cu" for path in package.folders[0].iterdir()) == 1


def test_no_two_kernels_would_ship_one_name() -> None:
    """Functions and modules that packages offer are one kernel's own."""
    owners: dict[str, list[str]] = {}
    for folder in sorted({path.parent for file in FUNCTION_FILES for path in template_root().glob(f"*/{file}")}):
        for name in {folder.name, *functions_of(folder)}:
            owners.setdefault(name, []).append(folder.name)
    assert {name: among for name, among in owners.items() if len(among) > 1} == {}
