"""Tuned files: the winners of one kernel's searches as a small text that a repository keeps, and from which a package is
made again. A file holds what an exporter is asked for, an `ExportRequest` a table, without what can be computed again."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from evo.environment import read_toml
from evo.errors import EvoError, UsageError
from evo.evaluation import AA_CONTROL
from evo.export import ExportItem, ExportRequest
from evo.export._package import timing_of
from evo.export._winners import check_alike
from evo.problem.genome import Genome
from evo.problem.loading import find_kernel, is_decorated, load_kernel, template_root
from evo.targets import find_target

_HEADING = "# Found by evo: `evo rebuild` makes its package, `evo check` measures again (docs/in-a-repository.md).\n"
_VERSIONS = ("torch", "compiler", "evo")
_TABLE: Mapping[str, Any] = {"kernel": str, "digest": str, "target": str, "arch": str, "device": str} | {
    **{f"{name}?": str for name in _VERSIONS}, "date": date, "cover?": bool, "points": dict, "results": list
}  # fmt: skip
_NUMBER = (int, float)
_RESULT: Mapping[str, Any] = {"workload": str, "point": str, "candidate": str, "stage?": str, "disturbed?": bool} | {
    "time_us?": _NUMBER, "torch_us?": _NUMBER, "speedup?": _NUMBER, "interval?": list, "noise?": _NUMBER
}  # fmt: skip
_WORDS = {str: "a text", bool: "true or false", date: "a date", dict: "a table", list: "a list", _NUMBER: "a number"}
_PLACE = ("kernel", "target", "arch", "device")


def figures_of(item: ExportItem) -> dict[str, Any]:
    """A winner's figures as a file has them: times in microseconds, the speed-up over PyTorch with its interval, and the
    noise floor of its race. No speed-up if something disturbed the race, nothing for one that was not timed."""
    timing = item.timing or timing_of(item.record)
    if timing is None:
        return {}
    noise = [t["clocks"]["noise_floor"] for t in item.record.get("baselines", ()) if "noise_floor" in t.get("clocks", ())]
    limits = [timing["ratio_high"], timing["ratio_low"]]
    told = {"time_us": timing["median_us"], "torch_us": timing["torch_us"]}
    if timing["disturbed"]:
        told["disturbed"] = True
    else:
        told |= {"speedup": 1 / timing["ratio"], "interval": [1 / r for r in limits if r], "noise": next(iter(noise), None)}
    figures = {name: _rounded(value) for name, value in told.items() if value not in (None, [])}
    return figures | ({} if timing["stage"] == "final" else {"stage": timing["stage"]})


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return value if isinstance(value, bool) else float(f"{value:.5g}")


def _record(result: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of a winner, as far as `timing_of` and `figures_of` read it."""
    record = {"candidate": result["candidate"], "device": table["device"], "created": table["date"].isoformat()}
    disturbed = result.get("disturbed", False)
    if "time_us" not in result or not (disturbed or "speedup" in result):
        return record
    us, stage = result["time_us"], result.get("stage", "final")
    ratio = us / result.get("torch_us", us) if disturbed else 1 / result["speedup"]
    low, high = (1 / s for s in reversed(result.get("interval") or [math.inf, math.inf]))
    limits = {"ratio_low": low, "ratio_high": high} if low else {"ratio_low": None, "ratio_high": None}
    own = {"contender": "candidate", "protocol": stage, "stage": stage, "median_us": us, "ratio": ratio}
    own["clocks"] = {"disturbed": float(disturbed)}
    torch = {"contender": "torch", "protocol": stage, "median_us": result.get("torch_us"), "ratio": None}
    control = {"contender": AA_CONTROL, "protocol": stage, "ratio": 1.0, "clocks": {"noise_floor": result.get("noise")}}
    return record | {"timings": [own | limits], "baselines": [torch, *([control] if "noise" in result else [])]}


# -- writing ------------------------------------------------------------------------------------------------------


def write_tuned(file: Path, parts: Sequence[ExportRequest]) -> None:
    """Writes winners to a file, which keeps those of other devices and workloads that it has. Raises UsageError."""
    before = read_tuned(file) if file.exists() else []
    folders = {part.kernel: find_kernel(part.kernel) for part in (*before, *parts)}
    places = {f: (file.parent / load_kernel(str(f)).name).resolve() for f in folders.values() if is_decorated(f)}
    of_functions = {place: folder for folder, place in places.items()}
    alike = {name: str(of_functions.get(folder, folder)) for name, folder in folders.items()}
    try:
        check_alike([replace(part, kernel=alike[part.kernel]) for part in (*before, *parts)], several=True)
    except UsageError as error:
        raise UsageError(f"{file} is for one kernel, and its backward: choose another --tuned ({error})") from None
    for folder, place in places.items():
        _copy_sources(folder, place, is_ours=place in folders.values())
    parts = [replace(part, kernel=str(places.get(folders[part.kernel], part.kernel))) for part in parts]
    tables = [(_head(part, file), list(part.items)) for part in before]
    for part in parts:
        head, new = _head(part, file), {item.workload: item for item in part.items}
        same = [n for n, (other, _) in enumerate(tables) if all(other[name] == head[name] for name in _PLACE)]
        for n in same:
            if tables[n][0] == head:  # a later result stands where the earlier one was
                tables[n] = head, [new.pop(item.workload, item) for item in tables[n][1]] + list(new.values())
                new = {}
            else:
                tables[n] = tables[n][0], [i for i in tables[n][1] if i.workload not in {p.workload for p in part.items}]
        if new:
            tables.insert(same[-1] + 1 if same else len(tables), (head, list(new.values())))
    text = "\n".join([_HEADING, *("\n".join(_lines(head, items)) for head, items in tables if items)])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file} ({error.strerror}); choose another --tuned") from error


