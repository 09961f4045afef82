"""FlashInfer-Bench's definitions and workloads as workloads of kernels here.

A dataset is a folder with definitions/**/*.json and workloads/**/*.jsonl. Whether a kernel computes a definition is read
from the kernel's formats.toml, tables [[flashinfer-bench.accepts]]: by op_type, names and shapes of inputs and output.
The definition's reference code is not run.
Reference: flashinfer-bench 0.1.2, flashinfer_bench/data.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo.errors import UsageError
from evo.problem.formats import all_tables
from evo.problem.kernel import Kernel, Workload
from evo.problem.space import Value

__all__ = ["Dataset", "Refusal", "Taken", "read_dataset", "workloads_of"]

_TABLE = "flashinfer-bench"


class _Unfit(Exception):
    """Why a kernel does not compute a definition, or a workload of it; the message follows a colon."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """definitions by name; of each its workloads, as the files have them."""

    path: Path
    definitions: Mapping[str, dict[str, Any]]
    workloads: Mapping[str, tuple[dict[str, Any], ...]]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A definition that a kernel computes, and what its workloads are there, each once."""

    definition: str
    kernel: str
    workloads: tuple[Workload, ...]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    definition: str
    reason: str
    workload: str = ""
    """Its uuid, where the definition was taken and this workload was not."""


