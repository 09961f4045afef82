"""Problems that nobody measured: a race between the nearest variants and PyTorch decides, once a machine."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.runtime.choice import CLOSE, EXACT, FAR
from evo.runtime.package import read_whole, write_whole
from tests.export.exports import edit_manifest
from tests.runtime.conftest import Importer
from tests.runtime.test_slower import timed

FASTER = {"ratio": 0.8, "ratio_low": 0.75, "ratio_high": 0.85}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def way(module: ModuleType, rows: int, cols: int) -> str:
    """How a call is explained, which is right."""
    x = torch.randn(rows, cols)
    torch.testing.assert_close(module.layer_norm(x, (cols,)), functional.layer_norm(x, (cols,)), rtol=1e-5, atol=1e-5)
    return str(module.explain(x, (cols,)))


def decide(cache: Path, problem: str, ratio: float) -> None:
    """As if a race at this problem had ended like that."""
    for path in cache.glob("race-*"):
        variant, _, sizes = json.loads(read_whole(path) or b"")
        if sizes == problem:
            write_whole(path, json.dumps([variant, ratio, sizes]).encode())


def seems(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *, busy: bool) -> None:
    """What a package finds of the machine, whatever runs beside the test."""
    monkeypatch.setattr(f"{module.__name__}.runtime.trial.watch", lambda: lambda: busy)
    monkeypatch.setattr(f"{module.__name__}.runtime.trial._FAR", math.inf)


def test_a_race_decides_for_all_problems_of_its_bucket_and_is_remembered(
    copy_of: Path, use: Importer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = use(copy_of)
    seems(module, monkeypatch, busy=False)
    assert FAR in way(module, 300, 100)
    module.also_serve(measure=True)
    for rows, cols in ((300, 100), (301, 101), (64, 900)):
        raced = "64x900" if cols == 900 else "300x100"
        assert f" at {raced}" in way(module, rows, cols)
    assert len(list(cache.glob("race-*"))) == 2
    for ratio, said in (
        (0.5, ", raced here at 300x100: 2.00 times PyTorch's speed, "),
        (0.99, "PyTorch: measured to be as fast at 300x100 on this machine, where a variant has 1.01 times its speed; "),
        (2.0, "; also_serve(slower=True)"),
    ):
        decide(cache, "300x100", ratio)
        later = use(Path(shutil.copytree(copy_of, tmp_path / f"later_{ratio:.0f}")))  # as in another process
        later.also_serve(measure=True)
        assert said in way(later, 299, 99)


def test_a_busy_machine_decides_nothing_and_is_asked_again_later_but_not_for_ever(
    copy_of: Path, use: Importer, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = use(copy_of)
    module.also_serve(measure=True)
    now, races = [1000.0], []
    seems(module, monkeypatch, busy=True)
    race = module.runtime.jit.race
    monkeypatch.setattr(f"{module.__name__}.runtime.dispatch.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(f"{module.__name__}.runtime.jit.race", lambda *args: races.append(now[0]) or race(*args))
    for seconds in (0.0, 0.5, 0.4, 0.2, 1.0, 1.1, 3.9, 0.2, 8.1):
        now[0] += seconds
        assert way(module, 300, 100) == "PyTorch: this machine is too busy to race a variant with it"
    assert [round(at - 1000.0, 1) for at in races] == [0.0, 1.1, 3.2, 7.3, 15.4]
    for _ in range(2):
        now[0] += 1e6
        assert way(module, 300, 100).startswith("PyTorch: this machine is too busy to race a variant with it; also_serve(")
    assert len(races) == 6, "the rest of the process is PyTorch's"
    assert capfd.readouterr().err.count("problems not measured before go to PyTorch: this machine is too busy") == 1
    assert not list(cache.glob("race-*"))
    seems(module, monkeypatch, busy=False)
    module.also_serve(measure=True)
    assert " at 300x100" in way(module, 300, 100)
    assert len(list(cache.glob("race-*"))) == 1


def test_real_programs_on_the_same_core_leave_a_problem_to_pytorch(copy_of: Path, use: Importer, cache: Path) -> None:
    module = use(copy_of)
    module.also_serve(measure=True)
    before = os.sched_getaffinity(0)
    core = {min(before)}
    program = f"import os; os.sched_setaffinity(0, {core}); print(flush=True)\nwhile True: pass"
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(4)]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        os.sched_setaffinity(0, core)  # of this thread, and of the race's, which it starts
        assert way(module, 300, 100) == "PyTorch: this machine is too busy to race a variant with it"
        assert not list(cache.glob("race-*"))
    finally:
        os.sched_setaffinity(0, before)
        for process in running:
            process.kill()
            process.communicate()


def test_what_was_measured_is_not_raced(
    copy_of: Path, use: Importer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_manifest(copy_of, timed(FASTER, variants=(0, 1)))
    module = use(copy_of)
    module.also_serve(measure=True)
    for cols, how in ((96, EXACT), (104, CLOSE), (1024, EXACT)):
        assert how in way(module, 64, cols)
    assert not cache.exists()
    seems(module, monkeypatch, busy=False)
    assert " at 64x100" in way(module, 64, 100)  # no whole vectors


@pytest.mark.parametrize("how", [{"beside": "2.5.1"}, {"device": "another"}, {"disturbed": True}], ids=str)
def test_what_was_measured_otherwise_is_raced(copy_of: Path, use: Importer, how: Any) -> None:
    edit_manifest(copy_of, timed(FASTER, variants=(0, 1), **how))
    module = use(copy_of)
    module.also_serve(measure=True)
    assert EXACT not in way(module, 64, 96)


def test_where_the_data_decide_even_what_was_measured_is_raced(
    copy_of: Path, use: Importer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_manifest(copy_of, timed({"ratio": 1.2, "ratio_low": 1.1, "ratio_high": 1.3}))
    module = use(copy_of)
    seems(module, monkeypatch, busy=False)
    monkeypatch.setattr(module.frontend, "DATA_DECIDE", ("cols",), raising=False)
    assert "PyTorch: measured to be faster at 64x96" in way(module, 64, 96)
    module.also_serve(measure=True)
    assert " at 64x96" in way(module, 64, 96)
    assert len(list(cache.glob("race-*"))) == 1


@pytest.mark.parametrize("launched", ["use", pytest.param("natively", marks=pytest.mark.slow)])
def test_a_race_in_the_same_bucket_takes_nothing_from_what_was_measured(
    copy_of: Path, launched: str, cache: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """88 columns are of the bucket of 96, and nearer to 84, which nobody measured."""

    def change(manifest: dict[str, Any]) -> None:
        timed(FASTER)(manifest)
        manifest["variants"][1]["workload"] = manifest["variants"][1]["workload"].replace("cols=1024", "cols=84")

    edit_manifest(copy_of, change)
    module = request.getfixturevalue(launched)(copy_of)
    module.also_serve(measure=True)
    seems(module, monkeypatch, busy=False)
    assert "64x88" in way(module, 64, 88)
    assert f"variant 0 (cpu native, float32, tuned for 64x96){EXACT}" in way(module, 64, 96)


def test_a_race_is_remembered_for_pytorchs_back_ends_of_then(copy_of: Path, use: Importer) -> None:
    dispatch = use(copy_of).frontend.DISPATCH
    before = dispatch._race_file((-1, torch.float32, 64, 96))
    assert dispatch._race_file((-1, torch.float32, 64, 96)) == before
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert dispatch._race_file((-1, torch.float32, 64, 96)) != before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_a_race_decides_for_no_other_kind_of_call(
    exported_attention: Path, use: Importer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A causal call, or one with a mask, differs from another in what is compiled into variants."""
    module = use(Path(shutil.copytree(exported_attention, tmp_path / "raced_attention")))
    seems(module, monkeypatch, busy=False)
    module.also_serve(measure=True, slower=True)
    q, k, v = (torch.randn(1, 4, 200, 64) for _ in range(3))
    for options, told in (
        ({}, "128x64,"),
        ({"is_causal": True}, "128x64 causal,"),
        ({"attn_mask": torch.rand(200, 200) > 0.5}, "128x64 attn_mask,"),
        ({"attn_mask": torch.randn(200, 200)}, "128x64 attn_mask additive,"),
    ):
        own = module.scaled_dot_product_attention(q, k, v, **options)
        torchs = functional.scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(own, torchs, rtol=1e-5, atol=1e-5)
        assert told in module.explain(q, k, v, **options).replace(")", ",")


