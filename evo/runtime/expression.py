"""Expressions over a call's arguments, as a function's statement has them, in Python's notation; translated to the code of
either launcher.

There are the arguments of the signature by name; of a tensor `.shape`, `.ndim`, `.dtype`, `.numel()`, `.stride(axis)`,
`.is_contiguous()`, `.data_ptr()` and `.is_cuda`; `len`, `prod`, `min` and `max`; `expands(shape, (a, b, c))`, whether a
tensor of that shape can be expanded to another; dtypes as `torch.float64`; `since(2, 7)`, whether this
PyTorch is at least of that version; `backend(name)`, whether PyTorch may use that back end of attention ("math", "flash",
"efficient", "cudnn"); integers, floats, True, False, None; arithmetic, comparisons, `in (a, b)`, and, or, not, and
`a if condition else b`. Division (//) rounds down. And, or are of bools.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise, permutations
from math import inf
from typing import Any, NamedTuple

NO_VALUE = "an expression of the function's statement has no value for such arguments"
"""The reason for which a call is left to PyTorch for which Python would raise an exception."""
_BACKENDS = {"math": "Math", "flash": "Flash", "efficient": "MemEfficient", "cudnn": "CuDNN"}
_OPERATORS: Mapping[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.And: "&&", ast.Or: "||",
}  # fmt: skip
_ROUNDED: Mapping[type[ast.AST], str] = {ast.FloorDiv: "floor_divide", ast.Mod: "floor_modulo"}
"""Functions of call.h."""
_CALLS: Mapping[str, tuple[tuple[tuple[str, ...], ...], str, str]] = {
    ".numel": ((), "int", "{0}.numel()"),
    ".is_contiguous": ((), "bool", "{0}.is_contiguous()"),
    ".data_ptr": ((), "int", "static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>({0}.const_data_ptr()))"),
    ".stride": ((("int",),), "int", "item_of({0}.strides(), {1})"),
    "len": ((("int[]", "bool[N]"),), "int", "static_cast<std::int64_t>({0}.size())"),
    "expands": ((("int[]",), ("int[]",)), "bool", "at::is_expandable_to({0}, {1})"),
    "prod": ((("int[]",),), "int", "c10::multiply_integers({0})"),
}
"""Types of the arguments of a function or a tensor's method, and of its value; its code, of the tensor and these."""


class Type(NamedTuple):
    """A type of arguments. {0} is the argument's name, {1} the number of bools."""

    is_wrong: str
    """What is true of an argument of another one, in Python."""
    reason: str
    """Why a call with such an argument is left to PyTorch."""
    in_cpp: str
    in_schemas: str
    """What PyTorch's operators call it."""


_SIZES = "type({0}) not in _SEQUENCES or not {{*map(type, {0})}} <= _INT"
_BOOLS = "type({0}) not in _SEQUENCES or [*map(type, {0})] != [bool] * {1}"
TYPES: Mapping[str, Type] = {
    "Tensor": Type("not isinstance({0}, Tensor)", "{0} is not a tensor", "const Tensor*", "Tensor"),
    "int": Type("type({0}) is not int", "{0} is not an int", "std::int64_t", "int"),
    "int[]": Type(_SIZES, "{0} is not a tuple or list of sizes", "Ints", "List[int]"),
    "float": Type("type({0}) not in _NUMBERS", "{0} is not a number", "double", "float"),
    "bool": Type("type({0}) is not bool", "{0} is not a bool", "bool", "bool"),
    "bool[N]": Type(
        _BOOLS, "{0} is not a tuple or list of as many bools as there may be", "std::array<bool, {1}>", "List[bool]"
    ),
    "ScalarType": Type("type({0}) is not _dtype", "{0} is not a dtype", "c10::ScalarType", "int"),
}
"""Types by what signatures call them."""
DTYPES = {
    "float16": "at::kHalf", "bfloat16": "at::kBFloat16", "float32": "at::kFloat", "float64": "at::kDouble",
    "bool": "at::kBool", "uint8": "at::kByte", "int8": "at::kChar", "int16": "at::kShort", "int32": "at::kInt",
    "int64": "at::kLong", "float8_e4m3fn": "at::kFloat8_e4m3fn", "float8_e5m2": "at::kFloat8_e5m2",
}  # fmt: skip
"""Dtypes in C++."""


