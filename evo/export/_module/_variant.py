"""One variant of this package: what manifest.json says of a source, its binary and how to call it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "Busy", "Unavailable", "Variant", "read_unchanged", "slower"]

FOLDER = Path(__file__).resolve().parent


class Unavailable(Exception):
    """A variant does not run here; the message is the reason."""


class Busy(Unavailable):
    """Not at this moment, but perhaps later."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One build of a winner: for `arch`. `sizes`: the workload it was tuned for, by dimension. `fixed`: those of them that
    are compiled in. The record's `standing`: "measured", or "compiled" from what was measured on `measured_arch` alone.

    `arguments`: the entry point's parameters in order: P an address, q an int64, i an int32, f a float, d a double.
    """

    index: int
    target: str
    arch: str
    dtype: str
    sizes: Mapping[str, int]
    fixed: frozenset[str]
    entry: str
    arguments: str
    record: Mapping[str, Any]

    def __str__(self) -> str:
        tuned = "x".join(map(str, self.sizes.values()))
        if self.record.get("standing") == "compiled":
            tuned += f" on {self.record['measured_arch']}"
        return f"variant {self.index} ({self.target} {self.arch}, {self.dtype}, tuned for {tuned})"

    def tuned_as(self, other: Variant) -> bool:
        """Whether both are builds for the same problem."""
        return (self.target, self.dtype, self.sizes) == (other.target, other.dtype, other.sizes)


def slower(record: Mapping[str, Any]) -> str:
    """By what PyTorch was faster where a build was measured, in words, from its record in manifest.json: by all of the
    interval of a final that nothing disturbed. Empty if it was not, or is not known."""
    if record.get("standing") == "compiled":
        return ""
    told = record.get("record", {})
    finals = (t for t in told.get("timings", ()) if t.get("stage") == "final" and t.get("protocol") != "hot")
    timing = next((t for t in finals if t.get("contender") == "candidate" and t.get("ratio_low")), None)
    if timing is None or timing["ratio_low"] <= 1.0 or (timing.get("clocks") or {}).get("disturbed"):
        return ""
    sizes = "x".join(map(str, record["workload"]["dims"].values()))
    where = told.get("device") or record["arch"]
    return f"measured to be faster at {sizes} on {where}, where a variant has {1 / timing['ratio']:.2f} times its speed"


def read_unchanged(name: str, sha256: str) -> bytes:
    """The bytes of a file of this package. Raises Unavailable if it is missing or not the one exported."""
    try:
        data = (FOLDER / name).read_bytes()
    except OSError as error:
        raise Unavailable(f"{name} cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Unavailable(f"{name} is not the file that was exported (its sha256 differs from the manifest's)")
    return data
