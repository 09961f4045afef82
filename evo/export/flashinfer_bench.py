"""FlashInfer-Bench's dataset layout: definitions/, workloads/, solutions/ and traces/ below one folder, which its
TraceSet.from_path reads and its Benchmark evaluates. Winners are exported as one; workloads are imported from one.

Exported: a Definition for each group of winners that computes the same (dtype and compiled-in sizes), with a Workload for
each of them, and one Solution: Python that launches the package of `module`, whose files are its sources. Machine code,
which JSON cannot hold, is base64 there. A Trace has the search's own times, under the status FlashInfer-Bench calls
PASSED; its own evaluation appends to the same file.

Imported: definitions/**/*.json and workloads/**/*.jsonl. The kernel's formats.toml, tables [[flashinfer-bench.accepts]],
says which definitions it computes: by op_type, names and shapes of inputs and output. The definition's reference code is
not run.
Reference: flashinfer-bench 0.1.2, flashinfer_bench/data and compile/builders/python_builder.py.
"""

import base64
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evo import __version__
from evo.errors import UsageError
from evo.export import Contents, Exporter, ExportItem, ExportRequest, with_manifest
from evo.export._package import timing_of
from evo.export.module import make_package
from evo.problem.formats import all_tables, check_fit, fill, format_table, values_of
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import load_kernel
from evo.problem.space import Value

_Json = Mapping[str, Any]
_TABLE = "flashinfer-bench"
_BINARIES = (".cubin", ".so")
_MAIN = '''"""{title}: found and written by evo {version}. The kernel and what launches it lie in {package}/."""

import base64
from contextlib import suppress
from pathlib import Path

for _encoded in (Path(__file__).parent / "{package}").rglob("*.b64"):
    _encoded.with_suffix("").write_bytes(base64.b64decode(_encoded.read_text()))

from . import {package}
from .{package} import *

with suppress(RuntimeError):  # without a C++ compiler calls are launched from Python
    {package}.build()

_served = set()


def require_variant(key, *arguments):
    """The package leaves to PyTorch what it was not tuned for, which would be timed as this solution here."""
    if key not in _served:
        way = {package}.explain(*arguments)
        if not way.startswith("variant"):
            raise RuntimeError(way)
        _served.add(key)


'''


def _contents(request: ExportRequest) -> Contents:
    """The content of an export. Raises UsageError for a kernel that formats.toml does not describe, and what `make_package`
    raises."""
    kernel = load_kernel(request.kernel)
    table = format_table(kernel, _TABLE)
    groups: dict[str, list[ExportItem]] = {}
    for item in request.items:
        check_fit(table, _TABLE, item.candidate, item.workload)
        groups.setdefault(fill(table["name"], values_of(item.workload)), []).append(item)
    files: dict[str, bytes] = {}
    manifests = []
    for name, items in groups.items():
        group, op_type = replace(request, items=tuple(items)), table["op_type"]
        definition = _definition(kernel, table, name, group)
        manifest, package = make_package(group)
        manifests.append(manifest)
        solution = _solution(kernel, table, definition, group, with_manifest("module", manifest, package))
        bare = [
            {"definition": name, "workload": _workload(table, definition, item), "solution": None, "evaluation": None}
            for item in items
        ]
        traces = [
            {**trace, "solution": solution["name"], "evaluation": evaluation}
            for trace, item in zip(bare, items, strict=True)
            if (evaluation := _evaluation(request, item)) is not None
        ]
        texts = {
            f"definitions/{op_type}/{name}.json": json.dumps(definition, indent=2),
            f"solutions/{op_type}/{name}/{solution['name']}.json": json.dumps(solution, indent=2),
            f"workloads/{op_type}/{name}.jsonl": "\n".join(map(json.dumps, bare)),
            f"traces/{op_type}/{name}.jsonl": "\n".join(map(json.dumps, traces)),
        }
        files |= {path: f"{text}\n".encode() for path, text in texts.items() if text}
    return {**manifests[0], "variants": [v for manifest in manifests for v in manifest["variants"]]}, files


