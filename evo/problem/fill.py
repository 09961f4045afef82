"""A plain source with values for its macros, as the text that is compiled."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from evo.errors import TemplateError
from evo.problem.constants import as_parameters
from evo.problem.plain import Edit, EntryPoint, PlainSource, edited, read_source, text_of
from evo.problem.space import Value

STANDARD = {
    **{f"{u}int{n}_t": f"typedef {'unsigned ' if u else ''}{kind} {u}int{n}_t;" for u in ("", "u")
       for n, kind in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))},
    **{name: f"#define {name} {value}" for name, value in {
        "INFINITY": "__int_as_float(0x7f800000)", "NAN": "__int_as_float(0x7fffffff)",
        "FLT_MAX": "3.402823466e+38f", "FLT_MIN": "1.175494351e-38f", "FLT_EPSILON": "1.192092896e-07f",
        "DBL_MAX": "1.7976931348623157e+308", "DBL_EPSILON": "2.2204460492503131e-16",
        "INT_MAX": "2147483647", "INT_MIN": "(-2147483647 - 1)", "UINT_MAX": "4294967295u",
        "M_PI": "3.14159265358979323846", "M_SQRT1_2": "0.70710678118654752440", "M_2_SQRTPI": "1.12837916709551257390",
    }.items()},
}  # fmt: skip
"""What kernels use of the headers of C's standard library, by name; a compiler of device code has none."""
STANDARD["int8_t"] = "typedef signed char int8_t;"


def fill_plain(
    file: Path,
    entry: str,
    values: Mapping[str, Value],
    types: Mapping[str, str],
    needed: Collection[str],
    declares_kernels: bool,
    text: str | None = None,
    arguments: Sequence[str] = (),
    tensors: Collection[str] = (),
) -> str:
    """The part of a source that an entry point needs, behind a `#define` of each value that it uses, less its own
    definitions of these names. Of a template it is the instance that the values and types give.

    types: of an argument's elements, or of the number that it is, by the argument's name; the macro is NAME_type. needed:
    what has no effect but by a macro. text: of the file, where it is another. arguments: of the entry point, of which those
    that are a __constant__ of the source become its parameters; tensors: of these. Raises TemplateError for a
    parameter that the source does not use, and for a source without the entry point.
    """
    source, kernel = read_source(text_of(file) if text is None else text), None
    if declares_kernels and (kernel := source.entry_points.get(entry)) is not None:
        source = as_parameters(file, source, source.part(entry, file.parent)[0], entry, arguments, tensors)
        kernel = source.entry_points[entry]
    if kernel is None and (declares_kernels or entry not in source.uses):
        known = ", ".join(source.entry_points) or "none"
        raise TemplateError(
            f"{file} has no entry point {entry!r}, it has {known}: give kernel.py the function's name as `entry`"
        )
    macros, chosen = dict[str, str](), {name for _, name in kernel.templates} if kernel else set()
    for name, value in {**{f"{name}_type": type_ for name, type_ in types.items()}, **values}.items():
        if macro := source.spelled(name):
            macros[macro] = str(int(value) if isinstance(value, bool) else value)
        elif name in needed and name not in chosen:
            raise TemplateError(
                f"parameter {name!r} of the space is no macro of {file}: use {name} in the source where its value"
                " belongs, or take it out of the space in kernel.py"
            )
    removed = {d.place for d in source.definitions if d.name in macros}
    for d in source.definitions:  # constants of one declaration go together
        if d.place in removed:
            macros.setdefault(d.name, f"({d.value})")
    edits = [(*place, b"\n" * source.bytes.count(b"\n", *place)) for place in removed]
    after = ""
    if kernel is not None and kernel.templates:
        edits += _as_device_function(source, kernel)
        after = _instance(source, kernel, {**types}, {**values}, file)
    elif kernel is not None and not kernel.has_c_linkage:  # the driver is to find it by the name in the source
        edits.append((kernel.node.start_byte, kernel.node.start_byte, b'extern "C" '))
    before = [f"#define {name} {value}" for name, value in macros.items()]
    if kernel is not None:
        before += [STANDARD[n] for n in sorted((source.uses & STANDARD.keys()) - source.declared - macros.keys())]
    return "".join(f"{line}\n" for line in (*before, f'#line 1 "{file.name}"')) + edited(source, edits) + after


def _as_device_function(source: PlainSource, kernel: EntryPoint) -> Iterator[Edit]:
    """Edits that make a template of kernels one of functions that a kernel can call."""
    function = next(source.within(kernel.node, "function_definition"))
    for child in function.children:
        if child.type == "__global__":
            yield child.start_byte, child.end_byte, b"__device__ __forceinline__"
        elif child.type == "launch_bounds":
            yield child.start_byte, child.end_byte, b""


def _instance(
    source: PlainSource, kernel: EntryPoint, types: Mapping[str, str], values: Mapping[str, Value], file: Path
) -> str:
    """A kernel that calls the template: its types are those of the arguments that are declared with them."""
    given = dict[str, str]()
    for kind, name in kernel.templates:
        of_type = next((types[p.name] for p in kernel.parameters if p.type == name and p.name in types), None)
        found = of_type if kind in ("typename", "class") else values.get(name)
        if found is None and name in values:
            found = values[name]
        if found is None:
            raise TemplateError(
                f"{file}: template parameter {name!r} of {kernel.name} has no value: give the space in kernel.py a parameter"
                f" {name!r}"
            )
        given[name] = str(int(found) if isinstance(found, bool) else found)
    declarator = next(source.within(kernel.node, "function_declarator"))
    taken = next(source.within(declarator, "parameter_list"))
    instead = re.compile("|".join(rf"\b{name}\b" for name in given))
    parameters = instead.sub(lambda name: given[name[0]], source.code(taken))
    bounds = instead.sub(lambda name: given[name[0]], kernel.bounds)
    call = f"{kernel.name}<{', '.join(given.values())}>({', '.join(p.name for p in kernel.parameters)})"
    return f'\nextern "C" __global__ void {bounds} {kernel.name}{parameters} {{ {call}; }}\n'
