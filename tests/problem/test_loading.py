"""A kernel is what its files say now, and its digest is that of the files that it was loaded from, and of no others."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from functools import cache, partial, wraps
from pathlib import Path

import pytest
import torch

import evo
from evo.errors import KernelError
from evo.problem.genome import Genome
from evo.problem.kernel import Case, Cost, Kernel, Workload
from evo.problem.loading import digest_of, kernel_digest, kernel_files, load_kernel, template_root
from evo.problem.render import render
from evo.targets import find_target
from tests.problem.test_statement import SOURCE, STATEMENT


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder of kernels, which evo takes for its own."""
    copy = Path(shutil.copytree(template_root(), tmp_path / "templates"))
    monkeypatch.setattr("evo.problem.loading.template_root", lambda: copy)
    return copy


def own_kernel(folder: Path, statement: str = STATEMENT, **files: str) -> Path:
    """files: by their names, with two underscores for a dot."""
    folder.mkdir(exist_ok=True)
    (folder / "kernel.py").write_text(statement)
    (folder / "cpu.cpp.j2").write_text(SOURCE)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def edit(path: Path, text: str) -> None:
    """Writes a text of the same size at the same time of change: as two edits may be, or one that keeps the time."""
    before = path.stat()
    assert len(text) == before.st_size
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# -- what the digest depends on -----------------------------------------------------------------------------------


def depends_on(kernel: Path, changed: Path) -> bool:
    before, text = kernel_digest(kernel), changed.read_bytes()
    changed.write_text("changed\n")
    after = kernel_digest(kernel)
    changed.write_bytes(text)
    return after != before


@pytest.mark.parametrize(
    ("kernel", "used", "unused"),
    [
        ("attention", ("_shared/mma.cuh", "_shared/mma_half.cuh", "_shared/vectors.cpp.j2"),
         ("_shared/reduce.cuh", "_shared/packet.cuh", "_norm/cpu_space.py", "attention/function.py")),
        ("softmax", ("_shared/reduce.cuh", "_shared/cluster.cuh", "_shared/vectors.cpp.j2", "softmax/cuda_space.py"),
         ("_shared/mma.cuh", "_norm_backward/cuda.cu.j2", "softmax/function.py", "softmax/formats.toml")),
        ("layernorm", ("_norm/forward.cpp.j2", "_norm/cuda_shape.py", "_shared/row.cuh"),
         ("_norm_backward/problem.py", "_shared/mma.cuh", "layernorm/function.py")),
        ("layernorm_backward", ("_norm_backward/cuda.cu.j2", "_norm_backward/problem.py"), ("attention/kernel.py",)),
    ],
)  # fmt: skip
def test_a_kernel_depends_on_the_shared_files_that_it_uses_and_on_no_other(
    root: Path, kernel: str, used: tuple[str, ...], unused: tuple[str, ...]
) -> None:
    assert [name for name in (*used, *unused) if depends_on(root / kernel, root / name)] == [*used]


def test_every_shared_file_that_a_source_includes_is_in_its_kernels_digest(root: Path) -> None:
    limits = find_target("cuda").limits("sm_90")
    for name in ("attention", "layernorm", "rmsnorm_backward", "softmax"):
        kernel = load_kernel(name)
        workload = kernel.example("cuda")
        space = kernel.space("cuda", workload, limits)
        included = render(kernel, "cuda", Genome.of(space.complete(space.default)), workload, "sm_90").includes
        assert included
        assert all(depends_on(root / name, root / header) for header in included)


def test_a_kernel_of_ones_own_depends_on_no_family_though_it_has_names_like_theirs(root: Path, tmp_path: Path) -> None:
    own = own_kernel(tmp_path / "own", f"{STATEMENT}\ndef _norm(_shared): return _shared\n", more__cuh="int _norm, _shared;")
    assert not [path for path in root.glob("_*/*") if path.is_file() and depends_on(own, path)]