def _definition(kernel: Kernel, table: _Json, name: str, request: ExportRequest) -> dict[str, Any]:
    workload = request.items[0].workload
    constant = {*kernel.compile_time_dims[request.target], *table.get("constant", ())}
    axes = {
        axis: {"type": "const", "value": workload.dim(dim)} if dim in constant else {"type": "var"}
        for axis, dim in table["axes"].items()
    }
    values = values_of(workload)
    optional = table.get("optional", {})
    inputs = {n: shape for n, shape in table["inputs"].items() if n not in optional or values[optional[n]]}
    dtypes = {a.name: a.dtype_of(workload) for a in kernel.arguments}
    return {
        "name": name,
        "description": f"{kernel.title}, as {kernel.replaces} computes it.",
        "op_type": table["op_type"],
        "tags": ["status:verified"],
        "axes": axes,
        **{
            of: {n: {"shape": shape, "dtype": dtypes.get(n, workload.dtype)} for n, shape in shapes.items()}
            for of, shapes in (("inputs", inputs), ("outputs", table["outputs"]))
        },
        "reference": fill(table["reference"], values | {"inputs": list(inputs)}).lstrip("\n"),
    }


def _solution(
    kernel: Kernel,
    table: _Json,
    definition: _Json,
    request: ExportRequest,
    files: Mapping[str, bytes],
) -> dict[str, Any]:
    """files: of the package of `module`."""
    values = values_of(request.items[0].workload) | {"inputs": list(definition["inputs"])}
    package = f"{kernel.entry}_package"
    sources = []
    for name, data in sorted(files.items()):
        if name.endswith(_BINARIES):
            sources.append({"path": f"{package}/{name}.b64", "content": base64.encodebytes(data).decode()})
        else:
            sources.append({"path": f"{package}/{name}", "content": data.decode()})
    main = _MAIN.format(title=kernel.title, version=__version__, package=package) + fill(table["run"], values)
    name = re.sub(r"\W+", "_", f"evo_{definition['name']}_{request.arch}_{request.items[0].candidate}")
    return {
        "name": name,
        "definition": definition["name"],
        "author": "evo",
        "description": f"{kernel.title} for {request.arch}, tuned for "
        + "; ".join(f"{item.workload.key} (candidate {item.candidate})" for item in request.items),
        "spec": {
            "language": "python",
            "target_hardware": [request.target],
            "entry_point": "main.py::run",
            "dependencies": [],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": main}, *sources],
    }


def _workload(table: _Json, definition: _Json, item: ExportItem) -> dict[str, Any]:
    free = [axis for axis, spec in definition["axes"].items() if spec["type"] == "var"]
    axes = {axis: item.workload.dim(table["axes"][axis]) for axis in free}
    unique = uuid.uuid5(uuid.NAMESPACE_URL, f"evo:{definition['name']}:{item.workload.key}")
    return {"axes": axes, "inputs": {n: {"type": "random"} for n in definition["inputs"]}, "uuid": str(unique)}


def _evaluation(request: ExportRequest, item: ExportItem) -> dict[str, Any] | None:
    """The search's measurement of a winner; None where nothing was recorded."""
    timing = timing_of(item.record)
    if timing is None or timing["torch_us"] is None:
        return None
    own_us, reference_us = timing["median_us"], timing["torch_us"]
    errors = [float(c["error"]) for c in item.record.get("checks", ()) if c.get("error") is not None]
    environment = request.environment
    return {
        "status": "PASSED",
        "environment": {
            "hardware": str(item.record.get("device") or environment.get("device") or request.arch),
            "libs": {n: str(v) for n in ("torch", "cuda", "evo") if (v := environment.get(n))},
        },
        "timestamp": str(item.record.get("created") or datetime.now(UTC).isoformat()),
        "log": "Timed and judged by evo: cold caches, interleaved with PyTorch, which is the reference here; errors are "
        "the largest of its gate, against float64.",
        "correctness": {
            "max_relative_error": 0.0,
            "max_absolute_error": max((e for e in errors if math.isfinite(e)), default=0.0),
        },
        "performance": {
            "latency_ms": own_us / 1e3,
            "reference_latency_ms": reference_us / 1e3,
            "speedup_factor": reference_us / own_us,
        },
    }


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A definition that a kernel computes, with its workloads, each once."""

    definition: str
    kernel: str
    workloads: tuple[str, ...]
    """The keys of the workloads."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    definition: str
    reason: str
    workload: str = ""
    """The workload's uuid, where the definition was taken and this workload was not."""


def import_workloads(path: Path, kernels: Iterable[Kernel], target: str) -> tuple[list[Taken], list[Refusal]]:
    """The definitions of a dataset that these kernels compute on a target, and why the rest is left out.

    Raises UsageError, which names the wrong file of the dataset and the place in it; KernelError.
    """
    taken, refused = [], []
    tables = [(k, table) for k in kernels if target in k.dtypes and (table := all_tables(k).get(_TABLE)) is not None]
    for name, (definition, records) in _read_dataset(path).items():
        try:
            with _blaming(f"definition {name!r} of {path}"):
                kernel, read = _find_kernel(definition, tables, target)
            if not records:
                raise UsageError("it has no workloads (workloads/**/*.jsonl)")
        except UsageError as reason:
            refused.append(Refusal(definition=name, reason=str(reason)))
            continue
        workloads: dict[str, None] = {}
        for record in records:
            try:
                with _blaming(f"a workload of definition {name!r} of {path}"):
                    workloads[read(record).key] = None
            except UsageError as reason:
                refused.append(Refusal(definition=name, workload=str(record.get("uuid")), reason=str(reason)))
        if workloads:
            taken.append(Taken(definition=name, kernel=kernel.name, workloads=tuple(workloads)))
    return taken, refused


def _read_dataset(path: Path) -> dict[str, tuple[_Json, list[_Json]]]:
    """Each definition and its workloads by name, as the files have them."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; name one that holds definitions/ and workloads/ of FlashInfer-Bench")
    found: dict[str, tuple[_Json, list[_Json]]] = {}
    for file in sorted((path / "definitions").rglob("*.json")):
        with _blaming(str(file)):
            definition = _parse(file.read_text(encoding="utf-8"))
            if definition["name"] in found:
                raise ValueError(f"definition {definition['name']!r} is stated a second time")
            found[definition["name"]] = definition, []
    if not found:
        raise UsageError(f"there is no definition (definitions/**/*.json) in {path}; name the dataset's own folder")
    for file in sorted((path / "workloads").rglob("*.jsonl")):
        with _blaming(str(file)):
            lines = file.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            with _blaming(f"{file}, line {number}"):
                if line.strip():
                    trace = _parse(line)
                    found[trace["definition"]][1].append(trace["workload"])
    return found


@contextmanager
def _blaming(where: str) -> Iterator[None]:
    """Raises UsageError, which names the place, for what is not as FlashInfer-Bench writes it."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{where} cannot be read ({error.strerror}); fix its rights, or remove it") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else error
        raise UsageError(f"{where} is not as FlashInfer-Bench writes it ({what}); correct or remove it") from None