class Parameter(NamedTuple):
    """A parameter of a signature. type: Tensor, int, int[], float, bool, bool[2] or ScalarType; optional: it may be None."""

    name: str
    type: str
    optional: bool
    default: str | None
    """Default as Python writes it; None if there is none."""
    keyword: bool

    @property
    def kind(self) -> str:
        """The type, with the number of bools left open."""
        return "bool[N]" if self.type.startswith("bool[") else self.type

    @property
    def length(self) -> str:
        """The number of bools of a bool[N]."""
        return self.type.partition("[")[2].rstrip("]")


Parameters = Mapping[str, Parameter]


def parse(text: str) -> ast.expr:
    """Raises SyntaxError."""
    return ast.parse(text, mode="eval").body


def names_in(text: str) -> list[str]:
    """Names that an expression uses, each once, in order."""
    return list(dict.fromkeys(node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name)))


def shapes_in(text: str) -> list[str]:
    """Tensors whose shape an expression looks at, each once."""
    return list(_looked_at(text, ("shape", "ndim")))


def strides_in(text: str) -> list[str]:
    """Tensors whose strides an expression looks at, each once."""
    return list(_looked_at(text, ("stride",)))


def locals_of(texts: Iterable[str]) -> Iterator[str]:
    """Lines of Python that set the variables in which `in_python` expects shapes and strides."""
    known = list(texts)
    for name in dict.fromkeys(name for text in known for name in shapes_in(text)):
        yield f"{name}_shape = () if {name} is None else {name}.shape"
    for name in dict.fromkeys(name for text in known for name in strides_in(text)):
        yield f"{name}_stride = () if {name} is None else {name}.stride()"


def operator_call(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The name of PyTorch's operator in a call such as "aten.softmax(input, dim=dim)", and what it is given: keywords, empty
    where the place says it, with values. Raises SyntaxError, ValueError."""
    node = parse(text)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or ast.unparse(node.func.value) != "aten":
        raise ValueError("write aten.NAME(ARGUMENT, KEYWORD=ARGUMENT)")
    given = [("", ast.unparse(value)) for value in node.args]
    return node.func.attr, [*given, *((keyword.arg or "**", ast.unparse(keyword.value)) for keyword in node.keywords)]


def schema_of(text: str, parameters: Parameters) -> tuple[bool, Mapping[str, bool]]:
    """The overload that a call of PyTorch's operator is of: whether it takes symbolic sizes, and whether it takes None, by
    what it is given. Raises ValueError where there is none."""
    import torch

    name, passed = operator_call(text)
    own = [TYPES[parameters[value].kind].in_schemas if value in parameters else "" for _, value in passed]
    _ = [in_cpp(value, parameters) for _, value in passed if value not in parameters]
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        raise ValueError(f"there is no aten.{name}")
    for overload in (getattr(packet, one)._schema for one in packet.overloads()):
        left = [*overload.arguments]  # in C++ all are given by their places
        taken = [a if keyword in ("", a.name) else None for (keyword, _), a in zip(passed, left, strict=False)]
        needed = {a.name for a in left if not a.has_default_value()} - {a.name for a in taken if a is not None}
        types = ["" if a is None else str(a.type) for a in taken]
        if len(types) == len(own) and not needed and all(map(_is_alike, own, types)):
            return "SymInt" in str(overload), {v: t.startswith("Optional") for (_, v), t in zip(passed, types, strict=True)}
    raise ValueError(f"no overload of aten.{name} takes such arguments, in this order and without a gap")


def _is_alike(own: str, theirs: str) -> bool:
    """Whether what is given, of any type if that is empty, can be an argument of PyTorch's operator."""
    numbers = theirs == "number" and own in ("int", "float", "bool")  # as Scalar is called here
    return theirs in (own, f"Optional[{own}]") or numbers or bool(theirs and not own)


def product(sizes: Iterable[str]) -> str:
    """An expression of the product of some."""
    nodes = [parse(text) for text in sizes]
    return ast.unparse(reduce(lambda one, other: ast.BinOp(one, ast.Mult(), other), nodes)) if nodes else "prod(())"


def is_count(form: str, sizes: Sequence[str], tensors: Iterable[str], conditions: Iterable[str]) -> bool:
    """Whether the number of elements of a tensor, or of a shape, is the product of some expressions wherever conditions are
    true: as far as they say so, or the expressions."""
    equal, found, waiting = {p for text in conditions for p in _equalities(text, form)}, set[str](), [form]
    if isinstance(node := parse(form), ast.Tuple):
        found.add(product(map(ast.unparse, node.elts)))
    while waiting:
        name = waiting.pop()
        count = f"{name}.numel()" if name in tensors else f"prod({name})"
        if count not in found:
            found.add(count)
            found |= {other for one, other in equal if one == count}
            waiting += [other.removesuffix(".shape") for one, other in equal if one == f"{name}.shape"]
            axes = [int(other) for one, other in equal if one == f"{name}.ndim" and other.isdigit()]
            found |= {product(f"{name}.shape[{axis}]" for axis in range(n)) for n in axes}
    known = {product(sizes)}
    for rows, cols in permutations(map(product, zip(sizes)), 2) if len(sizes) == 2 else ():
        name, _, divisor = rows.partition(".numel() // ")
        end = f"{name}.shape[-len({cols[5:-1]}):]"  # of which `cols` is the product
        if divisor == cols and (re.fullmatch(rf"{name}\.shape\[-?\d+\]", cols) or (end, cols[5:-1]) in equal):
            known.add(f"{name}.numel()")
    return bool(known & found)


def _equalities(text: str, given: str) -> Iterator[tuple[str, str]]:
    """What is equal, both ways round, where an expression is true and the argument `given` is not None."""
    for node in _implied(text, given):
        if isinstance(node, ast.Compare) and all(isinstance(operator, ast.Eq) for operator in node.ops):
            for one, other in pairwise(map(ast.unparse, (node.left, *node.comparators))):
                yield from ((one, other), (other, one))


def is_implied(what: str, text: str, given: str) -> bool:
    """Whether an expression is true where another one is, and the argument `given` is not None, as far as that says so."""
    return any(ast.unparse(node) == what for node in _implied(text, given))


def _implied(text: str, given: str) -> Iterator[ast.expr]:
    waiting = [parse(text)]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.BoolOp):
            is_or = isinstance(node.op, ast.Or)
            sides = [side for side in node.values if not is_or or ast.unparse(side) != f"{given} is None"]
            waiting += sides if not is_or or len(sides) == 1 else []


