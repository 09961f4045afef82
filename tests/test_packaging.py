"""What is installed is complete, and the environment script explains what it cannot do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from evo.export import find_exporter
from tests.ended import run_python
from tests.export.exports import request_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def wheel_of(checkout: Path, folder: Path) -> Path:
    from hatchling.build import build_wheel  # here: an offline GPU machine collects this file without it

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(checkout)
        return folder / build_wheel(str(folder))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, as `pip install` unpacks them."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel_of(ROOT, folder)) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def shipping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout that ships one kernel, for CPUs."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("evo", "templates"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    (copy / "kernels").mkdir()
    shutil.copy(ROOT / "kernels" / "README.md", copy / "kernels")
    texts = ("rows=64,cols=96,dtype=float32", "rows=64,cols=256,dtype=bfloat16")
    find_exporter("shipped").export(request_for("cpu", "native", copy / "kernels" / "layernorm", *texts))
    return copy


@pytest.fixture(scope="module")
def wheel(shipping: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(shipping, tmp_path_factory.mktemp("wheel"))


def test_a_wheel_carries_its_templates_and_finds_them(installed: Path, tmp_path: Path) -> None:
    program = "import evo.problem.loading as k; print(k.template_root(), *k.kernel_names(), sep=chr(10))"
    found = run_python(tmp_path, "-c", program, PYTHONPATH=str(installed))
    assert found.returncode == 0, found.stderr
    root, *kernels = found.stdout.splitlines()
    assert Path(root) == installed / "evo" / "_assets" / "templates"
    assert kernels == sorted(path.parent.name for path in (ROOT / "templates").glob("*/kernel.py"))
    for template in (ROOT / "templates").rglob("*.j2"):
        copy = Path(root) / template.relative_to(ROOT / "templates")
        assert copy.read_bytes() == template.read_bytes()


def test_a_wheel_carries_what_is_not_python_and_installs_nothing_else(installed: Path) -> None:
    def listing(folder: Path) -> dict[str, bytes]:
        files = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}

    assert sorted(path.name.partition("-")[0] for path in installed.iterdir()) == ["evo", "evo_kernels"]
    assert listing(installed / "evo" / "_assets" / "kernels") == listing(ROOT / "kernels")
    own = listing(ROOT / "evo")
    assert {"py.typed", "report/templates/page.html.j2", "runtime/native.h", "export/_kernelbench.py.j2"} <= set(own)
    assert listing(installed / "evo").items() >= own.items()


def test_source_and_wheel_carry_a_kernel_whole(shipping: Path, wheel: Path, tmp_path: Path) -> None:
    from hatchling.build import build_sdist

    kernel = shipping / "kernels" / "layernorm"
    names = {p.relative_to(kernel).as_posix() for p in kernel.rglob("*") if p.is_file()}
    assert {"manifest.json", "sources.diff"} < names, "the other variant is told by how it differs"
    assert len(names) == 3
    runs_it = {"runtime/native.h", "_assets/templates/layernorm/function.py", "_assets/templates/_shared/row.cuh"}
    with zipfile.ZipFile(wheel) as packed:
        place = "evo/_assets/kernels/layernorm/"
        assert {n.removeprefix(place) for n in packed.namelist() if n.startswith(place)} == names
        assert {f"evo/{name}" for name in runs_it} <= set(packed.namelist())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shipping)
        source = tmp_path / build_sdist(str(tmp_path))
    with tarfile.open(source) as archive:
        place = f"{source.name.removesuffix('.tar.gz')}/kernels/layernorm/"
        found = {n.removeprefix(place) for n in archive.getnames() if n.startswith(place)}
    assert names <= found


def test_what_pip_installs_elsewhere_has_the_shipped_kernels(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, where nothing leads to the checkout; PyTorch is borrowed from this one."""
    pytest.importorskip("pip")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True, cwd=tmp_path)
    (site / "borrowed.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    program = (
        "import json, evo, torch\n"
        "from evo.ready import LayerNorm, layer_norm, layernorm, kernels\n"
        "x = torch.randn(64, 96)\n"
        "layernorm.also_serve(measure=False)\n"
        "right = torch.allclose(layer_norm(x, (96,)), torch.nn.functional.layer_norm(x, (96,)), atol=1e-5)\n"
        "print(json.dumps([evo.__file__, right, layernorm.explain(x, (96,)), [k.name for k in kernels()]]))\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([python, "-c", program], env=clean, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    place, right, way, names = json.loads(done.stdout)
    assert Path(place).is_relative_to(site)
    assert right
    assert way.startswith("variant 0 (cpu native, float32, tuned for 64x96)")
    assert names == ["layernorm"]


def make_environment(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the environment script in a copy, so that the checkout's own environment stays as it is."""
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/environment.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV", "CUDA")}
    script = str(folder / "scripts" / "environment.sh")
    bash = shutil.which("bash")
    assert bash
    return subprocess.run(
        [bash, script], env=clean | environment, capture_output=True, text=True, check=False
    )


def path_with(folder: Path, *commands: str) -> str:
    """A PATH on which only the named commands are found."""
    folder.mkdir()
    for command in commands:
        place = shutil.which(command)
        assert place, command
        (folder / command).symlink_to(place)
    return str(folder)


def test_without_any_python_the_environment_script_says_what_to_install(tmp_path: Path) -> None:
    path = path_with(tmp_path / "bin", "dirname", "cat", "cksum")
    done = make_environment(tmp_path / "copy", PATH=path)
    assert done.returncode == 1
    assert "evo needs Python 3.11 to 3.14; python3 here is missing" in done.stderr
    assert "apt-get install" in done.stderr


def test_a_python_without_ensurepip_is_named_with_the_package_that_has_it(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "ensurepip.py").write_text("raise ImportError\n")
    done = make_environment(tmp_path / "copy", PYTHON=sys.executable, PYTHONPATH=str(broken))
    assert done.returncode == 1
    assert "lacks ensurepip" in done.stderr
    assert f"apt-get install python{sys.version_info.major}.{sys.version_info.minor}-venv" in done.stderr
    assert not (tmp_path / "copy" / ".venv").exists()


def test_an_interpreter_that_cannot_be_run_is_refused_by_name(tmp_path: Path) -> None:
    done = make_environment(tmp_path / "copy", PYTHON="/nonexistent/python")
    assert done.returncode == 1
    assert done.stderr == "PYTHON=/nonexistent/python must be a Python 3.11 to 3.14, but is missing\n"
