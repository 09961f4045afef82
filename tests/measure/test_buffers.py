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


def test_sums_tell_what_of_which_set_has_changed(arena: Arena) -> None:
    fixed, outputs = arena.fixed_sums(), arena.output_sums(0, 4)
    arena.sets[2].outputs["y"].fill_(1)
    assert (arena.output_sums(0, 4) != outputs).tolist() == [[False] * 2, [False] * 2, [True, False], [False] * 2]
    assert arena.changed(fixed) == ""
    w = arena.sets[1].inputs["w"]
    w[2] += 1
    assert (arena.fixed_sums() != fixed).any(1).tolist() == [False, True, False, False]
    assert arena.changed(fixed) == "input w was changed"


@pytest.mark.parametrize(("name", "offset"), [("y", -1), ("y", 35), ("tail", -1), ("tail", 3), ("tail", 900)])
def test_what_is_written_beside_an_output_is_named(arena: Arena, name: str, offset: int) -> None:
    fixed = arena.fixed_sums()
    output = arena.sets[3].outputs[name]
    output.as_strided((1,), (1,), output.storage_offset() + offset).fill_(7)
    assert arena.changed(fixed) == f"memory outside output {name} was written"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 3, 8, 33])
@pytest.mark.parametrize("byte", [NAN, HUGE])
def test_a_poison_leaves_nothing_of_the_outputs_and_all_of_the_rest(dtype: torch.dtype, length: int, byte: int) -> None:
    arena = Arena(Layout({"x": torch.zeros(5)}, {"y": torch.zeros(length, dtype=dtype)}), 4, CPU)
    arena.bytes.fill_(0x5A)
    fixed = arena.fixed_sums()
    arena.poison(1, 3, byte)
    arena.poison(3, 3, byte)  # no set at all
    assert torch.equal(arena.fixed_sums(), fixed)
    span = arena.layout.spans[-1]
    found = arena.bytes[:, span.start : span.end]
    assert (found[[0, 3]] == 0x5A).all()
    assert (found[[1, 2]] == byte).all()