def test_what_a_source_includes_counts_whatever_it_is_called_and_what_nobody_includes_does_not(tmp_path: Path) -> None:
    own = own_kernel(tmp_path / "own", tile__hpp='#include "part.inl"\n', part__inl="int a;", notes__txt="", log="")
    (own / "cpu.cpp.j2").write_text('#include <tile.hpp>\n{% include "knobs.txt" %}\nconst char* written = "log";\n')
    (own / "knobs.txt").write_text("")
    (own / ".ipynb_checkpoints").mkdir()
    (own / ".ipynb_checkpoints" / "kernel.py").write_text("")
    found = {path.name for path in own.rglob("*") if path.is_file() and depends_on(own, path)}
    assert found == {"kernel.py", "cpu.cpp.j2", "tile.hpp", "part.inl", "knobs.txt"}
    assert not depends_on(own, own / ".ipynb_checkpoints" / "kernel.py")


def test_what_no_source_names_is_no_source_wherever_it_lies_in_the_folder(tmp_path: Path) -> None:
    own = own_kernel(tmp_path / "own", part__cuh="")
    (own / "cpu.cpp.j2").write_text(f'#include "part.cuh"\n{SOURCE}')
    before = kernel_files(own)
    assert {*before} == {"kernel.py", "cpu.cpp.j2", "part.cuh"}
    beside = ("test_own.py", "bench.cpp", "draft.cuh", "notes.j2", ".git/kernel.py", "exported/own/__init__.py")
    other = ("other/kernel.py", "other/cpu.cpp.j2", "other/part.cuh", "venv/lib/torch.py", "venv/include/part.cuh")
    for name in (*beside, *other):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("1 / 0\n")
    (own / "loop.cuh").symlink_to("loop.cuh")
    (own / "gone").symlink_to("nowhere")
    os.mkfifo(own / "pipe.cuh")
    (own / "part.py").mkdir(mode=0)
    (own / os.fsdecode(b"\xff.cuh")).write_text("")
    with (own / "large.h").open("wb") as file:
        file.truncate(2**40)
    assert kernel_files(own) == before
    assert load_kernel(str(own), digest_of(before)).name == "scaled"


def test_what_a_source_names_in_a_subfolder_is_a_source(tmp_path: Path) -> None:
    imports = "from .sub.one import ONE\nimport two.three as three\nfrom .stars import *\nfrom .lines import \\\n    A\n"
    imports += "DATA = 'tables/sines.bin'\n"
    own = own_kernel(tmp_path / "own", f"{imports}{STATEMENT}")
    (own / "cpu.cpp.j2").write_text(
        '#include "parts/tile.hpp"\n#include "tile_{{ p.n }}.cuh"\n{% include "steps/" ~ p.step ~ ".j2" %}\n'
        '{%- include "odd.j2" if p.odd else "even.j2" %}{% from "macros/all.j2" import one %}\n'
    )
    asking = {
        "parts/tile.hpp": '#include "inner.hpp"\n#include "../far.hpp"\n',
        "sub/one.py": "from ..up import UP\nfrom . import other\n",
    }
    asked = (
        "parts/inner.hpp", "far.hpp", "tile_2.cuh", "tile_4.cuh", "steps/first.j2", "steps/last.j2", "odd.j2", "even.j2",
        "macros/all.j2", "stars.py", "lines.py",
        "sub/__init__.py", "up.py", "sub/other.py", "two/three.py", "tables/sines.bin",
    )  # fmt: skip
    unasked = ("inner.hpp.j2", "steps/notes.txt", "sub/unused.py", "one.py", "tables/cosines.bin")
    for name, text in {**asking, **dict.fromkeys((*asked, *unasked), "")}.items():
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_text(text)
    assert {*kernel_files(own)} == {"kernel.py", "cpu.cpp.j2", *asking, *asked}
    assert all(depends_on(own, own / name) for name in asked)


def test_a_template_with_many_computed_pieces_is_read_at_once(tmp_path: Path) -> None:
    own = own_kernel(tmp_path / "own")
    (own / "cpu.cpp.j2").write_text('"' + ".{{ t }}" * 200)
    assert {*kernel_files(own)} == {"kernel.py", "cpu.cpp.j2"}


