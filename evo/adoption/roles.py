"""What a kernel does with each of its pointers: reads it, writes it, or both, as far as its code shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from evo.problem.plain import EntryPoint, Node, PlainSource

_READS = frozenset({"__ldg", "__ldcs", "__ldcg", "__ldca", "__ldcv", "__ldlu", "load_matrix_sync", "tex1Dfetch"})
_WRITES = frozenset({"__stcs", "__stcg", "__stwb", "__stwt", "store_matrix_sync"})
_COPIES = frozenset({"memcpy", "__pipeline_memcpy_async", "memcpy_async"})
_SUMS = frozenset(
    {"binary_expression", "parenthesized_expression", "cast_expression", "conditional_expression", "initializer_list"}
)
_CASTS = frozenset({"reinterpret_cast", "static_cast", "const_cast", "__cvta_generic_to_global", "__cvta_generic_to_shared"})


@dataclass
class Role:
    """What is done with what a pointer points to. first: what the code does first with it, in the order of its text."""

    read: bool = False
    written: bool = False
    added: bool = False
    """Only atomic operations, or += and the like, write it."""
    unsure: bool = False
    """It is handed to a function whose code is not in the file, or to assembly."""
    first: str = ""
    is_plainly_written: bool = field(default=False, repr=False)


def roles_of(source: PlainSource, entry: EntryPoint) -> Mapping[str, Role]:
    """The role of each pointer among a kernel's parameters, by name."""
    function = next(source.within(entry.node, "function_definition"))
    return _Reader(source, {}).of_function(function, [p.name for p in entry.parameters if p.pointers])