def _parse(text: str) -> dict[str, Any]:
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"it is {type(record).__name__}, where a JSON object is expected")
    return record


def _find_kernel(
    definition: _Json, tables: Iterable[tuple[Kernel, _Json]], target: str
) -> tuple[Kernel, Callable[[_Json], Workload]]:
    """The kernel that computes a definition, and the result of `_match`. Raises UsageError."""
    op_type, reasons = definition["op_type"], []
    for kernel, table in tables:
        if op_type in table.get("refuses", {}):
            reasons.append(f"{op_type} is not what {kernel.name} computes: {table['refuses'][op_type]}")
        for accept in table.get("accepts", ()):
            if op_type in accept["op_types"]:
                try:
                    return kernel, _match(kernel, accept, definition, target)
                except UsageError as reason:
                    reasons.append(f"{kernel.name} does not compute it: {reason}")
    raise UsageError("; ".join(dict.fromkeys(reasons)) or f"no kernel here computes op_type {op_type!r}")


def _match(kernel: Kernel, accept: _Json, definition: _Json, target: str) -> Callable[[_Json], Workload]:
    """Makes workloads of the kernel's from the definition's; raises UsageError for one that the kernel does not take.

    Raises UsageError unless the kernel computes the definition.
    """
    rest = dict(definition["inputs"])
    axes: dict[str, tuple[str, ...]] = {}  # the dimensions that each is the product of
    optional: Mapping[str, str] = accept.get("optional", {})
    options: dict[str, Value] = dict(accept.get("options", {}))
    dtypes = set()
    for name, pattern in accept["inputs"].items():
        found = next((n for n in rest if n.lower() in accept["names"][name]), None)
        if name in optional:
            options[optional[name]] = found is not None
        elif found is None:
            raise UsageError(f"none of its inputs is called {' or '.join(accept['names'][name])}")
        if found is not None:
            tensor = rest.pop(found)
            dtypes.add(tensor["dtype"])
            _bind(found, pattern, tensor["shape"], axes)
    scalars = {}  # the input that gives each option
    for option, names in accept.get("scalars", {}).items():
        given = next((n for n in rest if n.lower() in names and rest[n]["shape"] is None), None)
        if given is not None:
            scalars[option] = given
            del rest[given]
    if rest:
        raise UsageError(f"it has another input, {next(iter(rest))}, which this kernel does not have")
    outputs = definition["outputs"]
    if len(outputs) != 1:
        raise UsageError(f"it asks for {len(outputs)} outputs ({', '.join(outputs)}), not for one")
    for output, tensor in outputs.items():
        dtypes.add(tensor["dtype"])
        _bind(output, accept["output"], tensor["shape"], axes)
    if len(dtypes) != 1:
        raise UsageError(f"its tensors are of several dtypes ({', '.join(sorted(dtypes))})")
    words = re.split(r"[\W_]+", definition["name"].lower())
    options |= {option: word in words for option, word in accept.get("named", {}).items()}
    options |= _constants(accept, definition.get("reference"), scalars)

    def read(record: _Json) -> Workload:
        lengths = {axis: spec["value"] for axis, spec in definition["axes"].items() if spec.get("type") != "var"}
        lengths |= record["axes"]
        dims = dict(accept.get("sizes", {}))
        for dim, parts in axes.items():
            if missing := [axis for axis in parts if type(lengths.get(axis)) is not int]:
                raise UsageError(f"its workload does not say how long axis {missing[0]} is")
            dims[dim] = math.prod(lengths[axis] for axis in parts)
            if dims[dim] <= 0:
                raise UsageError(f"it is empty ({' x '.join(parts)} is {dims[dim]})")
        own = dict(options)
        for option, name in scalars.items():
            given = record.get("inputs", {}).get(name)
            value = given.get("value") if isinstance(given, dict) else None
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"its input {name} is not a given number, and the kernel needs one for {option}")
            own[option] = value
        sizes = {d.name: dims[d.name] for d in kernel.dimensions}
        pairs = {**sizes, "dtype": next(iter(dtypes)), **own}.items()
        text = ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in pairs)
        return kernel.workload(target, text)

    return read


