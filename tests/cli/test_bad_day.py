"""What befalls a search from outside: signals, files that vanish, no standard output. Nothing that was recorded is lost."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from evo.lineage.store import Store
from evo.testing.toy_kernel import TEMPLATE, write_kernel
from tests.ended import EVO
from tests.report.recorded import Plan, record_run

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 200.0
MODES = tuple(f"m{n}" for n in range(500))


class Searching:
    """A search of a toy kernel in a folder and with a TMPDIR of its own, in a process group of its own."""

    def __init__(self, folder: Path, *more: str, reference: str = "") -> None:
        """more: options; reference: what the kernel's reference does first."""
        self.folder, self.db, self.tmp = folder, folder / "runs" / "lineage.db", folder / "tmp"
        self.tmp.mkdir()
        tagged = TEMPLATE.replace("const float f", "volatile int tag = {{ p.mode[1:] }}; (void)tag;\n    const float f")
        self.kernel = write_kernel(folder / "toy", MODES, template=tagged)
        if reference:
            statement = (self.kernel / "kernel.py").read_text().replace("{\"y\": 2", f"({reference}) or {{\"y\": 2")
            (self.kernel / "kernel.py").write_text(statement)
        words = ("search", str(self.kernel), "--target", "cpu", "--name", "mine", "--sampler", "random")
        words += more or ("--budget", "1h")
        self.output = (folder / "output").open("w+")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.tmp), "HOME": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, *EVO, *words, "--db", str(self.db)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self.output,
            process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def recorded(self, db: Path | None = None) -> int:
        try:
            with closing(sqlite3.connect(f"file:{db or self.db}?mode=ro", uri=True)) as connection:
                return int(connection.execute("SELECT count(*) FROM candidate").fetchone()[0])
        except sqlite3.Error:
            return 0

    def until(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.recorded() < count:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        """The exit code of the search, and its stderr."""
        code = self.process.wait(PATIENCE_S)
        return code, self.said()

    def said(self) -> str:
        return Path(self.output.name).read_text()


@pytest.fixture
def searching(tmp_path: Path) -> Iterator[Searching]:
    yield from _watched(Searching(tmp_path))


def _watched(started: Searching, candidates: int = 3) -> Iterator[Searching]:
    """Yields a search once so many candidates are recorded; nothing of it may be left when the test has ended."""
    with started.output, started.process:
        started.until(candidates)
        tree = psutil.Process(started.process.pid).children(recursive=True)
        yield started
        started.process.kill()
    assert not psutil.wait_procs(tree, timeout=30)[1], "workers outlive their search"
    left = [p.name for p in started.tmp.iterdir()] if started.tmp.exists() else []
    assert not [name for name in left if name.startswith(("pymp-", "evo-"))]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_search_within_seconds_with_its_record(searching: Searching, number: signal.Signals) -> None:
    began = time.monotonic()
    os.killpg(searching.process.pid, number)
    code, said = searching.ended()
    assert code == 130
    assert time.monotonic() - began < 15
    assert "in 10 s at most; a second signal ends it at once" in said
    assert "evo: interrupted; everything finished is stored. Continue with: evo resume mine" in said
    assert searching.recorded() >= 3


@pytest.mark.slow
def test_a_second_signal_ends_a_search_at_once(searching: Searching) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        searching.process.send_signal(number)
        time.sleep(0.05)
    began = time.monotonic()
    code, said = searching.ended()
    assert code == 130
    assert time.monotonic() - began < 5  # on a machine that is busy
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_killed_search_leaves_no_process_and_no_temporary_file(searching: Searching) -> None:
    searching.process.kill()
    assert searching.ended() == (-9, "")


LOSSES: dict[str, Callable[[Searching], object]] = {
    "was deleted or moved": lambda s: s.db.unlink(),
    "was replaced by another file": lambda s: (s.folder / "new").touch() or (s.folder / "new").rename(s.db),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", LOSSES)
def test_a_search_whose_database_is_lost_ends_and_says_where_its_record_is(searching: Searching, fault: str) -> None:
    before = searching.recorded()
    LOSSES[fault](searching)
    began = time.monotonic()
    code, said = searching.ended()
    assert code == 2
    assert time.monotonic() - began < 15
    (line,) = said.strip().splitlines()
    assert line.startswith(f"evo: the database {searching.db} {fault} while it was written to; all that was recorded is in ")
    (saved,) = searching.db.parent.glob("lineage.recovered-*.db")
    assert line.endswith(f"go on with: evo resume mine --db {saved}")
    assert searching.recorded(saved) >= before
    assert not searching.db.exists() or searching.db.stat().st_size == 0


@pytest.fixture
def holding_finals(tmp_path: Path) -> Iterator[Searching]:
    """Finals that take a minute or more, and have begun: each random case of a finalist asks the reference."""
    slow = Searching(tmp_path, "--evaluations", "1", "--finalists", "1", reference="time.sleep(0.07)")
    for started in _watched(slow, candidates=1):
        assert started.process.stdout is not None
        assert any(line.startswith(b"finals of ") for line in started.process.stdout)
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["was deleted or moved", "was made read-only"])
def test_finals_whose_database_is_lost_end_at_once_and_say_where_the_record_is(
    holding_finals: Searching, fault: str
) -> None:
    before, db = holding_finals.recorded(), holding_finals.db
    (LOSSES.get(fault) or (lambda s: s.db.chmod(0o444)))(holding_finals)
    began = time.monotonic()
    code, said = holding_finals.ended()
    assert code == 2
    assert time.monotonic() - began < 15
    (line,) = said.strip().splitlines()
    assert line.startswith(f"evo: the database {db} {fault} while it was written to; all that was recorded is in ")
    (saved,) = db.parent.glob("lineage.recovered-*.db") if fault in LOSSES else (db,)
    assert holding_finals.recorded(saved) == before == 1


@pytest.mark.slow
def test_a_kernel_that_changes_under_its_search_ends_it_and_blames_no_candidate(searching: Searching) -> None:
    template = searching.kernel / "cpu.cpp.j2"
    template.write_text(template.read_text() + "\n")
    code, said = searching.ended()
    assert code == 2
    (line,) = said.strip().splitlines()
    assert "were changed or deleted while they were in use" in line
    with closing(sqlite3.connect(searching.db)) as connection:
        assert {status for (status,) in connection.execute("SELECT status FROM candidate")} <= {"ok", "same_code"}


@pytest.mark.slow
def test_a_search_whose_output_nobody_reads_any_more_ends_with_its_record(searching: Searching) -> None:
    assert searching.process.stdout is not None
    searching.process.stdout.close()
    code, said = searching.ended()
    assert code == 130
    (line,) = said.strip().splitlines()
    assert line.startswith("evo: interrupted; everything finished is stored. Continue with: evo resume mine")


@pytest.mark.slow
def test_a_search_needs_no_standard_input_or_output(tmp_path: Path) -> None:
    write_kernel(tmp_path / "toy")
    words = "-m evo search ./toy --target cpu --evaluations 2 --finalists 1 --name mine --db mine.db"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"exec {sys.executable} {words} >&- 2>&- <&-"
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    with closing(sqlite3.connect(tmp_path / "mine.db")) as connection:
        assert connection.execute("SELECT status FROM run").fetchall() == [("finished",)]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_question_needs_no_standard_input_or_output(tmp_path: Path, closed: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m evo runs --db none.db {closed}; echo $?"
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.split()[-1] == "2"
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose database has a run."""
    folder = tmp_path_factory.mktemp("recorded")
    with Store.open(folder / "runs" / "lineage.db", write=True) as store:
        record_run(store, Plan(name="mine", evaluations=40))
    return folder


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--help", 0),
        ("runs --help", 0),
        ("best", 0),
        ("report mine --out report.html", 0),
        ("best none", 2),
        ("best none 2>&1", 128 + signal.SIGPIPE),  # what is wrong could not be said
        ("doctor", 128 + signal.SIGPIPE),  # a verdict that could not be said
    ],
)
def test_a_reader_that_has_read_enough_is_no_failure_of_a_question(recorded: Path, command: str, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = f"set -o pipefail; {sys.executable} -m evo {command} | true"
    done = subprocess.run(["bash", "-c", piped], cwd=recorded, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (1 if code == 2 else 0), done.stderr


SPACE = ROOT / "benchmarks" / "spaces" / "layernorm-4096x4096-float16-H200.t4.json.gz"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "interrupts", "apart_s"),
    [(signal.SIGINT, 2, 0.5), (signal.SIGTERM, 1, 0.0)],
)
def test_a_replay_says_how_far_it_is_and_ends_when_it_is_interrupted(
    number: signal.Signals, interrupts: int, apart_s: float
) -> None:
    often = "import evo.report.progress as p; p.LINE_EVERY_S = 2.0; import evo.cli; evo.cli.main()"
    words = ("replay", str(SPACE), "--repeats", "5000", "--samplers", "random", "--jobs", "2")
    command = [sys.executable, "-c", often, *words]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        said = next((line for line in process.stderr if not line.startswith("evo: 0 of")), "nothing")
        assert " of 5000 replays are done, about " in said
        children = psutil.Process(process.pid).children(recursive=True)
        for n in range(interrupts):
            time.sleep(apart_s if n else 0.0)
            if process.poll() is None:  # the first may have ended it
                os.killpg(process.pid, number)  # as ^C does
        began = time.monotonic()
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in ((130,) if interrupts == 1 else (130, -signal.SIGINT))
        assert time.monotonic() - began < 10
        assert "Traceback" not in err
        if interrupts == 1:
            assert len(err.splitlines()) == 1
            interrupted = re.search(r"evo: interrupted; the scores are those of (\d+) of 5000 replays", err)
            assert interrupted
            assert f"\n{int(interrupted[1]):,} repeats, seed 0, 1 in flight" in out
            assert int(interrupted[1]) < 5000
            assert SPACE.name in out
    assert not psutil.wait_procs(children, timeout=30)[1]
