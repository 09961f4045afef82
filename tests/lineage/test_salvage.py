"""Half-copied and corrupted files: noticed, and what can be read of them is saved."""

from __future__ import annotations

import io
import os
import random
import re
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest
import samples as s
from damage import PAGE, leaf_pages, spoil

from evo.analysis import queries
from evo.errors import StoreError
from evo.lineage import RunStatus, StoredEvaluation
from evo.lineage.load import load
from evo.lineage.salvage import Salvaged, is_whole, salvage
from evo.lineage.store import Store

NUMBER = 400


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "lineage.db"
    with Store.open(path, write=True) as store:
        for name in ("one", "two"):
            run = s.new_run(store, name)
            with store.transaction():
                for order in range(NUMBER // 2):
                    evaluation = s.refused(order) if order % 4 == 1 else s.passed(order)
                    store.add(run, s.ref(order, *range(max(0, order - 2), order)), evaluation, elapsed_s=0.0)
            store.set_winner(run, 0, 6)
            store.set_status(run, RunStatus.FINISHED, elapsed_s=1.0)
    return path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy.db"
    path.write_bytes(sound.read_bytes())
    return path


def evaluations(path: Path) -> dict[tuple[str, int], StoredEvaluation]:
    with Store.open(path, write=False) as store:
        return {
            (run.name, e.ref.order): e for run in queries.runs(store) for e in store.evaluations(store.run(run.name))
        }


def saved(damaged: Path, folder: Path) -> tuple[Salvaged, Path, dict[str, int]]:
    file = io.BytesIO()
    found = salvage(damaged, file)
    file.seek(0)
    restored = folder / "restored.db"
    left_out = load(file, "the rest", restored).left_out
    with sqlite3.connect(restored) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
    raw.close()
    return found, restored, left_out


def test_a_sound_file_is_whole_and_saved_entirely(sound: Path, tmp_path: Path) -> None:
    assert is_whole(sound)
    found, restored, left_out = saved(sound, tmp_path)
    assert (found.gaps, found.spoilt, found.unread, left_out) == ({}, 0, (), {})
    assert evaluations(restored) == evaluations(sound)


@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
def test_of_a_half_copied_file_the_copied_half_is_saved(copy: Path, sound: Path, tmp_path: Path, part: float) -> None:
    os.truncate(copy, int(copy.stat().st_size * part) // PAGE * PAGE)
    assert not is_whole(copy)
    said = f"is damaged; restore a backup, or save what can still be read with: evo dump --out FILE --db {copy}"
    with pytest.raises(StoreError, match=f"{re.escape(said)}$"):
        Store.open(copy, write=False).close()
    found, restored, _ = saved(copy, tmp_path)
    assert found.gaps
    expected, got = evaluations(sound), evaluations(restored)
    assert len(got) > 0.3 * part * NUMBER
    for key, stored in got.items():
        assert stored.ref.proposal.genome == expected[key].ref.proposal.genome
        assert stored.evaluation.status == expected[key].evaluation.status


@pytest.mark.parametrize("table", ["candidate", "check", "timing", "parentage", "build"])
def test_a_bad_page_costs_what_was_on_it(copy: Path, sound: Path, tmp_path: Path, table: str) -> None:
    pages = leaf_pages(copy, table)
    bad = [pages[1], pages[len(pages) // 2], pages[len(pages) // 2 + 1]] if len(pages) > 4 else pages[1:2]
    rows = sqlite3.connect(copy).execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]
    spoil(copy, bad)
    assert not is_whole(copy)
    found, restored, _ = saved(copy, tmp_path)
    assert found.gaps.keys() == {table}
    assert 1 <= found.gaps[table] <= len(bad)
    kept = rows - found.written[table]
    assert 0 < kept <= rows * 2.5 * len(bad) / len(pages)
    got = evaluations(restored)
    assert len(got) == (found.written["candidate"] if table == "candidate" else NUMBER)
    assert got.keys() <= evaluations(sound).keys()


def test_spoilt_sources_are_left_out_and_their_candidates_stay(copy: Path, tmp_path: Path) -> None:
    with sqlite3.connect(copy) as raw:
        raw.execute("UPDATE artefact SET data = substr(data, 1, 20) || x'00' WHERE rowid IN (3, 5, 7)")
    raw.close()
    found, restored, left_out = saved(copy, tmp_path)
    assert (found.spoilt, left_out) == (3, {})
    with Store.open(restored, write=False) as store:
        assert len(store.results(store.run("one"))) == NUMBER // 2


def test_a_file_without_its_first_page_is_lost_and_said_to_be(copy: Path, tmp_path: Path) -> None:
    spoil(copy, [2, 3, 4])
    with copy.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(3996))
    with pytest.raises(StoreError, match=r"nothing can be saved from .*; restore a backup"):
        salvage(copy, io.BytesIO())


def test_a_header_alone_has_nothing_to_save(copy: Path) -> None:
    os.truncate(copy, PAGE)
    with pytest.raises(StoreError, match="restore a backup"):
        salvage(copy, io.BytesIO())


def test_any_noise_anywhere_ends_in_a_sentence_or_a_sound_database(sound: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    for turn in range(12):
        copy = tmp_path / f"copy{turn}.db"
        copy.write_bytes(sound.read_bytes())
        with copy.open("r+b") as file:
            for _ in range(rng.choice([1, 5, 50])):
                file.seek(rng.randrange(100, copy.stat().st_size - 64))
                file.write(rng.randbytes(rng.choice([1, 16, 64])))
        folder = tmp_path / str(turn)
        folder.mkdir()
        with suppress(StoreError):
            _, restored, _ = saved(copy, folder)
            evaluations(restored)