def test_a_name_that_a_template_computes_may_be_that_of_any_source_beside_it(tmp_path: Path) -> None:
    own = own_kernel(tmp_path / "own", one__j2="", two__cuh="", notes__txt="", test_own__py="")
    (own / "sub").mkdir()
    (own / "sub" / "three.j2").write_text("")
    (own / "cpu.cpp.j2").write_text("{% include p.part %}")
    assert {*kernel_files(own)} == {"kernel.py", "cpu.cpp.j2", "one.j2", "two.cuh"}


def test_a_module_of_a_family_that_is_imported_by_a_computed_name_is_refused(tmp_path: Path) -> None:
    computed = "import importlib\nimportlib.import_module('._norm' + '.cpu_space', __package__)\n"
    with pytest.raises(KernelError, match=r"imports _norm/cpu_space\.py by a name that it computes: write from"):
        load_kernel(str(own_kernel(tmp_path / "own", STATEMENT + computed)))


# -- a kernel that is edited --------------------------------------------------------------------------------------


@pytest.mark.parametrize("importing", ["from .names import NAME", "from names import NAME", "from . import names"])
def test_an_edited_kernel_is_loaded_anew_with_the_modules_beside_it(
    tmp_path: Path, importing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "names", raising=False)
    text = f"{importing}\n{STATEMENT}".replace('"scaled"', "names.NAME" if importing.endswith("names") else "NAME")
    own_kernel(tmp_path, text, names__py='NAME = "one"\n')
    if importing == "from names import NAME":
        import names  # type: ignore[import-not-found]

        assert names.NAME == "one"
    first = load_kernel(str(tmp_path))
    assert load_kernel(str(tmp_path)) is first
    edit(tmp_path / "names.py", 'NAME = "two"\n')
    second = load_kernel(str(tmp_path))
    assert (first.name, second.name) == ("one", "two")
    assert first.digest != second.digest == kernel_digest(tmp_path)
    (tmp_path / "kernel.py").write_text(text.replace("NAME,", "NAME + '_again',"))
    assert load_kernel(str(tmp_path)).name == "two_again"
    (tmp_path / "kernel.py").write_text("1 / 0\n")
    with pytest.raises(KernelError, match="division by zero"):
        load_kernel(str(tmp_path))


def test_an_edited_template_is_rendered_anew(tmp_path: Path) -> None:
    own = own_kernel(tmp_path / "own", part__j2="int part = 1;")
    (own / "cpu.cpp.j2").write_text('{% include "part.j2" %}')

    def rendered() -> str:
        kernel = load_kernel(str(own))
        assert kernel.digest == kernel_digest(own)
        return render(kernel, "cpu", Genome.of({"unroll": 1}), kernel.example("cpu"), "native").text

    assert rendered() == "int part = 1;"
    edit(own / "part.j2", "int part = 2;")
    assert rendered() == "int part = 2;"


def test_a_kernel_of_a_shared_family_is_loaded_anew_when_its_family_has_changed(root: Path) -> None:
    folder = str(root / "layernorm")
    first, problem = load_kernel(folder), root / "_norm" / "problem.py"
    problem.write_text(problem.read_text().replace('"tight", ', ""))
    assert {*first.data} - {*load_kernel(folder).data} == {"tight"}


def test_a_kernel_that_is_not_as_it_was_recorded_is_not_loaded(tmp_path: Path) -> None:
    own = own_kernel(tmp_path / "own")
    digest = load_kernel(str(own)).digest
    assert load_kernel(str(own), digest).digest == digest
    (own / "cpu.cpp.j2").unlink()
    with pytest.raises(KernelError, match="were changed or deleted while they were in use"):
        load_kernel(str(own), digest)
    (own / "kernel.py").unlink()
    with pytest.raises(KernelError, match="were changed or deleted while they were in use"):
        load_kernel(str(own), digest)


