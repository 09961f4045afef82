"""Variables with __constant__ that host code fills, as parameters of the entry point.

A launch cannot fill them: another stream, or a graph, would read what a later call has put there. So a source is rewritten
when it is rendered: the declaration goes, and the entry point and each function through which it reaches the variable take a
pointer to const of the same name. What can go wrong with that in C++ does not compile, or is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from evo.errors import TemplateError
from evo.problem.plain import NAME, Edit, Node, PlainSource, edited, read_source

_FILLS = re.compile(r"(cuda|hip)(MemcpyToSymbol(Async)?|GetSymbolAddress)")
_MACROS = ("preproc_def", "preproc_function_def")
_TYPES = ("struct_specifier", "class_specifier", "union_specifier")


class Constant(NamedTuple):
    """A variable with __constant__. sizes: along each axis, as the source has them; none of a number."""

    name: str
    type: str
    sizes: tuple[str, ...]
    has_value: bool

    @property
    def parameter(self) -> str:
        """The same as a parameter of a function."""
        if not self.sizes:
            return f"const {self.type} {self.name}"
        inner, pointer = "".join(f"[{size}]" for size in self.sizes[1:]), f"* __restrict__ {self.name}"
        return f"const {self.type} ({pointer}){inner}" if inner else f"const {self.type}{pointer}"

    @property
    def size(self) -> str:
        """What sizeof of it was."""
        return f"sizeof({self.type}{''.join(f'[{size}]' for size in self.sizes)})"


@cache
def constants_of(source: PlainSource) -> Mapping[str, Constant]:
    """The variables with __constant__ of a source, by name."""
    found = dict[str, Constant]()
    for node in source.within(source.root, "declaration"):
        if not any(c.type == "type_qualifier" and source.text(c) == "__constant__" for c in node.children):
            continue
        type_ = node.child_by_field_name("type")
        for declarator in node.children_by_field_name("declarator"):
            sizes, inner, has_value = list[str](), declarator, declarator.type == "init_declarator"
            if has_value:
                inner = inner.child_by_field_name("declarator") or inner
            while inner.type == "array_declarator":
                size = inner.child_by_field_name("size")
                sizes.insert(0, source.code(size) if size is not None else "")
                inner = inner.child_by_field_name("declarator") or inner
            if inner.type == "identifier" and type_ is not None and type_.child_by_field_name("body") is None:
                name = source.text(inner)
                found.setdefault(name, Constant(name, source.code(type_), tuple(sizes), has_value))
    return found


def host_filled(whole: PlainSource, part: PlainSource) -> list[Constant]:
    """The constants of a part of a source that host code fills: it says so, or nothing gives them a value."""
    calls = whole.within(whole.root, "call_expression")
    own = (whole.text(c) for c in calls if _FILLS.fullmatch(whole.named(c.child_by_field_name("function"))))
    named = {name for text in own for name in NAME.findall(text)}
    return [c for c in constants_of(part).values() if c.name in named or not c.has_value]


def as_parameters(
    file: Path, whole: PlainSource, part: PlainSource, entry: str, arguments: Collection[str], tensors: Collection[str] = ()
) -> PlainSource:
    """The part of a source that an entry point needs, with those of its constants as parameters that are among the entry
    point's arguments, each at its place there. tensors: of the arguments those that are handed over by address. Raises
    TemplateError where one cannot be handed on to all that use it, for one that host code would have to fill, and for a
    number that is handed over as a tensor."""
    for constant in host_filled(whole, part):
        if constant.name not in arguments:
            raise TemplateError(
                f"{file}: no host code of yours runs to fill __constant__ {constant.name}: give kernel.py an input of that"
                f" name, which becomes a parameter of {entry}, or give it a value in the source"
            )
    own = {p.name for p in part.entry_points[entry].parameters}
    chosen = {name: c for name, c in constants_of(part).items() if name in arguments and name not in own}
    if not chosen:
        return part
    for name in (n for n, c in chosen.items() if n in tensors and not c.sizes):
        raise TemplateError(
            f"{file}: __constant__ {name} is one number, and kernel.py has a tensor of that name: make it an Argument of"
            f" kind 'scalar', with an option {name!r}"
        )
    return read_source(edited(part, _Rewriting(file, part, entry, chosen).edits(arguments)))


class _Rewriting:
    """The edits that make constants parameters."""

    def __init__(self, file: Path, source: PlainSource, entry: str, chosen: Mapping[str, Constant]) -> None:
        self._file, self._source, self._entry, self._chosen = file, source, entry, chosen
        self._needs = self._needed()

    def _needed(self) -> Mapping[str, set[str]]:
        """The constants that each function and macro needs, with those of what it uses, by name."""
        source, using = self._source, dict[str, set[str]]()
        for node in source.within(source.root, "function_definition", *_MACROS):
            taken = next(source.within(node, "parameter_list"), None)
            declared = {source.named(p.child_by_field_name("declarator")) for p in (taken.named_children if taken else ())}
            using.setdefault(self._name(node), set()).update(set(NAME.findall(source.code(node))) - declared)
        needs = {name: used & self._chosen.keys() for name, used in using.items()}
        needs.setdefault(self._entry, set()).update(self._chosen)
        before = -1
        while before != (before := sum(map(len, needs.values()))):
            for name, used in using.items():
                needs[name].update(*(needs[other] for other in used & needs.keys()))
        return needs

    def _name(self, node: Node) -> str:
        return self._source.named(node.child_by_field_name("declarator") or node.child_by_field_name("name"))

    def _fault(self, names: Iterable[str], what: str) -> TemplateError:
        return TemplateError(
            f"{self._file}: __constant__ {', '.join(sorted(names))} cannot become a parameter of {self._entry}, as {what}"
            " uses it: hand it over to that as an argument"
        )

    def edits(self, arguments: Collection[str]) -> Iterator[Edit]:
        source, chosen = self._source, self._chosen
        for node in source.within(source.root, "declaration"):
            if any(source.text(c) == "__constant__" for c in node.children):
                yield self._without(node)
        for node in source.within(source.root, "function_declarator"):
            name, taken = source.named(node), node.child_by_field_name("parameters")
            if taken is not None and (needed := self._needs.get(name)):
                if _is_of_type(node):
                    raise self._fault(needed, f"the member function {name}")
                yield from self._taking(taken, arguments if name == self._entry else [n for n in chosen if n in needed])
        for node in source.within(source.root, "call_expression"):
            name, given = source.named(node.child_by_field_name("function")), node.child_by_field_name("arguments")
            parts = given.named_children if given is not None else []
            if name in source.macros:
                if re.search(r"sizeof|&", source.macros[name]) and (of := {*map(source.text, parts)} & chosen.keys()):
                    raise self._fault(of, f"the macro {name}, which asks for its address or size,")
            elif given is not None and (needed := self._needs.get(name)):
                text = ", ".join(n for n in chosen if n in needed) + (", " if parts else "")
                yield given.start_byte + 1, given.start_byte + 1, text.encode()
        for node in source.within(source.root, *_MACROS):
            name, text = self._name(node), source.code(node)
            called = {n for n in NAME.findall(text) if self._needs.get(n) and n not in source.macros} - {name}
            if called - {d.name for d in source.definitions} or ("sizeof" in text and {*NAME.findall(text)} & chosen.keys()):
                raise self._fault(self._needs[name], f"the macro {name}")
        whole_until = 0
        for node in source.within(source.root, "sizeof_expression", "pointer_expression", "qualified_identifier"):
            text = source.code(node)
            whole = re.fullmatch(r"(sizeof|&)[\s(]*(?:\w*::)*(\w+)[\s)]*", text)
            if node.type == "qualified_identifier":
                if (name := source.named(node)) in chosen and node.start_byte >= whole_until:
                    yield node.start_byte, node.end_byte, name.encode()
            elif whole and (of_whole := chosen.get(whole[2])) and of_whole.sizes:
                whole_until = node.end_byte
                yield node.start_byte, node.end_byte, (whole[2] if whole[1] == "&" else of_whole.size).encode()
            elif text.startswith("sizeof") and "::" in text and (of := {*NAME.findall(text)} & chosen.keys()):
                raise self._fault(of, "sizeof")

    def _without(self, node: Node) -> Edit:
        """A declaration less what becomes a parameter."""
        source, declared = self._source, node.children_by_field_name("declarator")
        kept = [source.text(d) for d in declared if source.named(d) not in self._chosen]
        head = source.bytes[node.start_byte : declared[0].start_byte].decode()
        text = f"{head}{', '.join(kept)};" if kept else ""
        lines = source.text(node).count("\n") - text.count("\n")
        return node.start_byte, node.end_byte, (text + "\n" * lines).encode()

    def _taking(self, taken: Node, names: Iterable[str]) -> Iterator[Edit]:
        """Parameters of these names, those that are constants, each at its place among the others. Of a function that is not
        the entry point they are the first."""
        source = self._source
        own: list[Node | str] = [c for c in taken.named_children if "param" in c.type and source.code(c) != "void"]
        for place, name in enumerate(names):
            if name in self._chosen:
                own.insert(place, self._chosen[name].parameter)
        if all(isinstance(part, str) for part in own):
            yield taken.start_byte + 1, taken.end_byte - 1, ", ".join(map(str, own)).encode()
            return
        before = ""
        for part in own:
            if isinstance(part, str):
                before += f"{part}, "
            elif before:
                yield part.start_byte, part.start_byte, before.encode()
                before = ""
        if before:
            yield taken.end_byte - 1, taken.end_byte - 1, f", {before[:-2]}".encode()


def _is_of_type(node: Node | None) -> bool:
    while node is not None and node.type not in _TYPES:
        node = node.parent
    return node is not None