class _Reader:
    """Follows pointers through a function and the functions of the file that it calls."""

    def __init__(self, source: PlainSource, known: dict[tuple[int, str], Role]) -> None:
        self._source, self._known = source, known
        self._functions = dict[str, Node]()
        for node in source.within(source.root, "function_definition"):
            self._functions.setdefault(source.named(node.child_by_field_name("declarator")), node)
        self._roles: Mapping[str, Role] = {}
        self._aliases = dict[str, frozenset[str]]()

    def of_function(self, function: Node, pointers: Iterable[str]) -> Mapping[str, Role]:
        self._roles = {name: Role() for name in pointers}
        self._aliases = {name: frozenset({name}) for name in self._roles}
        body = function.child_by_field_name("body")
        if body is not None:
            self._visit(body)
        for role in self._roles.values():
            role.added = role.written and not role.is_plainly_written
        return self._roles

    # -- what an expression points to ---------------------------------------------------------------------------------

    def _address(self, node: Node | None) -> frozenset[str]:
        """The pointers that a value is made of."""
        if node is None:
            return frozenset()
        if node.type == "identifier":
            return self._aliases.get(self._source.text(node), frozenset())
        if node.type == "subscript_expression":
            return frozenset()
        if node.type == "pointer_expression":
            inner = node.child_by_field_name("argument")
            return self._place(inner) if node.children[0].type == "&" else frozenset()
        if node.type == "call_expression":
            callee = node.child_by_field_name("function")
            name = self._source.named(callee)
            if name not in _CASTS and name in self._functions:
                return frozenset()
            given = node.child_by_field_name("arguments")
            return self._all(given.named_children if given and name in _CASTS else ())
        if node.type == "assignment_expression":
            return self._address(node.child_by_field_name("right"))
        return self._all(node.named_children) if node.type in _SUMS else frozenset()

    def _all(self, nodes: Iterable[Node]) -> frozenset[str]:
        return frozenset().union(*(self._address(n) for n in nodes))

    def _place(self, node: Node | None) -> frozenset[str]:
        """The pointers through which an expression names a place in memory."""
        if node is None:
            return frozenset()
        if node.type == "subscript_expression":
            array = node.child_by_field_name("argument")
            is_nested = array is not None and array.type == "subscript_expression"
            return self._address(array) | (self._place(array) if is_nested else frozenset())
        if node.type == "pointer_expression" and node.children[0].type == "*":
            return self._address(node.child_by_field_name("argument"))
        if node.type == "field_expression":
            inner = node.child_by_field_name("argument")
            return self._address(inner) if any(c.type == "->" for c in node.children) else self._place(inner)
        if node.type == "parenthesized_expression":
            return frozenset().union(*(self._place(n) for n in node.named_children))
        if node.type == "call_expression":  # of a macro that stands for a place, as FLOAT4(x[i])
            given = node.child_by_field_name("arguments")
            name = self._source.named(node.child_by_field_name("function"))
            parts = given.named_children if given and name not in self._functions else ()
            return frozenset().union(*map(self._place, parts))
        if node.type == "identifier":
            return self._aliases.get("&" + self._source.text(node), frozenset())
        return frozenset()

    # -- what is done -------------------------------------------------------------------------------------------------

    def _note(self, pointers: Iterable[str], what: str, *, adds: bool = False) -> None:
        for name in pointers:
            role = self._roles[name]
            setattr(role, what, True)
            role.first = role.first or what
            if what == "written" and not adds:
                role.is_plainly_written = True

    def _visit(self, node: Node) -> None:
        if node.type == "assignment_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            operator = node.child_by_field_name("operator")
            adds = operator is not None and operator.type != "="
            if right is not None:
                self._visit(right)
            if left is not None:
                self._below(left)
                if adds:
                    self._note(self._place(left), "read")
                self._note(self._place(left), "written", adds=adds)
                if left.type == "identifier" and (of := self._address(right)):
                    name = self._source.text(left)
                    self._aliases[name] = self._aliases.get(name, frozenset()) | of
            return
        if node.type == "update_expression":
            inner = node.child_by_field_name("argument")
            self._note(self._place(inner), "read")
            self._note(self._place(inner), "written", adds=True)
        elif node.type == "init_declarator":
            declarator, value = node.child_by_field_name("declarator"), node.child_by_field_name("value")
            name = self._source.named(declarator)
            if declarator is not None and declarator.type == "reference_declarator":
                self._aliases["&" + name] = self._place(value)
            elif of := self._address(value):
                self._aliases[name] = of
        elif node.type == "call_expression":
            self._visit_call(node)
            return
        elif node.type in ("subscript_expression", "pointer_expression"):
            self._note(self._place(node), "read")
        elif "asm" in node.type:
            for name in map(self._source.text, self._source.within(node, "identifier")):
                for pointer in self._aliases.get(name, ()):
                    self._roles[pointer].unsure = True
        for child in node.named_children:
            self._visit(child)

    def _below(self, place: Node) -> None:
        """What is read to find a place: indices."""
        of_macro = place.type == "argument_list"
        for child in place.named_children:
            inner = child == place.child_by_field_name("argument") or (of_macro and self._place(child))
            if inner or child.type == "argument_list" or place.type == "parenthesized_expression":
                self._below(child)
            else:
                self._visit(child)

    def _visit_call(self, node: Node) -> None:
        given = node.child_by_field_name("arguments")
        name = self._source.named(node.child_by_field_name("function"))
        arguments = [c for c in (given.named_children if given else ()) if c.type != "comment"]
        called = self._functions.get(name)
        for place, argument in enumerate(arguments):
            pointers = self._address(argument)
            if not pointers or name in _CASTS:
                self._visit(argument)
                continue
            self._below(argument)
            if name.startswith("atomic"):
                self._note(pointers, "read")
                self._note(pointers, "written", adds=True)
            elif name in _READS or name in _WRITES:
                self._note(pointers, "read" if name in _READS else "written")
            elif name in _COPIES:
                self._note(pointers, "read" if place else "written")
            elif called is not None:
                self._follow(called, place, pointers)
            elif name in self._source.macros:
                self._note(pointers, "read")
            elif name and name[0].isalpha():
                for pointer in pointers:
                    self._roles[pointer].unsure = True

    def _follow(self, called: Node, place: int, pointers: frozenset[str]) -> None:
        taken = next(self._source.within(called, "parameter_list"), None)
        names = [self._source.named(c.child_by_field_name("declarator")) for c in (taken.named_children if taken else ())]
        if place >= len(names):
            return
        key = (called.start_byte, names[place])
        if key not in self._known:
            self._known[key] = Role()  # a function that calls itself
            self._known[key] = _Reader(self._source, self._known).of_function(called, [names[place]])[names[place]]
        role = self._known[key]
        for what in (("read", "written") if role.first != "written" else ("written", "read")):
            if getattr(role, what):
                self._note(pointers, what, adds=role.added)
        for pointer in pointers:
            self._roles[pointer].unsure |= role.unsure