def _bind(name: str, pattern: list[str], shape: list[str] | None, axes: dict[str, tuple[str, ...]]) -> None:
    """Adds to `axes` the axes that each dimension of a pattern consists of; a leading one with a star takes all that the
    others leave."""
    shape = shape or []
    parts: list[tuple[str, ...]] = [(axis,) for axis in shape]
    more = len(parts) - len(pattern)
    if pattern[0].startswith("*") and more > 0:
        parts[: more + 1] = [tuple(shape[: more + 1])]
    if len(parts) != len(pattern):
        raise UsageError(f"its {name} is {' x '.join(shape) or 'a number'}, where {' x '.join(pattern)} is expected")
    for dim, found in zip(pattern, parts, strict=True):
        known = axes.setdefault(dim.removeprefix("*"), found)
        if known != found:
            raise UsageError(f"its {name} has {' x '.join(found)} where other tensors have {' x '.join(known)}")


def _constants(accept: _Json, reference: object, scalars: Mapping[str, str]) -> dict[str, Value]:
    """The options that the reference code sets to a number, as in eps = 1e-6 or f(..., eps=1e-6)."""
    found: dict[str, Value] = {}
    for option, names in accept.get("constants", {}).items():
        number = rf"\b(?:{'|'.join(names)})\s*=\s*(\d*\.?\d+\.?(?:[eE][-+]?\d+)?)(?=\s*(?:[,)#\n]|$))"
        values = {float(n) for n in re.findall(number, str(reference))} if option not in scalars else set()
        if len(values) > 1:
            raise UsageError(f"its reference uses several values of {option} ({', '.join(map(str, sorted(values)))})")
        if values:
            found[option] = values.pop()
    return found


EXPORTER = Exporter(
    name=_TABLE, contents=_contents, advice=lambda out: [f"evaluate it:  flashinfer-bench run --local {out}"]
)