def _looked_at(text: str, attributes: tuple[str, ...]) -> Iterator[str]:
    found = dict[str, None]()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in attributes and isinstance(node.value, ast.Name):
            found[node.value.id] = None
    yield from found


class _InPython(ast.NodeTransformer):
    """Shapes and strides are in variables: an attribute of a tensor costs more than one of those."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.attr == "shape":
            return ast.Name(f"{node.value.id}_shape")
        if isinstance(node.value, ast.Name) and node.attr == "ndim":
            return ast.Call(ast.Name("len"), [ast.Name(f"{node.value.id}_shape")], [])
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "stride" and isinstance(function.value, ast.Name):
            return ast.Subscript(ast.Name(f"{function.value.id}_stride"), self.visit(node.args[0]))
        if isinstance(function, ast.Name) and function.id == "since":
            return ast.Constant(_since(node))
        self.generic_visit(node)
        return node


def in_python(text: str) -> str:
    """The expression as Python code, for which NAME_shape and NAME_stride hold those of tensors."""
    return ast.unparse(ast.fix_missing_locations(_InPython().visit(parse(text))))


def _since(node: ast.Call) -> bool:
    import torch

    asked = tuple(ast.literal_eval(argument) for argument in node.args)
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= asked


class CodeError(ValueError):
    """An expression that has no translation; the message says which part."""


def in_cpp(text: str, parameters: Parameters, *kinds: str) -> str:
    """The expression as C++ code, in which `a` is the Arguments of the call, with an underscore behind each name. It means
    what it means in Python. kinds: types that its value may have, as signatures name them. Raises CodeError."""
    return _InCpp(parameters).of(parse(text), *kinds).text


_NUMBERS = ("int", "float", "bool")


class _Code(NamedTuple):
    text: str
    kind: str
    """Its type, as signatures name it."""

    @property
    def as_sizes(self) -> str:
        """Its text, which is of one type in C++ whatever sizes it is of."""
        return f"c10::IntArrayRef({self.text})" if self.text.startswith("std::array") else self.text


class _InCpp:
    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def of(self, node: ast.expr, *kinds: str) -> _Code:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise CodeError(f"{ast.unparse(node)} has no translation to C++")
        found: _Code = method(node)
        if kinds and found.kind not in kinds:
            raise CodeError(f"{ast.unparse(node)} has no translation to C++: it is {found.kind}, not {' or '.join(kinds)}")
        return found

    def _all(self, nodes: Iterable[ast.expr], *kinds: str) -> tuple[list[str], str]:
        """Values, and the type that they have together."""
        found = [self.of(node, *kinds) for node in nodes]
        known = {code.kind for code in found}
        return [code.as_sizes for code in found], next((kind for kind in ("float", "int") if kind in known), "bool")

    def _constant(self, node: ast.Constant) -> _Code:
        if isinstance(node.value, bool):
            return _Code(str(node.value).lower(), "bool")
        if isinstance(node.value, int) and node.value < 1 << 63:
            return _Code(f"std::int64_t({node.value})", "int")
        if isinstance(node.value, float):
            return _Code("double(INFINITY)" if node.value == inf else f"double({node.value!r})", "float")
        raise CodeError(f"{node.value!r} has no translation to C++")

    def _name(self, node: ast.Name) -> _Code:
        p = self._parameter(node)
        own = f"there(a.{p.name}_)" if p.optional else f"(*a.{p.name}_)" if p.type == "Tensor" else f"a.{p.name}_"
        return _Code(f"c10::IntArrayRef({own})" if p.type == "int[]" else own, p.kind)

    def _parameter(self, node: ast.expr) -> Parameter:
        if isinstance(node, ast.Name) and node.id in self._parameters:
            return self._parameters[node.id]
        raise CodeError(f"{ast.unparse(node)} is no argument of the function")

    def _optional(self, node: ast.expr) -> Parameter | None:
        """The argument that may be None and is no tensor, if it is one."""
        p = self._parameters.get(node.id) if isinstance(node, ast.Name) else None
        return p if p is not None and p.optional and p.type != "Tensor" else None

    def _truth(self, node: ast.expr, *kinds: str) -> str:
        p = self._optional(node)
        return f"a.{p.name}_.value_or(0)" if p is not None and p.kind in kinds else self.of(node, *kinds).text

    def _boolop(self, node: ast.BoolOp) -> _Code:
        return _Code(f"({f' {_OPERATORS[type(node.op)]} '.join(self._truth(n, 'bool') for n in node.values)})", "bool")

    def _unaryop(self, node: ast.UnaryOp) -> _Code:
        if isinstance(node.op, ast.Not):
            return _Code(f"!({self._truth(node.operand, *_NUMBERS)})", "bool")
        if not isinstance(node.op, ast.USub):
            raise CodeError(f"{ast.unparse(node)} has no translation to C++")
        (text,), kind = self._all([node.operand], *_NUMBERS)
        return _Code(f"-({text})", "float" if kind == "float" else "int")

    def _binop(self, node: ast.BinOp) -> _Code:
        if type(node.op) not in (*_OPERATORS, *_ROUNDED):
            raise CodeError(f"{ast.unparse(node)} has no translation to C++: there are +, -, *, // and %")
        (left, right), kind = self._all([node.left, node.right], *_NUMBERS)
        kind = "float" if kind == "float" else "int"
        if name := _ROUNDED.get(type(node.op)):
            return _Code(f"{name}<{TYPES[kind].in_cpp}>({left}, {right})", kind)
        return _Code(f"({left} {_OPERATORS[type(node.op)]} {right})", kind)

    def _ifexp(self, node: ast.IfExp) -> _Code:
        kind = self.of(node.body, *_NUMBERS, "int[]", "ScalarType").kind
        (body, other), of_both = self._all([node.body, node.orelse], *(_NUMBERS if kind in _NUMBERS else (kind,)))
        test = self._truth(node.test, *_NUMBERS)
        return _Code(f"({test} ? {body} : {other})", of_both if kind in _NUMBERS else kind)

    def _compare(self, node: ast.Compare) -> _Code:
        sides = [node.left, *node.comparators]
        found = [self._compared(*each) for each in zip(sides, node.ops, sides[1:], strict=False)]
        return _Code(found[0] if len(found) == 1 else f"({' && '.join(found)})", "bool")

    def _compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> str:
        if isinstance(operator, ast.Is | ast.IsNot) and isinstance(right, ast.Constant) and right.value is None:
            p, is_none = self._parameter(left), isinstance(operator, ast.Is)
            if not p.optional and p.type != "Tensor":
                return str(not is_none).lower()
            return f"({'!' if is_none else 'bool'}(a.{p.name}_))"
        if isinstance(operator, ast.In | ast.NotIn) and isinstance(right, ast.Tuple):
            found = " || ".join(self._equal(left, other) for other in right.elts)
            return f"{'!' if isinstance(operator, ast.NotIn) else ''}({found or 'false'})"
        if isinstance(operator, ast.Eq | ast.NotEq):
            return f"{'!' if isinstance(operator, ast.NotEq) else ''}{self._equal(left, right)}"
        if type(operator) not in _OPERATORS:
            text = ast.unparse(ast.Compare(left, [operator], [right]))
            raise CodeError(f"{text} has no translation to C++: `is` is for None, and `in` for (a, b)")
        (one, other), _ = self._all([left, right], *_NUMBERS)
        return f"({one} {_OPERATORS[type(operator)]} {other})"

    def _equal(self, left: ast.expr, right: ast.expr) -> str:
        """What may be None equals nothing else then."""
        one = self.of(left, *_NUMBERS, "int[]", "ScalarType")
        other = self.of(right, *(_NUMBERS if one.kind in _NUMBERS else (one.kind,)))
        if one.kind == "int[]":
            there = "".join(f"a.{p.name}_ && " for p in map(self._optional, (left, right)) if p is not None)
            return f"({there}{one.as_sizes} == {other.as_sizes})"
        sides = zip(map(self._optional, (left, right)), (one, other), strict=True)
        return f"({' == '.join(code.text if p is None else f'a.{p.name}_' for p, code in sides)})"

    def _attribute(self, node: ast.Attribute) -> _Code:
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in DTYPES:
            return _Code(DTYPES[node.attr], "ScalarType")
        p = self._parameter(node.value)
        own = self.of(node.value, "Tensor").text
        known = {
            "shape": _Code(f"sizes_of(a.{p.name}_)" if p.optional else f"{own}.sizes()", "int[]"),
            "ndim": _Code(f"dim_of(a.{p.name}_)" if p.optional else f"{own}.dim()", "int"),
            "dtype": _Code(f"{own}.scalar_type()", "ScalarType"),
            "is_cuda": _Code(f"{own}.is_cuda()", "bool"),
        }
        if node.attr not in known:
            raise CodeError(f"{ast.unparse(node)} has no translation to C++")
        return known[node.attr]

    def _subscript(self, node: ast.Subscript) -> _Code:
        value = self.of(node.value, "int[]", "bool[N]")
        if value.kind == "bool[N]":
            number = int(self._parameter(node.value).length)
            place = _literal(node.slice)
            if type(place) is not int or not -number <= place < number:
                raise CodeError(f"{ast.unparse(node)} has no translation to C++: its index is no number below {number}")
            return _Code(f"{value.text}[{place % number}]", "bool")
        if not isinstance(node.slice, ast.Slice):
            return _Code(f"item_of({value.text}, {self.of(node.slice, 'int').text})", "int")
        if node.slice.step is not None:
            raise CodeError(f"{ast.unparse(node)} has no translation to C++: it has a step")
        ends = [self.of(n, "int").text if n is not None else "std::nullopt" for n in (node.slice.lower, node.slice.upper)]
        return _Code(f"part_of({value.text}, {', '.join(ends)})", "int[]")

    def _tuple(self, node: ast.Tuple) -> _Code:
        texts, _ = self._all(node.elts, "int", "bool")
        return _Code(f"std::array<std::int64_t, {len(texts)}>{{{', '.join(texts)}}}", "int[]")

    def _list(self, node: ast.List) -> _Code:
        raise CodeError(f"{ast.unparse(node)} is a list: write it as a tuple, ({', '.join(map(ast.unparse, node.elts))},)")

    def _call(self, node: ast.Call) -> _Code:
        name = f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        literals = [_literal(argument) for argument in node.args]
        if isinstance(node.func, ast.Name) and not node.keywords:
            if name == "backend" and len(literals) == 1 and literals[0] in _BACKENDS:
                return _Code(f"at::globalContext().userEnabled{_BACKENDS[literals[0]]}SDP()", "bool")
            if name == "since" and literals and all(type(value) is int for value in literals):
                return _Code(str(_since(node)).lower(), "bool")
            if name in ("min", "max") and len(node.args) > 1:
                texts, kind = self._all(node.args, *_NUMBERS)
                return _Code(reduce(lambda one, other: f"std::{name}<{TYPES[kind].in_cpp}>({one}, {other})", texts), kind)
        kinds, kind, text = _CALLS.get(name, ((), "", ""))
        if not text or len(kinds) != len(node.args) or node.keywords:
            raise CodeError(f"{ast.unparse(node)} has no translation to C++")
        values = [self.of(argument, *of).text for argument, of in zip(node.args, kinds, strict=True)]
        own = (self.of(node.func.value, "Tensor").text,) if isinstance(node.func, ast.Attribute) else ()
        if name == ".stride" and self._parameter(node.func.value).optional:  # type: ignore[attr-defined]
            text = text.replace("{0}.strides()", f"strides_of(a.{ast.unparse(node.func.value)}_)")  # type: ignore[attr-defined]
        return _Code(text.format(*own, *values), kind)


def _literal(node: ast.expr) -> Any:
    """The value of what is written out; None for anything else."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