def test_a_race_that_cannot_be_held_leaves_the_problem_to_pytorch(
    copy_of: Path, use: Importer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    module = use(copy_of)
    module.also_serve(measure=True)
    monkeypatch.setattr(module.frontend, "timed", without_memory)
    assert "PyTorch: no race with it could be held: no memory is left; " in way(module, 64, 96)
    module.also_serve(slower=True)
    assert way(module, 64, 96).startswith("variant 0 ")


@pytest.mark.slow
def test_the_native_launcher_follows_the_race(
    copy_of: Path, natively: Importer, cache: Path, launchers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = natively(copy_of)
    seems(module, monkeypatch, busy=True)
    module.also_serve(measure=True)
    for _ in range(2):
        assert way(module, 300, 100) == "PyTorch: this machine is too busy to race a variant with it"
    seems(module, monkeypatch, busy=False)
    module.also_serve(measure=False)
    assert FAR in way(module, 300, 100)
    module.also_serve(measure=True)
    assert "300x100" in way(module, 300, 100)
    assert "300x100" in way(module, 290, 105)
    assert "64x900" in way(module, 64, 900)
    module.also_serve(slower=True)
    assert ", raced here at " in way(module, 65, 910)
    module.also_serve(measure=False)
    assert FAR in way(module, 290, 105)
