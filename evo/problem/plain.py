"""A plain source of C++ or CUDA C++: its definitions, its kernels, and the part of it that one kernel needs.

It is read by a parser that takes what it does not understand for an error of a few tokens (tree-sitter), not preprocessed:
all branches of an #if are seen. Places are offsets in UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import tree_sitter
import tree_sitter_cuda

from evo.errors import TemplateError

Node = tree_sitter.Node
Place = tuple[int, int]
Edit = tuple[int, int, bytes]
"""Where it begins and ends, and what comes there."""

WHOLE = re.compile(r"(?:\b\d\w*|<<|>>|[-+*/()\s])+")
"""An expression of whole numbers."""
_CONSTANT = re.compile(
    r"(?:(?:static|inline|__device__|unsigned|int|long|u?int\d+_t|size_t)\s+)*const(?:expr)?\b(?!.*\b(?:float|double)\b)"
)
"""How a declaration of constants that may be whole numbers begins."""
NAME = re.compile(r"\b[A-Za-z_]\w*")
_COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|(?!"C")"(?:\\.|[^"\\\n])*"', re.DOTALL)
_NO_USE = re.compile(r"^[ \t]*#[ \t]*(ifdef|ifndef|undef|include)\b.*", re.MULTILINE)
_QUESTIONS = ("preproc_ifdef", "preproc_if", "preproc_elif", "preproc_elifdef", "preproc_else")
_HOLDERS = (*_QUESTIONS, "linkage_specification", "namespace_definition", "declaration_list")
_ON_A_DEVICE = re.compile(r"\b(?:__device__|__global__|constexpr|__constant__|__shared__)\b")
_OF_DEVICES = re.compile(
    r"cuda(?!\.h)[_\w]*(\.h)?|cuda/.*|nv/.*|cub/.*|thrust/.*|cooperative_groups.*|mma\.h|curand\w*\.h|math_constants\.h|"
    r"(vector|device|sm|surface|texture|builtin)_\w+\.h(pp)?|cute/.*|cutlass/.*"
)
"""Headers that a compiler of device code can be expected to find."""
_DECLARING = (
    "init_declarator", "declaration", "parameter_declaration", "optional_parameter_declaration", "for_range_loop",
    "field_declaration", "type_definition", "function_definition",
)  # fmt: skip
_OF_HOSTS = ("std", "torch", "at", "c10", "cv")
class Definition(NamedTuple):
    """A macro without parameters, or a constant that is a whole number."""

    name: str
    value: str
    place: Place
    follows: bool
    """Whether an #if decides between several: it stands under one that asks for other names."""


class Parameter(NamedTuple):
    """A parameter of a kernel. type: without qualifiers, pointers and references."""

    name: str
    type: str
    pointers: int
    is_const: bool


@dataclass(frozen=True)
class EntryPoint:
    """A kernel: a function with __global__."""

    name: str
    parameters: tuple[Parameter, ...]
    templates: tuple[tuple[str, str], ...]
    """(kind, name) of each template parameter: typename T, int N; of a template alone."""
    node: Node = field(compare=False)
    """The whole function, from its template's head on."""
    has_c_linkage: bool = False
    bounds: str = ""
    """Its __launch_bounds__(...)."""


class Launched(NamedTuple):
    """A launch in host code: KERNEL<TEMPLATES><<<grid, block>>>(arguments)."""

    name: str
    templates: tuple[str, ...]
    geometry: tuple[Node, ...]
    arguments: tuple[Node, ...]
    function: Node | None
    """The function that it stands in."""


@cache
def read_source(text: str) -> PlainSource:
    """The source, parsed once."""
    return PlainSource(text)


def _is_unclear(item: Node) -> bool:
    """Whether an item's ends are: those of an #if do not fit those of what is in it."""
    holder = item.parent
    while holder is not None and not (holder.type in _QUESTIONS and holder.has_error):
        holder = holder.parent
    return holder is not None


