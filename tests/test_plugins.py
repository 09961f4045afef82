"""Plug-ins of another package, found by its entry points, in workers too; among them a language that hands over its launch
after the build. The package is real: a folder of modules beside its metadata, as pip leaves them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from evo.runtime.manifest import read_manifest
from tests.ended import run_python
from tests.two_templates import write_two_templates

PARTS = '''
import hashlib
from dataclasses import replace

from evo.errors import UnknownNameError
from evo.executors import find_executor
from evo.export import Exporter
from evo.search.operators import Operator
from evo.search.samplers import find_sampler
from evo.targets.cpu import CpuTarget
from evo.targets.languages.cpp import Cpp


class Own(CpuTarget):
    name = "own"
    language = "late"


class Late(Cpp):
    """C++ whose entry points have names that only its compilation tells."""

    name = "late"
    suffix = ".late"
    targets = ("cpu", "own")
    plain = False

    def compile(self, source, arch, workdir):
        entry = source.entry + "_" + hashlib.sha256(source.text.encode()).hexdigest()[:8]
        binary = super().compile(replace(source, text=source.text.replace(source.entry + "(", entry + "(")), arch, workdir)
        return replace(binary, launch={"entry": entry, "smem_bytes": 512})


def make_sampler(space, seed, options):
    for option in options:
        raise UnknownNameError("option of sampler hopeful", option, ())
    made = find_sampler("random")(space, seed, options)
    ask = made.ask
    made.ask = lambda order: replace(ask(order), operator="hopeful")
    return made


TARGET, LANGUAGE, SAMPLER = Own(), Late(), make_sampler
OPERATOR = Operator(name="restart", arity=1, weight=0.1, draw=lambda rng, space, parents: (space.draw(rng), ()))
EXECUTOR = lambda target, config: find_executor("local")(target, config)
EXPORTER = Exporter(
    name="listed",
    contents=lambda request: ({}, {"list.txt": "\\n".join(item.candidate for item in request.items).encode()}),
    advice=lambda out: ["read list.txt"],
)
'''
POINTS = """
[evo.samplers]
hopeful = parts:SAMPLER
random = parts:nothing
twice = parts:SAMPLER
broken = parts:missing

[evo.operators]
restart = parts:OPERATOR

[evo.targets]
own = parts:TARGET

[evo.languages]
late = parts:LANGUAGE

[evo.executors]
mine = parts:EXECUTOR

[evo.exporters]
listed = parts:EXPORTER
"""
SUITES = """
from evo.testing.exporters import ExporterSuite
from evo.testing.operators import OperatorSuite
from evo.testing.samplers import SamplerSuite
from evo.testing.targets import LanguageSuite, TargetSuite


class TestOperator(OperatorSuite):
    names = ("restart",)


class TestSampler(SamplerSuite):
    names = ("hopeful",)


class TestTarget(TargetSuite):
    names = ("own",)


class TestLanguage(LanguageSuite):
    names = ("late",)
    sources = {"late": 'extern "C" void twice(float* y, long long n) { for (long long i = 0; i < n; ++i) y[i] *= 2; }'}
"""


def install(folder: Path, package: str, points: str, **modules: str) -> None:
    """As pip would."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(folder, "evo_parts", POINTS, parts=PARTS)
    install(folder, "evo_others", "[evo.samplers]\ntwice = parts:SAMPLER\n")
    return folder


def run(folder: Path, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(Path(__file__).parents[1])])
    return run_python(folder, *arguments, PYTHONPATH=path)


NAMES = """
import json
from evo.discovery import plugin_names
from evo.errors import UsageError
from evo.executors import find_executor
from evo.export import exporter_names, find_exporter
from evo.search.operators import find_operator
from evo.search.samplers import find_sampler
from evo.targets import find_language, find_target


def told(name):
    try:
        find_sampler(name)
    except UsageError as error:
        return str(error)


print(json.dumps({
    "names": [*map(plugin_names, ("sampler", "operator", "target", "language")), exporter_names()],
    "found": [found.name for found in (
        find_operator("restart"), find_target("own"), find_language("late"), find_exporter("listed")
    )],
    "own": find_sampler("random").__module__,
    "told": [told("twice"), told("broken"), told("hopefull")],
    "executor": callable(find_executor("mine")),
}))
"""


