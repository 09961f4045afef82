"""Arguments of their own dtypes, and structures, as both launchers of a package hand them over; and how they are packed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from evo.errors import KernelError
from evo.export import find_exporter
from evo.problem.kernel import Argument
from evo.problem.loading import load_kernel
from evo.runtime.driver import Frame
from tests.export.exports import request_for
from tests.runtime.conftest import Importer

PICKED = str(Path(__file__).parents[1] / "picked")
SIZES = "rows=64,cols=96,dtype=float32,weight_dtype="


@pytest.fixture(scope="module", params=["Python", "native"])
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    out = tmp_path_factory.mktemp("export") / f"exported_picked_{request.param.lower()}"
    find_exporter("module").export(request_for("cpu", "native", out, SIZES + "float64", SIZES + "int8", kernel=PICKED))
    importer: Importer = request.getfixturevalue("natively" if request.param == "native" else "use")
    found = importer(out)
    found.also_serve(measure=False)
    return found


def call(weight: torch.dtype, *, index: torch.dtype = torch.int64, x: torch.dtype = torch.float32) -> tuple[Any, ...]:
    data, weights = torch.randn(70, 33).to(x), (3 * torch.randn(33)).to(weight)
    return data, torch.randint(0, 70, (70,)).to(index), weights, 2.5


SERVED = {"float64": "variant 0", "int8": "variant 1"}
LEFT: dict[str, Callable[[], tuple[Any, ...]]] = {
    "weight_dtype is none of float32, float64, int8": lambda: call(torch.float16),
    "nothing was tuned for weight_dtype=float32 (but for weight_dtype=float64; weight_dtype=int8)": (
        lambda: call(torch.float32)
    ),
    "index is not of the dtype that the kernel takes": lambda: call(torch.float64, index=torch.int32),
    "nothing was tuned for float64 on this device": lambda: call(torch.float64, x=torch.float64),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SERVED)
def test_the_dtype_of_an_argument_chooses_the_variant(module: ModuleType, dtype: str) -> None:
    args = call(getattr(torch, dtype))
    way = module.explain(*args)
    assert way.startswith(f"{SERVED[dtype]} (cpu native, float32, tuned for 64x96 weight_dtype={dtype})")
    assert way.endswith("native launcher" if module.frontend._call is not None else "Python launcher")
    for _ in range(3):  # later calls find the variant in a table
        y, sign = module.picked(*args)
        right, of_right = module.frontend.ORIGINAL(*args)
        torch.testing.assert_close(y, right, rtol=1e-6, atol=1e-6)
        assert sign.dtype == torch.int8
        assert torch.equal(sign, of_right)


@pytest.mark.slow
@pytest.mark.parametrize("reason", LEFT)
def test_a_call_whose_tensors_have_other_dtypes_is_left_to_the_original(module: ModuleType, reason: str) -> None:
    args = LEFT[reason]()
    assert reason in module.explain(*args)
    for own, right in zip(module.picked(*args), module.frontend.ORIGINAL(*args), strict=True):
        assert torch.equal(own, right)


@pytest.mark.slow
def test_its_check_finds_every_variant_right(module: ModuleType) -> None:
    trial = __import__("importlib").import_module(f"{module.__name__}.runtime.trial")
    for number in range(2):
        verdicts = list(trial.verdicts(module.frontend, number, 3, 4))
        assert [v for v in verdicts if v.reason] == []
        assert sum(v.on_variant for v in verdicts) >= 15


def test_arguments_are_packed_by_size_and_alignment() -> None:
    slots = (("i", 4), ("Q", 8), ("f", 4), ("i", 4), ("128s", 64), ("d", 8))
    frame = Frame((1, 1, 1), (32, 1, 1), 0, 1, False, slots)
    frame.pack(7, 2**63, 0.5, -1, bytes(range(128)), 0.1)
    places = (ctypes.c_void_p * 6).from_address(frame.arguments.value or 0)
    assert [place - places[0] for place in places] == [0, 8, 16, 20, 64, 192]
    assert [place % alignment for place, (_, alignment) in zip(places, slots, strict=True)] == [0] * 6
    types = (ctypes.c_int32, ctypes.c_uint64, ctypes.c_float, ctypes.c_int32, ctypes.c_char * 128, ctypes.c_double)
    found = [kind.from_address(place) for kind, place in zip(types, places, strict=True)]
    assert [value.raw if isinstance(value, ctypes.Array) else value.value for value in found] == [
        7, 2**63, 0.5, -1, bytes(range(128)), 0.1
    ]  # fmt: skip


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "and nothing else, has a `layout`": ("x", {"layout": "P"}),
    "is for 5: a layout is of": ("place", {"fields": ("x",)}),
    "has the layout 'P!', which is none": ("place", {"layout": "P!"}),
    "has alignment 48": ("place", {"alignment": 48}),
    "has a field 'z', which is no argument": ("place", {"fields": ("z", "weight", "rows", "cols", "factor")}),
    "input 'weight' is of dtype 'weight_type'": ("weight", {"dtype": "weight_type"}),
    "scalar 'rows' cannot have a dtype that an option chooses": ("rows", {"dtype": "weight_dtype"}),
}


@pytest.mark.parametrize("said", WRONG)
def test_an_argument_that_contradicts_itself_is_refused(said: str) -> None:
    kernel, (name, changed) = load_kernel(PICKED), WRONG[said]
    arguments = tuple(replace(a, **changed) if a.name == name else a for a in kernel.arguments)
    with pytest.raises(KernelError, match=said):
        replace(kernel, arguments=arguments)


def test_an_option_that_is_a_dtype_is_compiled_in_and_has_choices_that_are_dtypes() -> None:
    kernel = load_kernel(PICKED)
    with pytest.raises(KernelError, match="add it to `compile_time_dims` of 'cpu'"):
        replace(kernel, compile_time_dims={})
    with pytest.raises(KernelError, match="option 'weight_dtype' is the dtype of 'weight', and 'float' is none"):
        replace(kernel, choices={"weight_dtype": ("float32", "float")})
    with pytest.raises(KernelError, match="`choices` of 'weight_dtype' are int8, and `options` has no such default"):
        replace(kernel, choices={"weight_dtype": ("int8",)})
    assert Argument(name="a", kind="structure", layout="Pi", fields=("x", "n"), alignment=64).size_bytes == 64