def _copy_sources(folder: Path, place: Path, *, is_ours: bool) -> None:
    """Copies the sources of a decorated function, which lie in a cache, to a folder beside the file. is_ours: whether the
    file names that folder already, so that other sources there are replaced."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}
    try:
        there = {path.name: path.read_bytes() for path in place.iterdir() if path.name in files} if place.exists() else files
        if there != files and not is_ours:
            raise UsageError(f"{place}, where the sources of the function go, holds others: write the file elsewhere")
        place.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (place / name).write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {place} ({error.strerror}), which is to hold the kernel's sources") from error


def _head(part: ExportRequest, file: Path) -> dict[str, Any]:
    """What a table tells of all its results."""
    folder, here = find_kernel(part.kernel).resolve(), file.absolute().parent.resolve()
    path = os.path.relpath(folder, here).replace(os.sep, "/")
    shipped = folder.is_relative_to(template_root())
    found = max(str(item.record.get("created", "")) for item in part.items)
    return {
        "kernel": folder.name if shipped else path if path.startswith("../") else f"./{path}",
        **{name: getattr(part, name) for name in ("digest", "target", "arch")},
        "device": part.environment.get("device", ""),
        **{name: part.environment[name] for name in _VERSIONS if part.environment.get(name)},
        "date": date.fromisoformat(found[:10]),
        **({"cover": True} if part.few else {}),
    }


def _lines(head: Mapping[str, Any], items: Sequence[ExportItem]) -> Iterator[str]:
    yield "[[measured]]"
    yield from _pairs(head)
    for name, genome in {_name(item.genome): item.genome for item in items}.items():
        yield f"\n[measured.points.{name}]"
        yield from _pairs(genome.parameters)
    for item in items:
        yield "\n[[measured.results]]"
        yield from _pairs({"workload": item.workload.key, "point": _name(item.genome), "candidate": item.candidate})
        yield from _pairs(figures_of(item))
    yield ""


def _name(genome: Genome) -> str:
    return genome.digest[:8]


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        key = name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)
        yield f"{key} = {value.isoformat() if isinstance(value, date) else json.dumps(value)}"


# -- reading ------------------------------------------------------------------------------------------------------


def read_tuned(file: Path) -> list[ExportRequest]:
    """The winners in a file, a request for each of its tables. Raises UsageError, which names the line."""
    text, whole = read_toml(file, "tuned file")
    tables = whole.get("measured")
    if not isinstance(tables, list) or not tables or len(whole) > 1:
        key = next((key for key in whole if key != "measured"), "")
        raise UsageError(
            f"tuned file {file}, line {_line(text.splitlines(), (), key)}: it needs tables [[measured]], as evo export"
            f" --tuned writes them, and nothing beside them{f'; {key!r} is there' if key else ''}"
        )
    return [_request(file, text.splitlines(), n, table) for n, table in enumerate(tables)]


def _request(file: Path, lines: Sequence[str], number: int, table: Any) -> ExportRequest:
    at: tuple[int, ...] = (number,)
    key = ""
    try:
        if key := _unfit(table, _TABLE):
            raise UsageError(_said(table, _TABLE, key))
        key, name = "kernel", table["kernel"]
        path = file.absolute().parent / name if "/" in name else None
        if path is not None and not (path / "kernel.py").is_file():
            raise UsageError(f"no kernel is in the folder {name!r}, which is relative to this file")
        kernel = load_kernel(str(path.resolve()) if path else name)
        key = "target"
        kernel.check_target(find_target(table["target"]).name)
        key = "points"
        points = {point: Genome.of(values) for point, values in table["points"].items()}
        items = list[ExportItem]()
        for n, result in enumerate(table["results"]):
            at = (number, n)
            if key := _unfit(result, _RESULT):
                raise UsageError(_said(result, _RESULT, key))
            key = "workload"
            workload = kernel.workload(table["target"], result["workload"])
            if any(item.workload == workload for item in items):
                raise UsageError(f"a second result for {workload.key}")
            key = "point"
            if result["point"] not in points:
                raise UsageError(f"point {result['point']!r} is none of {', '.join(points)}")
            key, values = "interval", result.get("interval", [1, 1])
            if len(values) != 2 or any(type(v) not in _NUMBER or v <= 0 for v in (*values, result.get("speedup", 1))):
                raise UsageError("a speed-up is a number above 0, and its interval two of them: [1.68, 1.72]")
            items.append(
                ExportItem(
                    workload=workload,
                    genome=points[result["point"]],
                    candidate=result["candidate"],
                    record=_record(result, table),
                    score=1 / result["speedup"] if "speedup" in result else math.inf,
                )
            )
    except EvoError as error:
        raise UsageError(f"tuned file {file}, line {_line(lines, at, key)}: {error}") from None
    return ExportRequest(
        kernel=str(path.resolve()) if path else name,
        digest=table["digest"],
        target=table["target"],
        arch=table["arch"],
        items=tuple(items),
        out=Path(),
        environment={name: table[name] for name in ("device", "arch", *_VERSIONS) if name in table},
        few=table.get("cover", False),
    )


def _unfit(table: Any, shape: Mapping[str, Any]) -> str:
    """The first key that is unknown, missing or of another type; empty if there is none."""
    if not isinstance(table, dict):
        return next(iter(shape))
    wanted = {name.rstrip("?"): kind for name, kind in shape.items()}
    wrong = (k for k, v in table.items() if k not in wanted or type(v) not in (w if type(w := wanted[k]) is tuple else (w,)))
    missing = (name for name in shape if not name.endswith("?") and name not in table)
    return next(wrong, None) or next(missing, "")


def _said(table: Any, shape: Mapping[str, Any], key: str) -> str:
    wanted = {name.rstrip("?"): kind for name, kind in shape.items()}
    if key not in wanted:
        return f"unknown key {key!r}; known: {', '.join(wanted)}"
    if not isinstance(table, dict) or key not in table:
        return f"{key!r} is missing"
    return f"{key} must be {_WORDS[wanted[key]]}, got {table[key]!r}"


def _line(lines: Sequence[str], at: Sequence[int], key: str) -> int:
    """The line of a key, counted from 1, or else that on which its table begins. at: numbers of the table and the result."""
    first, last = 0, len(lines)
    for number, heading in zip(at, (r"\s*\[\[\s*measured\s*\]\]", r"\s*\[\[\s*measured\.results\s*\]\]"), strict=False):
        found = [n for n in range(first, last) if re.match(heading, lines[n])]
        first, last = (found[number], (*found[number + 1 :], last)[0]) if number < len(found) else (first, last)
    sets_it = re.compile(rf"\s*[\"']?{re.escape(key)}\b[\"']?\s*[.=]|\s*\[+{re.escape(key)}\b")
    return next((n for n in range(first, last) if key and sets_it.match(lines[n])), first) + 1


# -- what is to be built again -------------------------------------------------------------------------------------


def changed(file: Path, parts: Sequence[ExportRequest]) -> list[str]:
    """A sentence for each kernel whose files are others than those that results of it were found with."""
    named = dict.fromkeys(part.kernel for part in parts if load_kernel(part.kernel).digest != part.digest)
    return [
        f"{file}: kernel {load_kernel(name).name} has changed since results were measured: their figures are another"
        " source's, and whether it is right only the gate says (evo check)"
        for name in named
    ]


def to_build(
    file: Path, parts: Sequence[ExportRequest], out: Path, device: str | None = None
) -> tuple[list[ExportRequest], list[str]]:
    """The requests for the package of these winners, and what is left out, in sentences: a package has one for each
    architecture and workload, that of the latest date. device: a part of the name of the devices that count. Winners that a
    kernel had before it changed are without their figures. Raises UsageError for a point that is not in the search space."""
    remarks, asked, latest = list[str](), list[ExportRequest](), dict[Any, tuple[str, str]]()
    parts = [p for p in parts if device is None or device.lower() in str(p.environment["device"]).lower()]
    if not parts:
        raise UsageError(f"{file} has no result of a device called {device!r}")
    for part in parts:
        for item in part.items:
            place, found = (part.kernel, part.target, part.arch, item.workload), str(item.record["created"])
            latest[place] = max(latest.get(place, ("", "")), (found, str(part.environment["device"])))
    for part in parts:
        kernel, own, items = load_kernel(part.kernel), str(part.environment["device"]), list[ExportItem]()
        for item in part.items:
            chosen = latest[part.kernel, part.target, part.arch, item.workload][1]
            if chosen != own:
                remarks.append(f"{item.workload.key}: what was found on {own} is left out for {chosen} (--device chooses)")
                continue
            if broken := not_legal(part, item):
                raise UsageError(
                    f"{file}: point {_name(item.genome)} for {item.workload.key} is not in the search space of"
                    f" {kernel.name} any more ({broken}): search again, or take it out"
                )
            if kernel.digest != part.digest:
                told = {n: v for n, v in item.record.items() if n not in ("timings", "baselines")}
                item = replace(item, record={**told, "kernel_digest": part.digest})
            items.append(item)
        asked += [replace(part, items=tuple(items), out=out)] if items else []
    return asked, remarks


def not_legal(part: ExportRequest, item: ExportItem) -> str:
    """Why an item's genome is not in its search space; empty if it is."""
    limits = find_target(part.target).limits(part.arch)
    return "; ".join(load_kernel(part.kernel).space(part.target, item.workload, limits).violations(item.genome.parameters))
