"""Memory between guards: what was written that must not be shows, and is named."""

from __future__ import annotations

import pytest
import torch

from evo.measure.buffers import HUGE, NAN, Arena, Layout, Memory

INPUTS = {"x": torch.arange(35.0).reshape(5, 7), "mask": None, "w": torch.arange(3, dtype=torch.int16)}
OUTPUTS = {"y": torch.empty(5, 7), "tail": torch.empty(3, dtype=torch.bfloat16)}
CPU = torch.device("cpu")


def test_an_absent_input_has_no_place() -> None:
    memory = Memory(Layout(INPUTS, OUTPUTS), CPU)
    assert memory.inputs["mask"] is None
    assert set(memory.outputs) == set(OUTPUTS)


def test_strides_are_kept_and_what_lies_between_elements_is_guard() -> None:
    wide = torch.arange(40.0).reshape(5, 8)[:, ::2]
    layout = Layout({"x": wide}, OUTPUTS)
    memory, image = Memory(layout, CPU), Memory(layout, CPU)
    for m in (memory, image):
        m.fill({"x": wide}, NAN)
    x = memory.inputs["x"]
    assert x is not None
    assert (x.stride(), x.tolist()) == (wide.stride(), wide.tolist())
    x.as_strided((1,), (1,), x.storage_offset() + 1).fill_(0)
    assert memory.changed(image) == "input x was changed"


@pytest.fixture
def arena() -> Arena:
    arena = Arena(Layout(INPUTS, OUTPUTS), 4, CPU)
    arena.bytes.fill_(HUGE)
    for memory in arena.sets:
        memory.write(INPUTS)
    return arena


def test_sums_tell_which_set_and_what_of_it_has_changed(arena: Arena) -> None:
    fixed, pieces, outputs = arena.fixed_sums(0, 4), arena.piece_sums(), arena.output_sums(0, 4)
    arena.sets[2].outputs["y"].fill_(1)
    assert torch.equal(arena.fixed_sums(0, 4), fixed)
    assert (arena.output_sums(0, 4) != outputs).tolist() == [[False] * 2, [False] * 2, [True, False], [False] * 2]
    assert arena.changed(pieces, arena.piece_sums()) == ""
    w = arena.sets[1].inputs["w"]
    assert w is not None
    w[2] += 1
    assert (arena.fixed_sums(0, 4) != fixed).any(1).tolist() == [False, True, False, False]
    assert arena.changed(pieces, arena.piece_sums()) == "input w was changed"


@pytest.mark.parametrize(("name", "offset"), [("y", -1), ("y", 35), ("tail", -1), ("tail", 3), ("tail", 900)])
def test_what_is_written_beside_an_output_is_named(arena: Arena, name: str, offset: int) -> None:
    pieces = arena.piece_sums()
    output = arena.sets[3].outputs[name]
    output.as_strided((1,), (1,), output.storage_offset() + offset).fill_(7)
    assert arena.changed(pieces, arena.piece_sums()) == f"memory outside output {name} was written"


@pytest.mark.parametrize("seed", range(5))
def test_a_nudge_changes_every_output_a_little_and_nothing_else(arena: Arena, seed: int) -> None:
    for memory in arena.sets:
        for output in memory.outputs.values():
            output.fill_(1.0)
    fixed, outputs = arena.fixed_sums(0, 4), arena.output_sums(0, 4)
    arena.nudge(1, 3, torch.Generator().manual_seed(seed))
    assert torch.equal(arena.fixed_sums(0, 4), fixed)
    assert (arena.output_sums(0, 4) != outputs).all(1).tolist() == [False, True, True, False]
    assert all((m.outputs["y"] - 1).abs().max() < 1e-6 for m in arena.sets)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_no_element_is_out_of_reach_of_nudges(dtype: torch.dtype) -> None:
    arena = Arena(Layout({"x": torch.zeros(5)}, {"y": torch.zeros(16, dtype=dtype)}), 2, CPU)
    arena.bytes.fill_(0x35)
    before = arena.sets[1].outputs["y"].clone()
    changed = torch.zeros(16, dtype=torch.bool)
    for seed in range(40):
        arena.bytes.fill_(0x35)
        arena.nudge(1, 2, torch.Generator().manual_seed(seed))
        changed |= arena.sets[1].outputs["y"] != before
    assert changed.all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 3, 8, 33])
@pytest.mark.parametrize("word", [0, 1, 2**63 - 1, 0x7F80_FF00_8001_80FF])
def test_a_wipe_leaves_nothing_of_the_outputs_and_all_of_the_rest(dtype: torch.dtype, length: int, word: int) -> None:
    layout = Layout({"x": torch.zeros(5)}, {"y": torch.zeros(length, dtype=dtype)})
    wiped = Arena(layout, 4, torch.device("cpu"))
    wiped.bytes.fill_(0x5A)
    fixed = wiped.fixed_sums(0, 4)
    wiped.wipe(1, 3, word)
    wiped.wipe(3, 3, word)  # no set at all
    assert torch.equal(wiped.fixed_sums(0, 4), fixed)
    span = layout.spans[-1]
    found = wiped.bytes[:, span.start : span.end]
    assert (found[[0, 3]] == 0x5A).all()
    assert torch.equal(found[1], found[2])
    size = 8 if (span.end - span.start) % 8 == 0 else torch.zeros(0, dtype=dtype).element_size()
    pattern = word.to_bytes(8, "little")[:size]
    assert bytes(found[1].tolist())[: len(pattern)] == pattern
