"""The place of a search: the devices that measure for it."""

from __future__ import annotations

import pytest

from evo.errors import DeviceError, EvoError
from evo.search.place import choose_devices
from evo.targets import find_target


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, ("",)),
        ("all", ("u0", "u1", "u2")),
        ("2,0", ("u2", "u0")),
        ("1", ("u1",)),
        ("3", "there is no device 3 of target cpu: 3 answer"),
        ("0,0", "neither all nor different numbers"),
        ("x", "neither all nor different numbers"),
    ],
)
def test_devices_are_chosen_by_their_indices(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, found: tuple[str, ...] | str
) -> None:
    monkeypatch.setattr(find_target("cpu"), "devices", lambda: {"u0": "L4", "u1": "L4", "u2": "L4"})
    if isinstance(found, tuple):
        assert choose_devices("cpu", asked) == found
    else:
        with pytest.raises(EvoError, match=found):
            choose_devices("cpu", asked)


def test_devices_of_several_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_target("cpu"), "devices", lambda: {"u0": "L4", "u1": "RTX 4090"})
    with pytest.raises(DeviceError, match="times of L4 and RTX 4090 do not compare"):
        choose_devices("cpu", "all")
