"""Records as pandas DataFrames, where pandas is installed: evo itself needs none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from evo.errors import UsageError

Record = TypeVar("Record")


def frame(rows: Iterable[Sequence[object]], columns: Sequence[str]) -> Any:
    """A DataFrame. Raises UsageError where pandas is missing."""
    try:
        import pandas  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        told = f"df() makes a pandas DataFrame, and pandas cannot be imported ({error})"
        raise UsageError(f"{told}: pip install pandas") from error
    return pandas.DataFrame(list(rows), columns=list(columns))


class Records(tuple[Record, ...]):
    """A tuple of records of one class."""

    __slots__ = ()

    def df(self) -> Any:
        """A DataFrame with a row for each record and a column for each field and each property that is printed.
        Raises UsageError where pandas is missing."""
        kind: Any = type(self[0]) if self else None
        names = [*(field.name for field in fields(kind)), *getattr(kind, "PRINTED", ())] if self else []
        return frame(([getattr(record, name) for name in names] for record in self), names)


def with_frames(answer: Any) -> Any:
    """An answer whose lists and tuples of records, or the answer itself if it is one, are `Records`."""
    if type(answer) in (list, tuple):
        return Records(answer) if all(map(is_dataclass, answer)) else answer
    if not is_dataclass(answer) or isinstance(answer, type):
        return answer
    lists = {f.name: v for f in fields(answer) if type(v := getattr(answer, f.name)) in (list, tuple)}
    return replace(answer, **{name: with_frames(value) for name, value in lists.items()})
