"""evo kit: one file, which merges and exports, from what is shipped."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evo import ready
from evo.cli import kit
from evo.export import _earlier
from evo.lineage.store import Store

SIZES = "rows=16,cols=96,dtype=float32"


@pytest.mark.slow
def test_a_package_is_tried_and_searched_and_the_one_file_merges_and_exports(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--target", "cpu", "--evaluations", "1", "--finalists", "1", "--cold", "--name", "old", "--export", "shipped")
    assert here("search", "rmsnorm", "--workload", SIZES, *words).code == 0
    monkeypatch.setattr(ready, "packages", lambda: {"shipped": tmp_path / "shipped"})
    monkeypatch.setattr(_earlier, "packages", ready.packages)
    done = here("kit", "--target", "cpu", "--budget", "3s", "--db", "sent.db")
    assert done.code == 0, done.err
    began = done.out.splitlines()[:4]
    assert "checks and times 1 shipped package" in began[0]
    assert "sends nothing anywhere" in began[2]
    assert began[3] == "[1/1] rmsnorm: trying the shipped package …"
    assert "1 variant of it run here; all right" in done.out
    assert [path.name for path in tmp_path.glob("sent.db-*")] == []

    again = here("kit", "--target", "cpu", "--budget", "3s", "--db", "sent.db", "--json")
    assert "is finished" in again.err
    (variant,) = again.document["shipped"]["rmsnorm"]["variants"]
    assert (variant["right"], variant["wrong"], variant["timings"][0]["how"]) == (True, [], "call")

    assert here("merge", "sent.db", "--db", "all.db").code == 0
    with Store.open(tmp_path / "all.db", write=False) as store:
        run = store.run("rmsnorm-")
    options = run.spec.options
    assert options["shipped"] == again.document["shipped"]["rmsnorm"]
    manifest = json.loads((tmp_path / "shipped" / "manifest.json").read_text())
    first = (options["starts"], options["origins"], options["given"])
    assert first == ([manifest["variants"][0]["genome"]], ["shipped"], True), "what is shipped is measured first"
    assert here("export", run.name, "--db", "all.db", "--out", "again").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kernel", "softmx"), "unknown shipped kernel 'softmx'; did you mean softmax?"),
        (("--budget", "soon"), "--budget 'soon' is not a duration"),
        (("--target", "cpu", "--db", "postgresql://a@b/c"), "evo kit leaves a file"),
        (("--target", "tpu"), "unknown target 'tpu'"),
    ],
)
def test_a_mistake_is_one_sentence(here: Any, words: tuple[str, ...], said: str) -> None:
    done = here("kit", *words)
    assert done.code == 2
    assert said in done.sentence


def test_an_interrupt_says_how_to_go_on(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kit, "search_each", interrupted)
    done = here("kit", "--target", "cpu", "--kernel", "softmax", "--db", "sent.db")
    assert done.code == 130
    assert done.sentence.endswith("evo kit --budget 30m --target cpu --kernel softmax --db sent.db")


def test_the_budget_is_divided_by_problems_and_a_card_searches_what_is_shipped() -> None:
    packages = [p for p in kit._packages("cuda", None) if p.kernel in ("softmax", "rmsnorm_backward")]
    assert [p.module for p in packages] == ["evo.ready.rmsnorm.backward", "evo.ready.softmax_forward"]
    jobs = kit._jobs(packages, "cuda", "Some-Card", 280.0)
    assert [(len(job.workloads), job.budget.seconds, job.cover) for _, _, job in jobs] == [(12, 120, True), (16, 160, True)]
    assert jobs[0][2].starts == ("evo.ready.rmsnorm.backward",)


def test_wrong_variants_and_commands_that_end_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = {
        "variant": 3, "candidate": "c", "workload": "w", "arch": "sm_75", "standing": "compiled", "unavailable": "",
        "seed": 7, "right": False, "cases": [{"case": "one", "reason": "far off"}, {"case": "two", "reason": ""}],
    }  # fmt: skip
    answers = iter([json.dumps([variant, variant | {"variant": 4, "unavailable": "not here"}]), ""])
    ended = lambda *_, **__: subprocess.CompletedProcess([], -11, next(answers), "a fault")  # noqa: E731
    monkeypatch.setattr(subprocess, "run", ended)
    found = kit._try("evo.ready.softmax_forward")
    assert [(v["variant"], v["right"], v["wrong"]) for v in found["variants"]] == [(3, False, variant["cases"][:1])]
    assert found["fault"] == "bench: exit code -11: a fault"
    assert kit._summary(found) == "1 variant of it run here; WRONG: 3; bench: exit code -11: a fault"