def read_dataset(path: Path) -> Dataset:
    """Raises UsageError, saying which file is wrong, and where in it."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; name one that holds definitions/ and workloads/ of FlashInfer-Bench")
    definitions: dict[str, dict[str, Any]] = {}
    for file in sorted((path / "definitions").rglob("*.json")):
        definition = _parse(str(file), _text_of(file))
        _check_definition(file, definition)
        if definition["name"] in definitions:
            raise UsageError(f"{file} states definition {definition['name']!r} a second time; remove one of the two")
        definitions[definition["name"]] = definition
    if not definitions:
        raise UsageError(f"there is no definition (definitions/**/*.json) in {path}; name the dataset's own folder")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in definitions}
    for file in sorted((path / "workloads").rglob("*.jsonl")):
        for number, line in enumerate(_text_of(file).split("\n"), 1):
            if line.strip():
                where = f"{file}, line {number}"
                trace = _parse(where, line)
                _check_trace(where, trace, definitions)
                found[trace["definition"]].append(trace["workload"])
    return Dataset(path=path, definitions=definitions, workloads={n: tuple(w) for n, w in found.items()})


def workloads_of(dataset: Dataset, kernels: Iterable[Kernel], target: str) -> tuple[list[Taken], list[Refusal]]:
    """What these kernels compute on a target, and why the rest was left out. Raises KernelError."""
    taken, refused = [], []
    usable = [kernel for kernel in kernels if target in kernel.targets and _TABLE in all_tables(kernel)]
    for name, definition in dataset.definitions.items():
        try:
            kernel, accept = _kernel_for(definition, usable)
            workloads: dict[Workload, None] = {}
            for record in dataset.workloads[name]:
                try:
                    workloads[_workload(kernel, accept, definition, record, target)] = None
                except _Unfit as reason:
                    refused.append(Refusal(definition=name, workload=str(record.get("uuid")), reason=str(reason)))
            if not dataset.workloads[name]:
                raise _Unfit("it has no workloads (workloads/**/*.jsonl)")
        except _Unfit as reason:
            refused.append(Refusal(definition=name, reason=str(reason)))
            continue
        if workloads:
            taken.append(Taken(definition=name, kernel=kernel.name, workloads=tuple(workloads)))
    return taken, refused


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror}); fix its rights, or remove it") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}); mend or remove it") from None


def _parse(where: str, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({error}); mend or remove it") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where} is {type(record).__name__}, where a JSON object is expected; mend or remove it")
    return record


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON's")


def _check_definition(file: Path, definition: Mapping[str, Any]) -> None:
    """That what is read here later has the form FlashInfer-Bench gives it."""
    for key, kind in (("name", str), ("op_type", str), ("axes", dict), ("inputs", dict), ("outputs", dict)):
        if not isinstance(definition.get(key), kind):
            raise UsageError(f"{file} is no definition: {key!r} must be {_A[kind]}, got {definition.get(key)!r}")
    axes = definition["axes"]
    for axis, spec in axes.items():
        fits = isinstance(spec, dict) and (spec.get("type") == "var" or type(spec.get("value")) is int)
        if not fits:
            raise UsageError(f'{file}: axis {axis!r} must be {{"type": "var"}} or have a whole "value", got {spec!r}')
    for name, spec in (*definition["inputs"].items(), *definition["outputs"].items()):
        shape: Any = spec.get("shape", 0) if isinstance(spec, dict) else 0
        is_shape = shape is None or (isinstance(shape, list) and all(isinstance(axis, str) for axis in shape))
        if not is_shape or not isinstance(spec.get("dtype"), str):
            raise UsageError(f"{file}: tensor {name!r} must have a shape, of axes' names, and a dtype, got {spec!r}")
        if unknown := [axis for axis in shape or () if axis not in axes]:
            raise UsageError(f"{file}: tensor {name!r} names axis {unknown[0]!r}, which is not among its axes")


_A = {str: "a text", dict: "an object"}


def _check_trace(where: str, trace: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
    workload = trace.get("workload")
    if not isinstance(workload, dict) or not isinstance(workload.get("axes"), dict):
        raise UsageError(f"{where} is no workload: it lacks an object 'workload' with 'axes'; mend or remove it")
    if not isinstance(trace.get("definition"), str) or trace["definition"] not in definitions:
        raise UsageError(f"{where} is for definition {trace.get('definition')!r}, which is not in definitions/")
    if bad := [(axis, n) for axis, n in workload["axes"].items() if type(n) is not int or n < 0]:
        raise UsageError(f"{where}: axis {bad[0][0]!r} must be a whole number from 0, got {bad[0][1]!r}")
    if not isinstance(workload.get("inputs", {}), dict):
        raise UsageError(f"{where}: 'inputs' must be an object, got {workload['inputs']!r}")


def _kernel_for(definition: Mapping[str, Any], kernels: Iterable[Kernel]) -> tuple[Kernel, Mapping[str, Any]]:
    op_type, reasons = definition["op_type"], []
    for kernel in kernels:
        table = all_tables(kernel)[_TABLE]
        if op_type in table.get("refuses", {}):
            reasons.append(f"{op_type} is not what {kernel.name} computes: {table['refuses'][op_type]}")
        for accept in table.get("accepts", ()):
            if op_type in accept["op_types"]:
                try:
                    _match(accept, definition)
                except _Unfit as reason:
                    reasons.append(f"{kernel.name} does not compute it: {reason}")
                else:
                    return kernel, accept
    raise _Unfit("; ".join(dict.fromkeys(reasons)) or f"no kernel here computes op_type {op_type!r}")


@dataclass(frozen=True, kw_only=True)
class _Match:
    """axes: of each dimension those it is the product of. options: read from the definition itself. scalars: by option the
    input that gives it. dtype: of all tensors."""

    axes: Mapping[str, tuple[str, ...]]
    options: Mapping[str, Value]
    scalars: Mapping[str, str]
    dtype: str


def _match(accept: Mapping[str, Any], definition: Mapping[str, Any]) -> _Match:
    """Raises _Unfit."""
    rest = dict(definition["inputs"])
    axes: dict[str, tuple[str, ...]] = {}
    optional: Mapping[str, str] = accept.get("optional", {})
    options: dict[str, Value] = dict(accept.get("options", {}))
    tensors = {}
    for name, pattern in accept["inputs"].items():
        found = next((n for n in rest if n.lower() in accept["names"][name]), None)
        if name in optional:
            options[optional[name]] = found is not None
        elif found is None:
            raise _Unfit(f"none of its inputs is called {' or '.join(accept['names'][name])}")
        if found is not None:
            tensors[found] = rest.pop(found)
            _bind(found, pattern, tensors[found]["shape"], axes)
    scalars = {}
    for option, names in accept.get("scalars", {}).items():
        given = next((n for n in rest if n.lower() in names and rest[n]["shape"] is None), None)
        if given is not None:
            scalars[option] = given
            del rest[given]
    if rest:
        raise _Unfit(f"it has another input, {next(iter(rest))}, that this kernel knows nothing of")
    if len(definition["outputs"]) != 1:
        raise _Unfit(f"it asks for {len(definition['outputs'])} outputs ({', '.join(definition['outputs'])}), not for one")
    output, spec = next(iter(definition["outputs"].items()))
    _bind(output, accept["output"], spec["shape"], axes)
    dtypes = sorted({s["dtype"] for s in (*tensors.values(), spec)})
    if len(dtypes) != 1:
        raise _Unfit(f"its tensors are of several dtypes ({', '.join(dtypes)})")
    words = re.split(r"[\W_]+", definition["name"].lower())
    options |= {option: word in words for option, word in accept.get("named", {}).items()}
    options |= _constants(accept, definition.get("reference"), scalars)
    return _Match(axes=axes, options=options, scalars=scalars, dtype=dtypes[0])


def _bind(name: str, pattern: list[str], shape: list[str] | None, axes: dict[str, tuple[str, ...]]) -> None:
    """Which axes the dimensions of a pattern are; a leading one with a star is all that the others leave."""
    shape = shape or []
    gathers = pattern[0].startswith("*")
    if len(shape) < len(pattern) or (not gathers and len(shape) != len(pattern)):
        wanted = " x ".join(pattern)
        raise _Unfit(f"its {name} is {' x '.join(shape) or 'a number'}, where {wanted} is expected")
    split = len(shape) - len(pattern) + 1 if gathers else 0
    parts = [(pattern[0][1:], tuple(shape[:split]))] if gathers else []
    parts += [(dim, (axis,)) for dim, axis in zip(pattern[len(parts) :], shape[split:], strict=True)]
    for dim, found in parts:
        if axes.setdefault(dim, found) != found:
            raise _Unfit(f"its {name} has {' x '.join(found)} where other tensors have {' x '.join(axes[dim])}")


def _constants(accept: Mapping[str, Any], reference: object, scalars: Mapping[str, str]) -> dict[str, Value]:
    """Options that the reference code sets to a number: eps = 1e-6, or f(..., eps=1e-6). Raises _Unfit for two values."""
    wanted = {name: o for o, names in accept.get("constants", {}).items() if o not in scalars for name in names}
    found: dict[str, set[float]] = {}
    try:
        tree = ast.parse(reference) if isinstance(reference, str) else ast.Module([], [])
    except SyntaxError:
        tree = ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            pair = node.targets[0].id, node.value
        elif isinstance(node, ast.keyword) and node.arg:
            pair = node.arg, node.value
        else:
            continue
        if pair[0] in wanted and isinstance(pair[1], ast.Constant) and isinstance(pair[1].value, float):
            found.setdefault(wanted[pair[0]], set()).add(pair[1].value)
    for option, values in found.items():
        if len(values) > 1:
            raise _Unfit(f"its reference uses several values of {option} ({', '.join(map(str, sorted(values)))})")
    return {option: values.pop() for option, values in found.items()}


def _workload(
    kernel: Kernel, accept: Mapping[str, Any], definition: Mapping[str, Any], record: Mapping[str, Any], target: str
) -> Workload:
    """Raises _Unfit."""
    match = _match(accept, definition)
    sizes = {axis: spec["value"] for axis, spec in definition["axes"].items() if spec.get("type") != "var"}
    sizes |= record["axes"]
    dims: dict[str, int] = dict(accept.get("sizes", {}))
    for dim, axes in match.axes.items():
        dims[dim] = 1
        for axis in axes:
            if axis not in sizes:
                raise _Unfit(f"its workload does not say how long axis {axis} is")
            dims[dim] *= sizes[axis]
        if not dims[dim]:
            raise _Unfit(f"it is empty ({' x '.join(axes)} is 0)")
    options = dict(match.options)
    for option, name in match.scalars.items():
        given = record.get("inputs", {}).get(name)
        value = given.get("value") if isinstance(given, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Unfit(f"its input {name} is no number that is given, and the kernel needs {option} to be one")
        options[option] = value
    parts = [*((d.name, dims[d.name]) for d in kernel.dimensions), ("dtype", match.dtype), *options.items()]
    text = ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in parts)
    try:
        return kernel.workload(target, text)
    except UsageError as error:
        raise _Unfit(str(error)) from None