@pytest.mark.slow
def test_a_kernel_edited_between_two_searches_of_a_process_is_searched_and_recorded_in_its_new_form(tmp_path: Path) -> None:
    own, found = own_kernel(tmp_path / "own", SOURCE), []
    (own / "kernel.py").write_text(STATEMENT)
    (own / "cpu.cpp.j2").write_text(f"// form 2\n{SOURCE}")
    for form in (2, 4):
        edit(own / "kernel.py", STATEMENT.replace("(1, 2)", f"(1, {form})"))
        edit(own / "cpu.cpp.j2", f"// form {form}\n{SOURCE}")
        db = str(tmp_path / f"{form}.db")
        run = evo.search(own, target="cpu", evaluations=2, finalists=1, builders=1, seed=1, db=db, progress=False)
        with evo.Lineage(db) as lineage:
            tried = [lineage.candidate(entry.id) for entry in lineage.history(run.name)]
            assert {candidate.kernel_digest for candidate in tried} == {kernel_digest(own)}
            assert all(f"// form {form}" in lineage.source(candidate.id) for candidate in tried)
            found.append({candidate.parameters["unroll"] for candidate in tried})
    assert found == [{1, 2}, {1, 4}]


# -- what follows from a statement --------------------------------------------------------------------------------


def stated(**fields: object) -> Kernel:
    namespace: dict[str, object] = {}
    exec(STATEMENT, namespace)
    kernel = namespace["KERNEL"]
    assert isinstance(kernel, Kernel)
    return replace(kernel, **fields)  # type: ignore[arg-type]


def test_a_function_of_the_users_is_kept_however_it_is_made() -> None:
    """A derived function is wrapped, called by another, and bound."""
    plain = stated()
    workload = plain.example("cpu")

    @wraps(plain.cases)
    def fewer(target: str, workload: Workload) -> list[Case]:
        return [case for case in plain.cases(target, workload) if case.data == "normal"]

    def cost(of: int, workload: Workload) -> Cost:
        return Cost(bytes=of, flops=0)

    assert {case.data for case in stated(cases=fewer).cases("cpu", workload)} == {"normal"}
    for own in (partial(cost, 5), cache(partial(cost, 5)), partial(wraps(plain.cost)(cost), 5)):
        for kernel in (stated(cost=own), replace(stated(cost=own), data=("normal",))):
            assert kernel.cost(workload).bytes == 5
            assert not kernel.ceilings, "a copy of as many bytes is no bound of a cost that is stated"
    small = replace(plain, arguments=plain.arguments[:1] + plain.arguments[2:3], options={}, reference=plain.reference)
    workload = small.workload("cpu", "rows=3,cols=5,dtype=float32")
    assert small.cost(workload).bytes == 2 * 4 * 15
    assert replace(small, cost=plain.cost).cost == plain.cost, "another kernel's function that is stated is not derived anew"


def test_what_is_derived_follows_a_kernel_that_is_replaced(tmp_path: Path) -> None:
    for kernel in (stated(), load_kernel(str(own_kernel(tmp_path)))):
        workload = kernel.example("cpu")
        fields = {"data": ("normal", "huge"), "reference": lambda inputs, workload: {"y": inputs["x"] * 5}}
        other = replace(kernel, name="other", **fields)  # type: ignore[arg-type]
        assert {case.data for case in other.cases("cpu", workload)} == {"normal", "huge"}
        assert (other.title, other.entry) == ("scaled", "scaled")
        ones = {"x": torch.ones(300, 1000), "bias": None}
        assert other.baselines[0].call(ones, workload)["y"].max() == 5  # type: ignore[index]
        whole = replace(kernel, options={"bias": True, "eps": 1e-6, "steps": 3})
        assert [a.name for a in whole.arguments if a.kind == "scalar"] == ["rows", "cols", "eps", "steps"]
    with pytest.raises(KernelError, match="`cost` must return a Cost, and returns 5"):
        replace(kernel, cost=lambda workload: 5).cost(workload)  # type: ignore[arg-type, return-value]
