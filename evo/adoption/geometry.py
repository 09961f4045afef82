"""How a kernel is launched, as far as its file shows: by launches in host code, or by how the kernel finds its place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from evo.problem.plain import WHOLE, EntryPoint, Launched, Node, PlainSource, read_source

Tree = Any
"""An expression: a number, a name, or (operation, left, right)."""

AXES = "xyz"
_BLOCK = tuple(f"blockDim.{axis}" for axis in AXES)
_CEIL = re.compile(r"ceil|c_?div|div_?up|div_?round_?up|round_?up_?div|num_?blocks", re.IGNORECASE)
_A_GRID = re.compile(r"grid|block|tile|chunk|cta|wave|split|\bsms?\b|num_?sm", re.IGNORECASE)
"""Names of a number of blocks that is no size of the problem."""
_SIZES = {"char": 1, "half": 2, "__half": 2, "float": 4, "int": 4, "unsigned": 4, "double": 8, "float2": 8, "float4": 16}
_LISTS = ("argument_list", "initializer_list", "parameter_list")
_NAMED = ("identifier", "parameter_declaration")
_CODE = {"+": 1, "-": 1, "*": 2, "//": 2}


@dataclass(frozen=True)
class Geometry:
    """A launch. threads: of a block along each axis; tiles: what the grid cuts along each axis, and the size of a piece; of
    names of dimensions and choices. Empty where the file does not show it."""

    threads: tuple[Tree, ...] = ()
    tiles: tuple[tuple[Tree, Tree], ...] = ()
    smem_bytes: Tree = 0


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def block_axes(source: PlainSource, entry: EntryPoint) -> int:
    """The number of axes of a block that a kernel looks at."""
    used = {n for n in AXES if re.search(rf"\b(threadIdx|blockDim)\s*\.\s*{n}\b", source.code(entry.node))}
    return max((AXES.index(n) + 1 for n in used), default=1)


def geometry_of(source: PlainSource, entry: EntryPoint, dimensions: Collection[str], choices: Collection[str]) -> Geometry:
    """How a kernel is launched. dimensions, choices: names that may stand in it, as the kernel and the macros call them."""
    own = [launched for launched in source.launches if launched.name == entry.name and len(launched.geometry) >= 2]
    own_place = _Body(source, entry, dimensions, choices).geometry()
    for launched in own:
        made = _Host(source, entry, launched, dimensions, choices).geometry()
        if made.threads and any(isinstance(whole, int) for whole, _ in made.tiles):  # a grid for a size of its own
            made = replace(made, tiles=own_place.tiles)
        if made.threads and made.tiles:
            return made
        own_place = replace(own_place, threads=own_place.threads or made.threads)
    return own_place


def counted_by_grid(
    source: PlainSource, entry: EntryPoint, dimensions: Collection[str], choices: Collection[str]
) -> list[str]:
    """Dimensions that a kernel is not told, since it has a block for each: variables of host code that are the grid."""
    if "gridDim" in source.code(entry.node) or _Body(source, entry, dimensions, choices).geometry().tiles:
        return []
    for launched in (one for one in source.launches if one.name == entry.name and len(one.geometry) >= 2):
        found = _Host(source, entry, launched, dimensions, choices).grid_variables()
        if found and len({*found} - {*dimensions, *choices}) == len(found) and not any(map(_A_GRID.search, found)):
            return found
    return []


def bounds_of(source: PlainSource, entry: EntryPoint, names: Collection[str]) -> set[str]:
    """Names, of those given, that the place of a thread in the grid is compared with."""
    scalars = [p.name for p in entry.parameters if not p.pointers]
    others = sorted(source.uses - {*scalars, *names} - source.declared)
    wholes = (whole for whole, _ in _Body(source, entry, [*scalars, *names], others).geometry().tiles)
    return {name for whole in wholes for name in _names(whole)} & {*names}


def in_python(tree: Tree, dimensions: Collection[str], *, of_workload: bool) -> str:
    """An expression for `plan`. of_workload: whether it stands outside the texts of tiles, where names are dimensions."""
    if isinstance(tree, int):
        return str(tree)
    if isinstance(tree, str):
        if tree in dimensions:
            return f'workload.dim("{tree}")' if of_workload else tree
        return f'point["{tree}"]'
    operation, *parts = tree
    texts = []
    for place, part in enumerate(parts):
        text = in_python(part, dimensions, of_workload=of_workload)
        loose = isinstance(part, tuple) and (_CODE.get(part[0], 3), 0) < (_CODE.get(operation, 0), place)
        texts.append(f"({text})" if loose and operation in _CODE else text)
    return f" {operation} ".join(texts) if operation in _CODE else f"{operation}({', '.join(texts)})"


def _made(operation: str, left: Tree, right: Tree) -> Tree:
    """An expression, with what is plain in it computed."""
    if isinstance(left, int) and isinstance(right, int):
        return {"+": left + right, "-": left - right, "*": left * right}.get(operation, left // right if right else 0)
    if (operation, right) in (("*", 1), ("//", 1), ("+", 0), ("-", 0)):
        return left
    return right if (operation, left) in (("*", 1), ("+", 0)) else (operation, left, right)


class _Trees:
    """Expressions of a source as trees of names that may stand in them."""

    def __init__(self, source: PlainSource, function: Node | None, known: Mapping[str, Tree]) -> None:
        self.source, self._known = source, known
        self._locals = dict[str, Node]()
        above = (n for n in source.root.children if n.type == "declaration" and "const" in source.code(n))
        for made in chain.from_iterable(source.within(n, "init_declarator") for n in (function, *above) if n is not None):
            if (value := made.child_by_field_name("value")) is not None:
                self._locals.setdefault(source.named(made.child_by_field_name("declarator")), value)
        for made in source.within(function, "function_declarator") if function is not None else ():  # dim3 block(X, Y)
            if made.parent is not None and made.parent.type == "declaration":
                parts = next(source.within(made, "parameter_list"))
                self._locals.setdefault(source.named(made), parts)
        self._values = {d.name: d.value for d in source.definitions}

    def parts(self, node: Node, deep: int = 0) -> list[Node]:
        """The parts of a dim3, or the one number that an expression is."""
        made = self._locals.get(_text(node)) if node.type == "identifier" else None
        if made is not None and (made.type in _LISTS or self._is_dim3(made) or made.type == "identifier") and deep < 8:
            return self.parts(made, deep + 1)
        if self._is_dim3(node):
            node = node.child_by_field_name("arguments") or node
        return node.named_children if node.type in _LISTS else [node]

    def _is_dim3(self, node: Node) -> bool:
        return node.type == "call_expression" and self.source.named(node.child_by_field_name("function")) == "dim3"

    def components(self, node: Node) -> list[Tree]:
        return [self.tree(part) for part in self.parts(node)]

    def tree(self, node: Node | None, deep: int = 0) -> Tree:
        """None for what is not understood."""
        if node is None or deep > 24:
            return None
        text = _text(node)
        if node.type == "number_literal":
            number = re.fullmatch(r"(0|[1-9]\d*|0x[0-9a-fA-F]+)[uUlL]*", text)
            whole = re.fullmatch(r"(\d+)\.0*f?", text)
            return int(number[1], 0) if number else int(whole[1]) if whole else None
        if node.type in ("identifier", "field_expression", "parameter_declaration"):
            name = "".join(text.split())
            if name in self._known:
                return self._known[name]
            if name in self._locals:
                return self.tree(self._locals[name], deep + 1)
            return self.tree(_expression(self._values[name]), deep + 1) if name in self._values else None
        if node.type in ("parenthesized_expression", "cast_expression", "initializer_list"):
            inner = [c for c in node.named_children if c.type != "type_descriptor"]
            return self.tree(inner[-1], deep + 1) if inner else None
        if node.type == "sizeof_expression":
            return _SIZES.get(re.sub(r"sizeof|[()\s]", "", text))
        if node.type == "binary_expression":
            operator = node.child_by_field_name("operator")
            left, right = (self.tree(node.child_by_field_name(side), deep + 1) for side in ("left", "right"))
            name = operator.type if operator else ""
            if left is None or right is None:
                return None
            if name in ("<<", ">>") and isinstance(right, int) and right < 64:
                return _made("*" if name == "<<" else "//", left, 1 << right)
            return _made("//" if name == "/" else name, left, right) if name in ("+", "-", "*", "/") else None
        if node.type == "call_expression":
            name = self.source.named(node.child_by_field_name("function"))
            given = node.child_by_field_name("arguments")
            parts = [self.tree(c, deep + 1) for c in (given.named_children if given else ())]
            if None in parts or not parts:
                return None
            if name in ("static_cast", "int", "unsigned", "float", "double", "size_t") and len(parts) == 1:
                return parts[0]
            if _CEIL.search(name):
                quotient = parts[0][1:] if isinstance(parts[0], tuple) and parts[0][0] == "//" else ()
                cut = parts if len(parts) == 2 else quotient
                return ("ceil", *cut) if len(cut) == 2 else parts[0] if len(parts) == 1 else None
            return (name, *parts) if name in ("min", "max", "std::min", "std::max") and len(parts) == 2 else None
        return None


def number_of(text: str) -> int | None:
    """A whole number as a macro or a constant has it, such as 1 << 10; None for anything else."""
    if not WHOLE.fullmatch(text) or read_source(f"int q = {text};").root.has_error:
        return None
    tree = _Trees(read_source(""), None, {}).tree(_expression(text))
    return tree if isinstance(tree, int) else None


def numbers_of(source: PlainSource) -> dict[str, int]:
    """The whole numbers that a source defines, by name; of several the first."""
    return {d.name: number for d in reversed(source.definitions) if (number := number_of(d.value)) is not None}


def _cut(tree: Tree) -> tuple[Tree, Tree] | None:
    """What is cut into how large pieces, of a number of blocks."""
    if isinstance(tree, tuple) and tree[0] in ("min", "max"):  # of a grid that goes in steps
        return next((found for part in tree[1:] if isinstance(part, tuple) and (found := _cut(part))), None)
    if isinstance(tree, tuple) and tree[0] == "ceil":
        return tree[1], tree[2]
    if isinstance(tree, tuple) and tree[0] == "//":
        whole, size = tree[1:]
        for summed in (whole, _regrouped(whole)):
            if isinstance(summed, tuple) and summed[0] in ("+", "-"):
                added = summed[2] if summed[0] == "+" else None
                if added is not None and added == _made("-", size, 1):
                    return summed[1], size
                inner = summed[1] if summed[0] == "-" and summed[2] == 1 and isinstance(summed[1], tuple) else ("",)
                if inner[0] == "+" and size in inner[1:]:
                    return next((part for part in inner[1:] if part != size), size), size
        return whole, size
    if isinstance(tree, tuple) and tree[0] == "+" and tree[2] == 1 and isinstance(tree[1], tuple) and tree[1][0] == "//":
        whole, size = tree[1][1:]
        return (whole[1] if isinstance(whole, tuple) and whole[0] == "-" and whole[2] == 1 else whole), size
    return (tree, 1) if tree is not None else None


def _regrouped(tree: Tree) -> Tree:
    """a + b - 1 as a + (b - 1)."""
    if isinstance(tree, tuple) and tree[0] == "-" and isinstance(tree[1], tuple) and tree[1][0] == "+":
        return ("+", tree[1][1], _made("-", tree[1][2], tree[2]))
    return tree


def _names(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree[1:]:
            yield from _names(part)


def _tiles(cuts: Sequence[tuple[Tree, Tree] | None], dimensions: Collection[str]) -> tuple[tuple[Tree, Tree], ...]:
    """Pieces along each axis, if all are understood: of dimensions, and of a size that depends on none."""
    found = []
    for cut in cuts:
        if cut is None or {*_names(cut[1])} & {*dimensions}:
            return ()
        whole, size = cut
        if isinstance(whole, tuple) and whole[0] == "//" and not {*_names(whole[2])} & {*dimensions}:
            whole, size = whole[1], _made("*", size, whole[2])
        if {*_names(whole)} - {*dimensions}:
            return ()
        found.append((whole, size))
    while len(found) > 1 and found[-1] == (1, 1):
        found.pop()
    return tuple(found)


class _Host:
    """A launch in host code."""

    def __init__(
        self,
        source: PlainSource,
        entry: EntryPoint,
        launched: Launched,
        dimensions: Collection[str],
        choices: Collection[str],
    ) -> None:
        self._dimensions, self._launched = dimensions, launched
        known: dict[str, Tree] = {name: name for name in (*dimensions, *choices)}
        for parameter, argument in zip(entry.parameters, launched.arguments, strict=False):
            if argument.type == "identifier" and parameter.name in dimensions:
                known[_text(argument)] = parameter.name
        self._trees = _Trees(source, launched.function, known)
        self._block = self._trees.components(launched.geometry[1])
        for place, part in enumerate(self._trees.parts(launched.geometry[1])):
            if known.get(_text(part), "") in _BLOCK:  # one variable for both axes is one number of threads
                self._block[place] = known[_text(part)]
            elif part.type in _NAMED and isinstance(self._block[place], int):  # its variable stands for so many threads
                known[_text(part)] = _BLOCK[place]

    def grid_variables(self) -> list[str]:
        """The variables of the host function that the grid consists of; none if it is anything else, or follows from sizes
        that are known."""
        source, function = self._trees.source, self._launched.function
        made = source.within(function, "init_declarator", "parameter_declaration") if function is not None else ()
        own = {source.named(one.child_by_field_name("declarator")) for one in made}
        parts = self._trees.parts(self._launched.geometry[0])
        plain = all(_text(p) in own and not {*_names(self._trees.tree(p))} for p in parts)
        return [*map(_text, parts)] if plain else []

    def geometry(self) -> Geometry:
        block = self._block
        grid, _, *more = map(self._trees.components, self._launched.geometry[:3])
        threads = tuple(block) if None not in block and not any({*_names(t)} & {*self._dimensions} for t in block) else ()
        tiles = _tiles([None if part is None else _cut(part) for part in grid], self._dimensions)
        smem = more[0][0] if more else 0
        return Geometry(threads, tiles, 0 if smem is None or {*_names(smem)} & {*self._dimensions} else smem)


class _Body:
    """A kernel's own code: where blockIdx stands in it, and what the place that follows is compared with."""

    def __init__(
        self, source: PlainSource, entry: EntryPoint, dimensions: Collection[str], choices: Collection[str]
    ) -> None:
        self._source, self._entry, self._dimensions = source, entry, dimensions
        self._axes = block_axes(source, entry)
        names: dict[str, Tree] = {name: name for name in (*dimensions, *choices)}
        for axis in AXES:
            names |= {f"{of}.{axis}": f"{of}.{axis}" for of in ("blockIdx", "threadIdx", "blockDim")}
        self._trees = _Trees(source, next(source.within(entry.node, "function_definition")), names)

    def geometry(self) -> Geometry:
        threads = dict[str, Tree]()
        cuts = list[tuple[Tree, Tree] | None]()
        for axis in AXES:
            if not re.search(rf"\bblockIdx\s*\.\s*{axis}\b", self._source.code(self._entry.node)):
                continue
            cuts += [(1, 1)] * (AXES.index(axis) - len(cuts))
            cuts.append(self._along(axis, threads))
        known = tuple(threads.get(axis) for axis in AXES[: self._axes])
        return Geometry(() if None in known else known, _tiles(cuts or [None], self._dimensions))

    def _along(self, axis: str, threads: dict[str, Tree]) -> tuple[Tree, Tree] | None:
        """What the grid cuts along an axis. Notes in `threads` of how many threads a block's piece shows the axis to be."""
        for made in self._source.within(self._entry.node, "init_declarator", "assignment_expression"):
            value = made.child_by_field_name("value") or made.child_by_field_name("right")
            tree = self._trees.tree(value)
            if f"blockIdx.{axis}" not in {*_names(tree)}:
                continue
            name = self._source.named(made.child_by_field_name("declarator") or made.child_by_field_name("left"))
            size = _coefficient(tree, f"blockIdx.{axis}")
            is_block = _coefficient(tree, f"threadIdx.{axis}") == 1 and not isinstance(size, tuple)
            if is_block and size not in (None, f"blockDim.{axis}"):
                threads.setdefault(axis, size)
            whole = self._compared(name)
            if size is not None and whole is not None:
                return whole, size
        return None

    def _compared(self, name: str) -> Tree:
        """The dimensions that a variable is compared with, to be below."""
        code = self._source.code(self._entry.node)
        for found in re.finditer(rf"\b{re.escape(name)}\s*(<=?|>=?)(?![<>=])([^;&|?<>=]+)", code) if name else ():
            whole = self._trees.tree(_expression(_balanced(found[2])))
            if whole is not None and {*_names(whole)} <= {*self._dimensions} and not isinstance(whole, int):
                return whole if found[1] in ("<", ">=") else _made("+", whole, 1)
        return None


def _balanced(text: str) -> str:
    """A text up to where a parenthesis is closed that it does not open."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return text[:place]
    return text


def _expression(text: str) -> Node | None:
    source = read_source(f"int q = {text};")
    made = next(source.within(source.root, "init_declarator"), None)
    return made.child_by_field_name("value") if made is not None else None


def _coefficient(tree: Tree, name: str) -> Tree:
    """What a name is multiplied by in a sum; None if it does not stand in it so."""
    if tree == name:
        return 1
    if isinstance(tree, tuple) and tree[0] in ("+", "-"):
        left = _coefficient(tree[1], name)
        return left if left is not None else _coefficient(tree[2], name) if tree[0] == "+" else None
    if isinstance(tree, tuple) and tree[0] == "*":
        for one, other in ((tree[1], tree[2]), (tree[2], tree[1])):
            if name in {*_names(one)} and (inner := _coefficient(one, name)) is not None:
                return _made("*", inner, other)
    return None