class PlainSource:
    """A source that has been parsed."""

    def __init__(self, text: str) -> None:
        self.bytes = text.encode()
        self.root = _parser().parse(self.bytes).root_node
        self._parts = dict[tuple[str, frozenset[str]], tuple[PlainSource, list[str]]]()

    def text(self, node: Node) -> str:
        return self.bytes[node.start_byte : node.end_byte].decode()

    def code(self, node: Node) -> str:
        """A node's text without comments and strings."""
        return _COMMENT_OR_TEXT.sub(" ", self.text(node))

    def within(self, node: Node, *kinds: str) -> Iterator[Node]:
        """A node and all below it, of these kinds, in order."""
        if node.type in kinds:
            yield node
        for child in node.children:
            yield from self.within(child, *kinds)

    def named(self, node: Node | None) -> str:
        """The name that a declarator declares, without the namespace; empty if it declares none."""
        while node is not None:
            if node.type in ("identifier", "field_identifier", "type_identifier", "operator_name", "namespace_identifier"):
                return self.text(node)
            if node.type in ("qualified_identifier", "template_function", "template_type"):
                node = node.child_by_field_name("name")
                continue
            inner = node.child_by_field_name("declarator")
            node = inner or next((c for c in node.named_children if c.type.endswith(("declarator", "identifier"))), None)
        return ""

    # -- what there is ------------------------------------------------------------------------------------------------

    @cached_property
    def entry_points(self) -> Mapping[str, EntryPoint]:
        found = dict[str, EntryPoint]()
        for node in self.within(self.root, "function_definition"):
            declarator = node.child_by_field_name("declarator")
            if any(c.type == "__global__" for c in node.children) and declarator is not None:
                made = self._entry_point(node, declarator)
                found.setdefault(made.name, made)
        return found

    def _entry_point(self, node: Node, declarator: Node) -> EntryPoint:
        whole, templates = node, tuple[tuple[str, str], ...]()
        if node.parent is not None and node.parent.type == "template_declaration":
            whole = node.parent
            head = whole.child_by_field_name("parameters")
            own = (self.code(c).partition("=")[0].split() for c in (head.named_children if head else ()))
            templates = tuple((" ".join(words[:-1]), words[-1]) for words in own if len(words) > 1)
        holders = (whole.parent, whole.parent and whole.parent.parent)
        linked = any(h is not None and h.type == "linkage_specification" for h in holders)
        bounds = next(self.within(node, "launch_bounds"), None)
        taken = next((c for c in self.within(declarator, "parameter_list")), None)
        parameters = tuple(map(self._parameter, (c for c in (taken.named_children if taken else ()) if "param" in c.type)))
        return EntryPoint(
            name=self.named(declarator),
            parameters=tuple(p for p in parameters if p.name),
            templates=templates,
            node=whole,
            has_c_linkage=linked,
            bounds=f"__launch_bounds__{self.text(bounds).partition('__launch_bounds__')[2]}" if bounds else "",
        )

    def _parameter(self, node: Node) -> Parameter:
        text, type_ = self.code(node), node.child_by_field_name("type")
        name = self.named(node.child_by_field_name("declarator"))
        words = [c for c in node.children if c.type in ("type_qualifier", "type_identifier", "primitive_type")]
        stars = text.find("*") if "*" in text else len(text)
        is_const = any(self.text(w) == "const" and w.start_byte - node.start_byte < stars for w in words)
        written = " ".join(self.code(type_).split()) if type_ is not None else ""
        return Parameter(name, written, text.count("*") + text.count("["), is_const)

    @cached_property
    def definitions(self) -> tuple[Definition, ...]:
        return tuple(sorted(self._definitions(self.root, ()), key=lambda d: d.place))

    def _definitions(self, node: Node, asked: tuple[str, ...]) -> Iterator[Definition]:
        if node.type == "preproc_def":
            name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
            assert name is not None
            text = re.split(r"//|/\*", self.text(value))[0].rstrip() if value else ""
            end = value.start_byte + len(text.encode()) if value else name.end_byte
            follows = any(question != self.text(name) for question in asked)
            yield Definition(self.text(name), text, (node.start_byte, end), follows)
            return
        if node.type == "declaration" and _CONSTANT.match(self.code(node)):
            made = node.children_by_field_name("declarator")
            values = [v for m in made if (v := m.child_by_field_name("value")) and WHOLE.fullmatch(self.code(v))]
            for one, value in zip(made, values, strict=False) if len(made) == len(values) else ():
                yield Definition(self.named(one), self.code(value), (node.start_byte, node.end_byte), False)
        if node.type in _QUESTIONS:
            asked = (*asked, *self._asked(node))
        for child in node.children:
            yield from self._definitions(child, asked)

    def _asked(self, node: Node) -> Iterator[str]:
        """Names that an #if, #ifdef or #elif asks for; of a guard against a second inclusion none."""
        condition = node.child_by_field_name("condition") or node.child_by_field_name("name")
        if condition is not None and not (node.type == "preproc_ifdef" and self._is_guard(node)):
            yield from (n for n in NAME.findall(self.text(condition)) if n != "defined")

    def _is_guard(self, node: Node) -> bool:
        name = node.child_by_field_name("name")
        inner = [c for c in node.named_children if c != name]
        first = inner[0].child_by_field_name("name") if inner and inner[0].type == "preproc_def" else None
        return bool(first and name and self.text(first) == self.text(name)) and len(inner) > 1

    def asked(self, entry: str) -> Mapping[str, tuple[int, ...]]:
        """The whole numbers that each name is compared with by an #if on which a kernel depends, by name."""
        found, reached = dict[str, tuple[int, ...]](), self._kept(entry)
        for node in self.within(self.root, "preproc_if", "preproc_elif"):
            items = list(self._items(node))
            if not any(not i.type.startswith("preproc_") or {*self._names(i)} & reached for i in items):
                continue
            condition = node.child_by_field_name("condition")
            text = self.text(condition) if condition else ""
            defined = set(re.findall(r"defined\s*\(?\s*(\w+)", text))
            for name in (n for n in NAME.findall(text) if n != "defined" and n not in defined):
                numbers = map(int, re.findall(rf"\b{name}\s*[=!<>]=?\s*(\d+)", text))
                found[name] = tuple(dict.fromkeys((*found.get(name, ()), *numbers)))
        return found

    @cached_property
    def declared(self) -> frozenset[str]:
        """Names of variables, parameters, fields, types, functions and macros."""
        nodes = self.within(self.root, *_DECLARING)
        found = {self.named(made) for node in nodes for made in node.children_by_field_name("declarator")}
        for node in self.within(self.root, "type_parameter_declaration", "enumerator", "alias_declaration"):
            found.add(self.named(node.child_by_field_name("name") or node))
        return frozenset(found | {name for item in self._items(self.root) for name in self._names(item)}) - {""}

    @cached_property
    def free(self) -> frozenset[str]:
        """Names that are used and that a value can be given by a macro: no other code declares them, and they are no field
        of a structure, as x of threadIdx.x is."""
        fields = {*re.findall(r"(?:\.|->)\s*([A-Za-z_]\w*)", _COMMENT_OR_TEXT.sub(" ", self.bytes.decode()))}
        return frozenset(self.uses - fields - self.declared | self.uses & {d.name for d in self.definitions})

    def spelled(self, name: str) -> str:
        """The macro that a parameter's value is: of its name or, in other letters, of what the source defines, if it does;
        empty if there is none."""
        found = [s for s in (name, name.upper(), name.lower()) if s in self.free]
        own = {d.name for d in self.definitions}
        return min(found, key=lambda s: s not in own, default="")

    @cached_property
    def macros(self) -> Mapping[str, str]:
        """The text of each macro with parameters, by name."""
        nodes = self.within(self.root, "preproc_function_def")
        parts = ((n.child_by_field_name("name"), n.child_by_field_name("value")) for n in nodes)
        return {self.text(name): self.text(value) if value else "" for name, value in parts if name}

    @cached_property
    def uses(self) -> frozenset[str]:
        """Names that are used, apart from their definitions and questions whether they are defined."""
        code = bytearray(self.bytes)
        for definition in self.definitions:
            begin, end = definition.place
            at = self.bytes.index(definition.name.encode(), begin, end)
            code[at : at + len(definition.name.encode())] = b" " * len(definition.name.encode())
        plain = _COMMENT_OR_TEXT.sub(" ", code.decode())
        return frozenset(NAME.findall(_NO_USE.sub("", plain)))

    @cached_property
    def launches(self) -> tuple[Launched, ...]:
        found = []
        for node in self.within(self.root, "call_expression"):
            syntax = next((c for c in node.children if c.type == "kernel_call_syntax"), None)
            callee, given = node.child_by_field_name("function"), node.child_by_field_name("arguments")
            if syntax is None or callee is None or given is None:
                continue
            chosen = callee.child_by_field_name("arguments")
            function: Node | None = node
            while function is not None and function.type != "function_definition":
                function = function.parent
            templates = tuple(self.text(c) for c in chosen.named_children) if chosen else ()
            geometry = tuple(c for c in syntax.named_children if c.type != "comment")
            found.append(Launched(self.named(callee), templates, geometry, tuple(given.named_children), function))
        return tuple(found)

    # -- the part that one kernel needs -------------------------------------------------------------------------------

    def part(self, entry: str, folder: Path) -> tuple[PlainSource, list[str]]:
        """What a kernel needs, each line where it was, and what was left out: host code and its headers, other kernels.
        folder: of local headers."""
        includes = self.within(self.root, "preproc_include")
        local = frozenset(name for name in map(self._included, includes) if (folder / name).is_file())
        if (entry, local) not in self._parts:
            text, left_out = self._part(entry, local)
            self._parts[entry, local] = read_source(text), left_out
        return self._parts[entry, local]

    def _included(self, node: Node) -> str:
        path = node.child_by_field_name("path")
        return self.text(path).strip('<>"') if path else ""

    def _part(self, entry: str, local: Collection[str]) -> tuple[str, list[str]]:
        kept = self._kept(entry)
        blanks, left_out = list[Place](), list[str]()
        for item in sorted(self._items(self.root), key=lambda item: item.type != "preproc_include"):
            if item.type == "preproc_include":
                name = self._included(item)
                if not (_OF_DEVICES.fullmatch(name) or name in local):
                    blanks.append((item.start_byte, item.end_byte))
                    left_out.append(f"#include <{name}>")
            elif not item.has_error and not _is_unclear(item) and not self._is_kept(item, kept, entry):
                blanks.append((item.start_byte, item.end_byte))
                if item.type == "function_definition" or item.type == "template_declaration":
                    left_out.append(self.named(next(self.within(item, "function_declarator"), None)) or item.type)
        code = self._without(blanks)
        if entry not in read_source(code).entry_points:  # an #if parts what belongs together
            includes = [n for n in left_out if n.startswith("#")]
            return self._without(blanks[: len(includes)]), includes
        return code, [name for name in dict.fromkeys(left_out) if name]

    def _without(self, blanks: Sequence[Place]) -> str:
        code = bytearray(self.bytes)
        for begin, end in blanks:
            code[begin:end] = re.sub(rb"[^\n]", b" ", self.bytes[begin:end])
        return code.decode()

    def _items(self, node: Node) -> Iterator[Node]:
        """What stands on its own: functions, types, variables, includes, macros."""
        for child in node.children:
            if child.type in _HOLDERS:
                yield from self._items(child)
            elif child.is_named and child.type not in ("comment", "string_literal", "identifier", "namespace_identifier"):
                if node.type in _QUESTIONS and child in (
                    node.child_by_field_name("condition"), node.child_by_field_name("name")
                ):  # fmt: skip
                    continue
                yield child

    def _names(self, item: Node) -> list[str]:
        """What an item declares."""
        if item.type == "template_declaration":
            return [n for c in item.named_children if c.type != "template_parameter_list" for n in self._names(c)]
        if item.type in ("preproc_def", "preproc_function_def", "namespace_alias_definition", "alias_declaration"):
            name = item.child_by_field_name("name")
            return [self.text(name)] if name else []
        if item.type in ("struct_specifier", "class_specifier", "union_specifier", "enum_specifier"):
            name = item.child_by_field_name("name")
            values = [self.text(v.child_by_field_name("name") or v) for v in self.within(item, "enumerator")]
            return [*([self.named(name)] if name else []), *values]
        found = [self.named(c) for c in item.named_children if c.type.endswith(("declarator", "identifier"))]
        type_ = item.child_by_field_name("type")
        is_defined = type_ is not None and type_.type.endswith("_specifier")
        return [n for n in found if n] + (self._names(type_) if type_ is not None and is_defined else [])

    def _kept(self, entry: str) -> set[str]:
        """Names that are reached from a kernel, itself among them."""
        using = dict[str, set[str]]()
        for item in self._items(self.root):
            code = set(NAME.findall(self.code(item)))
            for name in self._names(item):
                using.setdefault(name, set()).update(code)
        reached, waiting = set[str](), [entry]
        while waiting:
            if (name := waiting.pop()) not in reached:
                reached.add(name)
                waiting += using.get(name, ())
        return reached

    def _is_kept(self, item: Node, kept: set[str], entry: str) -> bool:
        if item.type.startswith("preproc_"):
            return True
        if item.type == "using_declaration":
            of = NAME.findall(self.code(item))
            return not (set(of) & {*_OF_HOSTS})
        names = self._names(item)
        if item.type == "template_instantiation" or not names:
            return item.type in (";", "attribute_declaration")
        if any(self.within(item, "function_definition")) and item.type in ("function_definition", "template_declaration"):
            head = self.code(item).partition("{")[0]
            if "__global__" in head:
                return entry in names
            macros = {d.name for d in self.definitions if _ON_A_DEVICE.search(d.value)}
            told = {*NAME.findall(head)}
            is_marked = _ON_A_DEVICE.search(head) or told & macros or any(re.fullmatch(r"[A-Z][A-Z0-9_]+", n) for n in told)
            return bool(is_marked) and bool({*names} & kept or any(n.startswith("operator") for n in names))
        return bool({*names} & kept)


def edited(source: PlainSource, edits: Iterable[Edit]) -> str:
    code = bytearray(source.bytes)
    for begin, end, instead in sorted(edits, reverse=True):
        code[begin:end] = instead
    return code.decode()


def text_of(file: Path) -> str:
    """Raises TemplateError."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{file} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from error


@cache
def _parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_cuda.language()))