def test_plugins_of_another_package_are_found_and_what_is_wrong_with_one_is_a_sentence(site: Path, tmp_path: Path) -> None:
    done = run(tmp_path, site, "-c", NAMES)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    samplers, operators, targets, languages, exporters = found["names"]
    assert {"hopeful", "random", "evolution"} <= set(samplers)
    assert {"restart", "mutation"} <= {*operators, "mutation"}
    assert targets == ["cpu", "cuda", "own"]
    assert languages == ["cpp", "cuda_cpp", "late"]
    assert {"listed", "module"} <= set(exporters)
    assert found["found"] == ["restart", "own", "late", "listed"]
    assert found["own"] == "evo.search.samplers.random"  # a name of evo's own is evo's own
    twice, broken, unknown = found["told"]
    assert twice == "sampler 'twice' is offered by several packages, evo_others and evo_parts: uninstall all but one"
    assert broken.startswith("sampler 'broken' of package evo_parts cannot be loaded (AttributeError: ")
    assert "unknown sampler 'hopefull'; did you mean hopeful" in unknown
    assert found["executor"]


SEARCH = """
import json, sys
from pathlib import Path
import evo
from evo.executors import ExecutorConfig, find_executor
from evo.cli import run
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.measure import Request

kernel, target = sys.argv[1:]
words = dict(target=target, sampler="hopeful", evaluations=4, builders=1, finalists=4, name="run", db="l.db", progress=False)
evo.search(kernel, **words)
with evo.Lineage("l.db") as lineage:
    tried = [lineage.candidate(entry.id) for entry in lineage.history("run")]
late = [c for c in tried if c.parameters["template"] == "other"]
told = {
    "operators": sorted({c.operator for c in tried}),
    "statuses": sorted({c.status for c in tried}),
    "launches": [dict(c.build.launch) for c in late],
    "smem": [c.build.smem_dynamic_bytes for c in late],
    "finals": sum(bool(c.finals) for c in tried if c.build.launch),
    "late": late[0].id,
}
assert run(["export", late[0].id, "--format", "listed", "--out", "listed", "--db", "l.db", "--refused"]) == 0
told["listed"] = Path("listed/list.txt").read_text()
if target == "cpu":
    assert run(["export", late[0].id, "--format", "module", "--out", "exported", "--db", "l.db", "--refused"]) == 0
    assert run(["show", late[0].id, "--db", "l.db"]) == 0
executor = find_executor("mine")(target, ExecutorConfig(builders=1, cache_dir=Path("cache")))
genome = Genome.of({"template": "other", "unroll": 4, "split": False})
request = Request(kernel=kernel, target=target, arch="native", genome=genome, workload=Workload.of({"n": 4096}, "float32"))
told["built"] = executor.build(request).result(200).status
executor.close()
Path("told.json").write_text(json.dumps(told))
"""
USE = "import torch, exported; x = torch.randn(4096); assert torch.equal(exported.doubled(x), 2 * x)"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "own"])
def test_a_search_runs_with_them_and_a_build_that_carries_its_launch_is_gated_timed_recorded_and_exported(
    site: Path, tmp_path: Path, target: str
) -> None:
    kernel = write_two_templates(tmp_path / "doubled", target=target, suffix="late")
    if target == "own":  # of which evo's own C++ knows nothing
        (kernel / "own.simple.cpp.j2").rename(kernel / "own.simple.late.j2")
    script = tmp_path / "script.py"
    script.write_text(SEARCH)
    done = run(tmp_path, site, str(script), str(kernel), target)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["operators"] == ["hopeful"]
    assert set(told["statuses"]) <= {"ok", "same_code"}
    assert told["launches"]
    assert all(launch["smem_bytes"] == 512 and launch["entry"].startswith("doubled_") for launch in told["launches"])
    assert told["smem"] == [512] * len(told["smem"])
    assert told["finals"] >= 1
    assert told["listed"] == told["late"]
    assert told["built"] == "ok"
    if target == "cpu":
        assert "smem_bytes=512" in done.stdout
        (variant,) = read_manifest(tmp_path / "exported" / "manifest.json")["variants"]
        assert variant["launch"]["entry"] == told["launches"][0]["entry"]
        assert variant["launch"]["smem_bytes"] == 512
        assert variant["recipe"] is None
        checked, used = (run_python(tmp_path, *words) for words in (("-m", "exported", "check"), ("-c", USE)))
        assert (checked.returncode, used.returncode) == (0, 0), checked.stdout + used.stderr


@pytest.mark.slow
def test_the_authors_of_plugins_run_the_suites_of_their_kinds(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_parts.py").write_text(SUITES)
    done = run(tmp_path, site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_parts.py")
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
