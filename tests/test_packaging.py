"""What is installed is complete, and the environment script explains what it cannot do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel's contents, as `pip install` unpacks them."""
    from hatchling.build import build_wheel  # here: an offline GPU machine collects this file without it

    monkeypatch.chdir(ROOT)
    wheel = tmp_path / build_wheel(str(tmp_path))
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_a_wheel_carries_its_templates_and_finds_them(installed: Path, tmp_path: Path) -> None:
    program = "import evo.kernel as k; print(k.template_root(), *k.kernel_names(), sep=chr(10))"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    root, *kernels = found.stdout.splitlines()
    assert Path(root) == installed / "evo" / "_assets" / "templates"
    assert kernels == sorted(path.parent.name for path in (ROOT / "templates").glob("*/kernel.py"))
    for template in (ROOT / "templates").rglob("*.j2"):
        copy = Path(root) / template.relative_to(ROOT / "templates")
        assert copy.read_bytes() == template.read_bytes()


def test_a_wheel_carries_the_migrations_of_the_database(installed: Path) -> None:
    migrations = sorted(p.name for p in (ROOT / "evo/store/migrations").rglob("*.py"))
    assert migrations
    assert sorted(p.name for p in (installed / "evo/store/migrations").rglob("*.py")) == migrations


def test_a_wheel_carries_the_pages_of_a_report(installed: Path) -> None:
    pages = sorted(p.name for p in (ROOT / "evo/report/templates").iterdir())
    assert {"page.html.j2", "report.html.j2", "style.css", "tips.js", "live.js"} <= set(pages)
    assert sorted(p.name for p in (installed / "evo/report/templates").iterdir()) == pages


def test_a_wheel_installs_nothing_but_the_package_and_its_record(installed: Path) -> None:
    names = sorted(path.name.partition("-")[0] for path in installed.iterdir())
    assert names == ["evo", "evo_kernels"]


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
