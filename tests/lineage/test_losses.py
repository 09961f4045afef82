"""What a run lost with a damaged file is counted, kept with the run wherever it goes, and told by all that shows it."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import samples as s
from damage import leaf_pages, spoil

from evo.analysis import queries
from evo.cli import run as run_command
from evo.cli.recheck import _verdicts
from evo.lineage import RunStatus, Stage
from evo.lineage.columns import ORDERS_PER_RUN, public_id
from evo.lineage.dump import dump_store
from evo.lineage.load import Loaded, load
from evo.lineage.losses import SALVAGED, WORDS, Losses, Orphans, kept_losses, read_losses, read_orphans
from evo.lineage.mending import mend
from evo.lineage.merge import merge
from evo.lineage.salvage import salvage
from evo.lineage.store import Store
from evo.lineage.upkeep import open_current

NUMBER, WINNER, FINALISTS = 300, 120, (120, 90, 60)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of candidates with parents but for two, three of them in finals, one the winner."""
    path = tmp_path_factory.mktemp("sound") / "lineage.db"
    with Store.open(path, write=True) as store:
        for name in ("one", "two"):
            run = s.new_run(store, name)
            with store.transaction():
                for order in range(NUMBER):
                    operator = "mutation" if order > 1 else "random"
                    ref = s.ref(order, *((order // 2, order - 1) if order > 1 else ()), operator=operator)
                    store.add(run, ref, s.refused(order) if order % 7 == 3 else s.passed(order), elapsed_s=0.0)
            for order in FINALISTS:
                store.add_final(run, order, s.final(0.5), elapsed_s=1.0)
            store.set_winner(run, 0, WINNER)
            store.set_status(run, RunStatus.FINISHED, elapsed_s=1.0)
    return path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(sound, tmp_path / "copy.db"))


@pytest.fixture
def words(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "500")

    def ask(*arguments: object) -> str:
        capfd.readouterr()
        assert run_command([str(a) for a in arguments]) == 0
        return capfd.readouterr().out

    return ask


def reload(damaged: Path, where: str | Path) -> Loaded:
    file = io.BytesIO()
    salvage(damaged, file)
    file.seek(0)
    return load(file, "the rest", where)


def page_of(path: Path, table: str, key: int) -> int:
    """The page that a row of a table lies on: the one without which it cannot be read."""
    with closing(sqlite3.connect(path)) as raw:
        first = {page: min(keys) for page in leaf_pages(path, table) if (keys := _keys(path, page))}
        assert raw.execute(f'SELECT 1 FROM "{table}" WHERE rowid = ?', (key,)).fetchone()
    return max((start, page) for page, start in first.items() if start <= key)[1]


def _keys(path: Path, page: int) -> list[int]:
    """Row numbers on a leaf of a table."""
    data = path.read_bytes()[(page - 1) * 4096 : page * 4096]
    found = []
    for i in range(int.from_bytes(data[3:5], "big")):
        at = int.from_bytes(data[8 + 2 * i : 10 + 2 * i], "big")
        for part in range(2):  # the length, then the row number, seven bits a byte
            value = 0
            while True:
                value, more, at = value << 7 | data[at] & 0x7F, data[at] & 0x80, at + 1
                if not more:
                    break
            if part:
                found.append(value)
    return found


def ids(path: Path) -> dict[str, tuple[str, ...]]:
    """Public ids of the candidates of each run."""
    with Store.open(path, write=False) as store:
        return {r.name: tuple(p.id for p in queries.history(store, r.name)) for r in queries.runs(store)}


def lost_winner(copy: Path) -> Path:
    """Without the page that run one's winner stands on."""
    spoil(copy, [page_of(copy, "candidate", ORDERS_PER_RUN + WINNER)])
    return copy


def lost_parents(copy: Path) -> Path:
    """Without a page of parents of run one."""
    spoil(copy, leaf_pages(copy, "parentage")[1:2])
    return copy


def test_nothing_is_said_of_a_sound_file(sound: Path, tmp_path: Path, words: Any) -> None:
    assert reload(sound, tmp_path / "new.db").losses == {}
    assert "salvaged" not in words("runs", "--db", tmp_path / "new.db")
    assert [r["salvaged"] for r in json.loads(words("runs", "--json", "--db", tmp_path / "new.db"))] == [None, None]


def test_a_lost_winner_is_counted_with_all_that_went_with_it(copy: Path, sound: Path, tmp_path: Path) -> None:
    whole = ids(sound)
    new = tmp_path / "new.db"
    losses = reload(lost_winner(copy), new).losses
    missing = {name: set(whole[name]) - set(left) for name, left in ids(new).items()}
    with Store.open(sound, write=False) as store:
        uid = store.run("one").uid
        orders = {int(o): public_id(uid, o) for o in range(NUMBER)}
    gone = {o for o, name in orders.items() if name in missing["one"]}
    assert WINNER in gone
    children = {o for o in range(2, NUMBER) if o not in gone and {o // 2, o - 1} & gone}
    assert losses["one"] == Losses(
        winners=1,
        finals=len(gone & set(FINALISTS)),
        candidates=len(gone),
        parents=len(children),
        more=("candidates",),
    )
    assert losses.keys() == {"one", "two"}
    assert losses["two"] == Losses(more=("candidates",)), "that none of its candidates was there nobody can tell"


def test_lost_parents_are_told_from_none(copy: Path, sound: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.db"
    losses = reload(lost_parents(copy), new).losses
    with Store.open(sound, write=False) as one, Store.open(new, write=False) as other:
        roots = 0
        for run, left in (("one", losses["one"]), ("two", losses.get("two", Losses()))):
            without = [e for e in other.evaluations(other.run(run)) if not e.ref.proposal.parents]
            had = [e for e in one.evaluations(one.run(run)) if not e.ref.proposal.parents]
            assert left == Losses(parents=len(without) - len(had))
            for e in without:
                record = queries.candidate(other, e.public_id)
                assert record.parents_lost is (e.ref.order > 1)
                roots += not record.parents_lost
    assert losses["one"].parents > 5
    assert roots == 4


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("final", Losses(finals=3)),
        ("timing", None),
        ("build", None),
        ("check", None),
    ],
)
def test_what_lies_on_other_pages_is_counted_too(
    copy: Path, sound: Path, tmp_path: Path, table: str, expected: Losses | None
) -> None:
    pages = leaf_pages(copy, table)
    spoil(copy, pages if table == "final" else pages[len(pages) // 4 : len(pages) // 4 + 2])
    losses = reload(copy, tmp_path / "new.db").losses
    if expected is not None:
        assert losses == {"one": expected, "two": expected}
        return
    names = {"timing": "times", "build": "builds", "check": "checks"}
    for name, lost in losses.items():
        assert lost == Losses(**{names[table]: getattr(lost, names[table])}, more=(WORDS[table],)), name
    assert sum(getattr(lost, names[table]) for lost in losses.values()) > 0


def test_spoilt_sources_are_counted_for_the_runs_that_had_them(copy: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(copy)) as raw, raw:
        raw.execute("UPDATE artefact SET data = substr(data, 1, 9) WHERE rowid IN (3, 5, 7)")
    losses = reload(copy, tmp_path / "new.db").losses
    assert losses == {"one": Losses(artefacts=3), "two": Losses(artefacts=3)}, "both have the same sources"


def test_a_dump_that_does_not_say_where_it_has_gaps_may_lack_anything(copy: Path, tmp_path: Path) -> None:
    reload(copy, tmp_path / "new.db")
    with closing(sqlite3.connect(tmp_path / "new.db")) as raw:
        losses = mend(raw).losses["one"]
    assert losses == Losses(more=tuple(word for table, word in WORDS.items() if table != "parentage"))
    assert str(losses).startswith("salvaged from a damaged file: it may lack candidates, builds, ")


def test_a_run_of_which_only_its_candidates_are_left_is_missed_by_the_others(copy: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(copy)) as raw, raw:
        raw.execute("DELETE FROM run WHERE name = 'two'")
    losses = reload(copy, tmp_path / "new.db").losses
    assert losses == {"one": Losses(runs=1)}
    assert str(losses["one"]) == "salvaged from a damaged file: 1 other run was lost"


def test_everything_that_shows_a_salvaged_run_says_what_it_lost(
    where: str, copy: Path, tmp_path: Path, words: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    lost_winner(lost_parents(copy))
    file, out = tmp_path / "rest.dump", tmp_path / "report.html"
    assert run_command(["dump", "--db", str(copy), "--out", str(file)]) == 1
    capfd.readouterr()
    assert run_command(["load", str(file), "--db", where]) == 0
    said = capfd.readouterr().err
    with Store.open(where, write=False) as store:
        lost = queries.run(store, "one").salvaged
        assert lost is not None
        uid = store.run("one").uid
        orphan = next(p.id for p in queries.history(store, "one") if queries.candidate(store, p.id).parents_lost)
    sentence = f"one: {lost}"
    assert f"1 winner, {lost.finals} verdict" in sentence
    assert f" and the parents of {lost.parents} candidates were lost; there may have been more candidates" in sentence
    assert f"evo: {sentence}\n" in said

    assert sentence in words("runs", "--db", where)
    assert sentence in words("best", "--run", "one", "--db", where)
    shown = words("show", orphan, "--db", where)
    assert sentence in shown
    assert "mutation of parents that are lost" in shown or "and others that are lost" in shown
    assert sentence in words("lineage", orphan, "--db", where)
    assert " lost " in words("lineage", orphan, "--db", where)
    words("report", "one", "--db", where, "--out", out)
    assert f"This run was {lost}." in out.read_text()

    counted = json.loads(words("runs", "--json", "--db", where))[-1]["salvaged"]
    assert (counted["winners"], counted["parents"], counted["candidates"]) == (1, lost.parents, lost.candidates)
    assert json.loads(words("best", "--json", "--run", "one", "--db", where))[0]["salvaged"] == counted
    assert json.loads(words("show", orphan, "--json", "--db", where))["salvaged"] == counted
    assert json.loads(words("show", orphan, "--json", "--db", where))["parents_lost"] is True
    members = json.loads(words("lineage", orphan, "--json", "--db", where))
    assert all(m["salvaged"] == counted for m in members)
    assert next(m for m in members if m["relation"] == "self")["parents_lost"] is True
    assert json.loads(words("show", public_id(uid, 0), "--json", "--db", where))["parents_lost"] is False
    assert SALVAGED not in json.loads(words("runs", "--json", "--db", where))[-1]["options"]


def test_losses_go_where_the_run_goes_until_a_whole_copy_of_it_comes(
    where: str, copy: Path, sound: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first.db"
    pages = leaf_pages(copy, "final")
    spoil(copy, pages)
    reload(copy, first)
    file = io.BytesIO()
    with open_current(first) as store:
        dump_store(store, file)
    file.seek(0)
    assert load(file, "again", where).losses == {}, "nothing more"
    with Store.open(where, write=True) as target:
        assert queries.run(target, "one").salvaged == Losses(finals=3)
        with Store.open(sound, write=False) as source:
            assert sorted(merge(target, source).continued) == ["one", "two"]
        assert queries.run(target, "one").salvaged is None
        assert queries.run(target, "one").tasks[0].winner
        with Store.open(first, write=False) as source:
            assert sorted(merge(target, source).unchanged) == ["one", "two"], "what was lost does not come back as a loss"
        assert queries.run(target, "one").salvaged is None


@pytest.fixture
def backup_and_rest(tmp_path: Path) -> tuple[Path, Path]:
    """A run before its finals; and after them, salvaged, without one of its binaries."""
    backup, rest = tmp_path / "backup.db", tmp_path / "rest.db"
    with Store.open(rest, write=True) as store:
        run = s.new_run(store, "one")
        with store.transaction():
            for order in range(4):
                store.add(run, s.ref(order), s.passed(order), elapsed_s=0.0)
        store.set_status(run, RunStatus.INTERRUPTED, elapsed_s=1.0)
    with closing(sqlite3.connect(rest)) as raw, closing(sqlite3.connect(backup)) as other:
        raw.backup(other)
    with Store.open(rest, write=True) as store:
        run = store.run("one")
        for order in (1, 2):
            store.add_final(run, order, s.final(0.5), elapsed_s=1.0)
        store.set_winner(run, 0, 2)
        store.set_status(run, RunStatus.FINISHED, elapsed_s=1.0)
    with closing(sqlite3.connect(rest)) as raw, raw:
        raw.execute("DELETE FROM artefact WHERE rowid = 1")
        assert mend(raw, ["artefact"]).losses["one"] == Losses(artefacts=1)
    return backup, rest


def test_a_backup_from_before_the_finals_does_not_undo_them(backup_and_rest: tuple[Path, Path]) -> None:
    backup, rest = backup_and_rest
    with Store.open(rest, write=True) as target, Store.open(backup, write=False) as source:
        done = merge(target, source)
        assert (done.unchanged, done.left_aside) == (("one",), {})
        assert queries.run(target, "one").tasks[0].winner == public_id(target.run("one").uid, 2)


def test_finals_of_a_salvaged_run_come_to_its_backup(backup_and_rest: tuple[Path, Path]) -> None:
    backup, rest = backup_and_rest
    with Store.open(backup, write=True) as target, Store.open(rest, write=False) as source:
        assert merge(target, source).continued == ("one",)
        assert queries.run(target, "one").tasks[0].winner == public_id(target.run("one").uid, 2)
        assert merge(target, source).unchanged == ("one",)


def test_what_only_the_older_copy_has_is_said_to_be_left_aside(
    backup_and_rest: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    backup, rest = backup_and_rest
    with closing(sqlite3.connect(rest)) as raw, raw:
        for table in ("check", "build", "timing"):
            raw.execute(f'DELETE FROM "{table}" WHERE candidate_id = ?', (ORDERS_PER_RUN + 3,))
        raw.execute("DELETE FROM candidate WHERE id = ?", (ORDERS_PER_RUN + 3,))
    for source, target, kept in ((backup, rest, "the copy here was kept"), (rest, backup, "the copy that came is newer")):
        assert run_command(["merge", str(source), "--db", str(target)]) == 0
        said = capfd.readouterr().err
        assert said.startswith(f"evo: one: one of its two copies is salvaged; {kept}")
        assert said.endswith("; left aside, of the other: 1 candidate\n")


def test_a_candidate_whose_original_is_lost_is_still_that_of_a_whole_copy(tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole.db", tmp_path / "rest.db"
    with Store.open(whole, write=True) as store:
        run = s.new_run(store, "one")
        with store.transaction():
            store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
            store.add(run, s.ref(1), s.same_code(1, 0), elapsed_s=0.0)
        store.set_status(run, RunStatus.FINISHED, elapsed_s=1.0)
    shutil.copy(whole, rest)
    with closing(sqlite3.connect(rest)) as raw, raw:
        raw.execute("DELETE FROM candidate WHERE id = ?", (ORDERS_PER_RUN,))
        mend(raw, ["candidate"])
    with Store.open(rest, write=True) as target, Store.open(whole, write=False) as source:
        assert merge(target, source).continued == ("one",)
        assert [p.status for p in queries.history(target, "one")] == ["ok", "same_code"]


def test_that_parents_are_lost_hides_nothing_and_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "one")
        with store.transaction():
            store.add(run, s.ref(0, operator="random"), s.passed(0), elapsed_s=0.0)
            store.add(run, s.ref(1, 0), s.same_code(1, 0), elapsed_s=0.0)
            store.add(run, s.ref(2, 0), s.not_compiled(2), elapsed_s=0.0)
        before = queries.failures(store, "one")
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("DELETE FROM candidate WHERE id = ?", (ORDERS_PER_RUN,))
        assert mend(raw, ["candidate"]).losses["one"].parents == 2
    with Store.open(path, write=False) as store:
        assert queries.failures(store, "one") == before
        records = [queries.candidate(store, p.id) for p in queries.history(store, "one")]
        assert [r.parents_lost for r in records] == [True, True]
        assert [r.log for r in records] == ["the candidate whose code it shares was lost with a damaged file", ""]


def test_a_second_salvage_counts_only_what_it_lost_and_keeps_the_marks(copy: Path, tmp_path: Path) -> None:
    first = reload(lost_parents(copy), tmp_path / "first.db").losses["one"]
    with closing(sqlite3.connect(tmp_path / "first.db")) as raw, raw:
        assert mend(raw, ["parentage"]).losses == {}, "nothing more"
        marked = read_orphans(json.loads(raw.execute("SELECT options FROM run WHERE name = 'one'").fetchone()[0]))
        one = next(o for o in range(2, NUMBER - 1) if o in marked and o + 1 not in marked) + 1
        raw.execute("DELETE FROM parentage WHERE child_id = ?", (ORDERS_PER_RUN + one,))
        assert mend(raw, ["parentage"]).losses["one"] == Losses(parents=first.parents + 1)
    with Store.open(tmp_path / "first.db", write=False) as store:
        uid = store.run("one").uid
        lost = {o for o in range(NUMBER) if queries.candidate(store, public_id(uid, o)).parents_lost}
    assert lost == {o for o in range(NUMBER) if o in marked} | {one}


@pytest.fixture
def families(tmp_path: Path) -> Any:
    """Run one, whose mutations have parents, and run two, whose have none; damaged with statements, then salvaged."""
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        for name in ("one", "two"):
            run = s.new_run(store, name)
            with store.transaction():
                for order in range(4):
                    ref = s.ref(order, *([order - 1] if order and name == "one" else ()), operator="mutation")
                    store.add(run, ref, s.passed(order), elapsed_s=0.0)
            store.add_final(run, 2, s.final(0.5), elapsed_s=1.0)
            store.set_winner(run, 0, 2)

    def salvaged(statement: str, *unreadable: str) -> dict[str, Losses]:
        with closing(sqlite3.connect(path)) as raw, raw:
            for part in statement.split(";"):
                raw.execute(part)
            losses = mend(raw, unreadable).losses
            assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
        Store.open(path, write=False).close()
        return losses

    return salvaged


def test_what_an_operator_does_in_one_run_says_nothing_of_another(families: Any) -> None:
    losses = families(f"DELETE FROM parentage WHERE child_id = {ORDERS_PER_RUN + 2}", "parentage")
    assert losses == {
        "one": Losses(parents=2),  # of the first, which has none, the operator tells the same
        "two": Losses(more=("parents",)),
    }


@pytest.mark.parametrize("other", [999 * ORDERS_PER_RUN + 1, 2 * ORDERS_PER_RUN + 1])
@pytest.mark.parametrize(
    ("statement", "lost"),
    [
        (f"UPDATE parentage SET parent_id = {{}} WHERE child_id = {ORDERS_PER_RUN + 2}", Losses(parents=1)),
        ("UPDATE task SET winner_id = {} WHERE run_id = 1 AND number = 0", Losses(winners=1)),
        (f"UPDATE candidate SET status = 'same_code', same_code_as_id = {{}} WHERE id = {ORDERS_PER_RUN + 3}", Losses()),
    ],
)
def test_a_relative_of_another_run_is_damage_and_no_lost_run(
    families: Any, statement: str, lost: Losses, other: int
) -> None:
    assert families(statement.format(other)) == ({"one": lost} if lost else {})


def test_what_finals_lost_is_counted_once(families: Any) -> None:
    finalist = f"candidate_id = {ORDERS_PER_RUN + 2}"
    assert families(f"DELETE FROM final WHERE {finalist}", "final")["one"] == Losses(finals=1)
    assert families("SELECT 1", "final") == {}, "its times tell of the same"
    assert families("SELECT 1", "final", "timing", "check")["one"].finals == 1


@pytest.mark.parametrize(("unreadable", "finals"), [((), 0), (("final",), 1)])
def test_a_winner_without_any_result_has_lost_that_of_a_final(
    families: Any, unreadable: tuple[str, ...], finals: int
) -> None:
    statements = [f"DELETE FROM {t} WHERE candidate_id = {ORDERS_PER_RUN + 2} AND round > 0" for t in ('"check"', "timing")]
    losses = families(";".join([*statements, f"DELETE FROM final WHERE candidate_id = {ORDERS_PER_RUN + 2}"]), *unreadable)
    assert losses == ({"one": Losses(finals=finals)} if finals else {})


def test_lost_times_are_counted_once(families: Any) -> None:
    losses = families(f"DELETE FROM timing WHERE candidate_id = {ORDERS_PER_RUN + 1}", "timing")
    assert losses["one"].times == 1
    again = families(f"DELETE FROM timing WHERE candidate_id = {ORDERS_PER_RUN + 3}", "timing")
    assert again["one"].times == 2


def test_times_of_a_final_are_missed_by_its_verdict(families: Any) -> None:
    losses = families(f"DELETE FROM timing WHERE candidate_id = {ORDERS_PER_RUN + 2} AND round = 1", "timing")
    assert losses["one"] == Losses(times=1, more=("times",))


def test_a_lost_workload_is_counted_with_all_that_was_of_it(families: Any) -> None:
    losses = families("DELETE FROM task WHERE run_id = 1 AND number = 0")
    assert losses == {"one": Losses(workloads=1, candidates=4, finals=1)}


def test_of_a_run_that_is_there_already_a_load_says_nothing(
    copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, where = tmp_path / "rest.dump", str(tmp_path / "new.db")
    run_command(["dump", "--db", str(lost_parents(copy)), "--out", str(file)])
    for said in (True, False):
        capfd.readouterr()
        assert run_command(["load", str(file), "--db", where]) == 0
        assert ("evo: one: salvaged from a damaged file" in capfd.readouterr().err) is said


def test_what_is_lost_of_a_candidate_is_not_told_as_something_else(
    tmp_path: Path, words: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "one")
        store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
        store.add_final(run, 0, s.final(0.5), elapsed_s=1.0)
        store.set_status(run, RunStatus.FINISHED, elapsed_s=1.0)
        name = public_id(run.uid, 0)
    assert "4 of 4 cases passed" in words("show", name, "--db", path)
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute('DELETE FROM "check" WHERE round = 0')
        raw.execute("DELETE FROM build")
        raw.execute("DELETE FROM timing WHERE round > 0")
        raw.execute("DELETE FROM final")
        raw.execute("DELETE FROM artefact WHERE kind = 'source'")
        mend(raw, ["check", "build", "final", "timing", "artefact"])
    shown = words("show", name, "--db", path)
    assert "2 of 2 cases passed; those of the search were lost with a damaged file" in shown
    assert "ok; all else of it was lost with a damaged file" in shown
    assert "no final race of a candidate is left; its best so far: " in words("show", "one", "--db", path)
    with Store.open(path, write=False) as store:
        record = queries.candidate(store, name)
    recorded: Any = SimpleNamespace(record=record, seeds=dict.fromkeys(Stage, 1))
    assert [v["stage"] for v in _verdicts(recorded)] == ["final"]
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute('DELETE FROM "check" WHERE round > 0')
    gate = next(line for line in words("show", name, "--db", path).splitlines() if line.startswith("gate"))
    assert gate.split(maxsplit=1)[1].strip() == "those of the search were lost with a damaged file"
    capfd.readouterr()
    assert run_command(["show", name, "--source", "--db", str(path)]) == 2
    assert "has no source: it was dropped by evo prune or lost with a damaged file\n" in capfd.readouterr().err


def test_orphans_are_kept_as_stretches() -> None:
    orders = [0, 1, 2, 5, 6, 9]
    found = Orphans.among(orders, {1, 2, 5, 9})
    assert found.stretches == ((1, 5), (9, 9))
    assert [o for o in orders if o in found] == [1, 2, 5, 9]
    assert read_orphans({SALVAGED: json.loads(json.dumps(kept_losses(Losses(), found, {})))}) == found
    for strange in (None, 3, {"orphans": 3}, {"orphans": [3, [1], ["a", "b"], [True, 2]]}):
        assert read_orphans({SALVAGED: strange}) == Orphans()


def test_a_salvaged_run_is_resumed_as_it_was_set_up(copy: Path, tmp_path: Path) -> None:
    reload(lost_parents(copy), tmp_path / "new.db")
    with Store.open(tmp_path / "new.db", write=False) as store:
        assert store.run("one").spec == replace(s.SPEC, name="one")


def test_values_that_are_none_cost_their_rows_and_not_the_rest(copy: Path, tmp_path: Path) -> None:
    """A bad byte can turn a number into a text, or end a JSON document."""
    lost_winner(copy)
    with closing(sqlite3.connect(copy)) as raw, raw:
        for table, column in (("parentage", "child_id"), ("parentage", "parent_id"), ("timing", "candidate_id")):
            raw.execute(f"UPDATE {table} SET {column} = 'x' WHERE {column} = ?", (ORDERS_PER_RUN + 7,))
        raw.execute("UPDATE run SET options = '{\"fixed\": ' WHERE name = 'one'")
    losses = reload(copy, tmp_path / "new.db").losses
    assert losses["one"].winners == 1
    with Store.open(tmp_path / "new.db", write=False) as store:
        assert queries.run(store, "one").salvaged == losses["one"]
        assert len(store.evaluations(store.run("two"))) == NUMBER


def test_losses_add_up_and_are_read_of_nothing_strange() -> None:
    twice = Losses(finals=1, more=("times",)) + Losses(finals=2, parents=1, more=("times", "checks"))
    assert twice == Losses(finals=3, parents=1, more=("times", "checks"))
    assert read_losses({}) is None
    for strange in (None, 3, [], {}, {"winners": "x\x1b"}, {"winners": -1}, {"more": "times"}, {"more": ["<b>"]}):
        assert read_losses({SALVAGED: strange}) is None
    assert str(Losses(winners=1)) == "salvaged from a damaged file: 1 winner was lost"
    assert str(Losses(winners=1, finals=3, parents=12)) == (
        "salvaged from a damaged file: 1 winner, 3 verdicts of the finals and the parents of 12 candidates were lost"
    )
