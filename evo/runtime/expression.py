"""Expressions over a call's arguments, as a function's statement has them, in Python's notation; translated to the code of
either launcher.

There are the arguments of the signature by name; of a tensor `.shape`, `.ndim`, `.dtype`, `.numel()`, `.stride(axis)`,
`.is_contiguous()`, `.data_ptr()` and `.is_cuda`; `len`, `prod`, `min` and `max`; `expands(shape, (a, b, c))`, whether a
tensor of that shape can be expanded to another; dtypes as `torch.float64`; `since(2, 7)`, whether this
PyTorch is at least of that version; `backend(name)`, whether PyTorch may use that back end of attention ("math", "flash",
"efficient", "cudnn"); integers, floats, True, False, None; arithmetic, comparisons, `in (a, b)`, and, or, not, and
`a if condition else b`. Division is of integers (//), and rounds down: neither side is negative.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise, permutations
from typing import NamedTuple

_BACKENDS = {"math": "Math", "flash": "Flash", "efficient": "MemEfficient", "cudnn": "CuDNN"}
_OPERATORS: Mapping[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%", ast.Eq: "==", ast.NotEq: "!=",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.And: "&&", ast.Or: "||",
}  # fmt: skip
WRONG_TYPE = {
    "Tensor": "{0} is not a tensor",
    "int": "{0} is not an int",
    "int[]": "{0} is not a tuple or list of sizes",
    "float": "{0} is not a number",
    "bool": "{0} is not a bool",
    "bool[N]": "{0} is not a tuple or list of as many bools as there may be",
    "ScalarType": "{0} is not a dtype",
}
"""The reason for which a call is left to PyTorch whose argument is of another type, by that of the signature."""
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
    where the place says it, with values."""
    name, _, inner = text.partition("(")
    parts = (part.partition("=") for part in inner.rstrip(")").split(","))
    given = [(first.strip(), value.strip()) if equals else ("", first.strip()) for first, equals, value in parts]
    return name.strip().removeprefix("aten."), given


def product(sizes: Iterable[str]) -> str:
    """An expression of the product of some."""
    nodes = [parse(text) for text in sizes]
    return ast.unparse(reduce(lambda one, other: ast.BinOp(one, ast.Mult(), other), nodes)) if nodes else "prod(())"


def is_count(form: str, sizes: Sequence[str], tensors: Iterable[str], conditions: Iterable[str]) -> bool:
    """Whether the number of elements of a tensor, or of a shape, is the product of some expressions wherever conditions are
    true: as far as they say so, or the expressions."""
    equal, found, waiting = {p for text in conditions for p in _equalities(text, form)}, set[str](), [form]
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
    waiting = [parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.BoolOp):
            is_or = isinstance(node.op, ast.Or)
            sides = [side for side in node.values if not is_or or ast.unparse(side) != f"{given} is None"]
            waiting += sides if not is_or or len(sides) == 1 else []
        elif isinstance(node, ast.Compare) and all(isinstance(operator, ast.Eq) for operator in node.ops):
            for one, other in pairwise(map(ast.unparse, (node.left, *node.comparators))):
                yield from ((one, other), (other, one))


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


def in_cpp(text: str, parameters: Parameters) -> str:
    """The expression as C++ code, in which `a` is the Arguments of the call, with an underscore behind each name. Raises
    CodeError."""
    return _InCpp(parameters).of(parse(text))


class _InCpp:
    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def of(self, node: ast.expr) -> str:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise CodeError(f"{ast.unparse(node)} has no translation to C++")
        found: str = method(node)
        return found

    def _constant(self, node: ast.Constant) -> str:
        if isinstance(node.value, bool):
            return str(node.value).lower()
        if isinstance(node.value, int):
            return f"std::int64_t({node.value})"
        if isinstance(node.value, float):
            return f"double({node.value!r})"
        raise CodeError(f"{node.value!r} has no translation to C++")

    def _name(self, node: ast.Name) -> str:
        parameter = self._parameter(node)
        own = f"(*a.{node.id}_)" if parameter.type == "Tensor" or parameter.optional else f"a.{node.id}_"
        return f"c10::IntArrayRef({own})" if parameter.type == "int[]" else own

    def _parameter(self, node: ast.expr) -> Parameter:
        if isinstance(node, ast.Name) and node.id in self._parameters:
            return self._parameters[node.id]
        raise CodeError(f"{ast.unparse(node)} is no argument of the function")

    def _boolop(self, node: ast.BoolOp) -> str:
        return f"({f' {_OPERATORS[type(node.op)]} '.join(map(self.of, node.values))})"

    def _unaryop(self, node: ast.UnaryOp) -> str:
        signs: Mapping[type[ast.AST], str] = {ast.Not: "!", ast.USub: "-"}
        if type(node.op) not in signs:
            raise CodeError(f"{ast.unparse(node)} has no translation to C++")
        return f"{signs[type(node.op)]}({self.of(node.operand)})"

    def _binop(self, node: ast.BinOp) -> str:
        if type(node.op) not in _OPERATORS:
            raise CodeError(f"{ast.unparse(node)} has no translation to C++: there are +, -, *, // and %")
        return f"({self.of(node.left)} {_OPERATORS[type(node.op)]} {self.of(node.right)})"

    def _ifexp(self, node: ast.IfExp) -> str:
        return f"({self.of(node.test)} ? {self.of(node.body)} : {self.of(node.orelse)})"

    def _compare(self, node: ast.Compare) -> str:
        sides = [node.left, *node.comparators]
        found = [self._compared(*each) for each in zip(sides, node.ops, sides[1:], strict=False)]
        return found[0] if len(found) == 1 else f"({' && '.join(found)})"

    def _compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> str:
        if isinstance(operator, ast.Is | ast.IsNot):
            parameter = self._parameter(left)
            return f"({'!' if isinstance(operator, ast.Is) else 'bool'}(a.{parameter.name}_))"
        if isinstance(operator, ast.In | ast.NotIn) and isinstance(right, ast.Tuple):
            one, joined = ("==", " || ") if isinstance(operator, ast.In) else ("!=", " && ")
            return f"({joined.join(f'{self.of(left)} {one} {self.of(other)}' for other in right.elts)})"
        if type(operator) not in _OPERATORS:
            raise CodeError(f"{ast.unparse(left)} ... {ast.unparse(right)} has no translation to C++")
        return f"({self.of(left)} {_OPERATORS[type(operator)]} {self.of(right)})"

    def _attribute(self, node: ast.Attribute) -> str:
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in DTYPES:
            return DTYPES[node.attr]
        own = self.of(node.value) if self._parameter(node.value).type == "Tensor" else ""
        known = {"shape": "sizes()", "ndim": "dim()", "dtype": "scalar_type()", "is_cuda": "is_cuda()"}
        if not own or node.attr not in known:
            raise CodeError(f"{ast.unparse(node)} has no translation to C++")
        return f"{own}.{known[node.attr]}"

    def _subscript(self, node: ast.Subscript) -> str:
        if isinstance(node.slice, ast.Slice):
            ends = [self.of(end) if end is not None else "std::nullopt" for end in (node.slice.lower, node.slice.upper)]
            return f"part_of({self.of(node.value)}, {', '.join(ends)})"
        if isinstance(node.value, ast.Name) and self._parameter(node.value).kind == "bool[N]":
            return f"{self.of(node.value)}[{self.of(node.slice)}]"
        return f"item_of({self.of(node.value)}, {self.of(node.slice)})"

    def _tuple(self, node: ast.Tuple) -> str:
        return f"std::array<std::int64_t, {len(node.elts)}>{{{', '.join(map(self.of, node.elts))}}}"

    def _call(self, node: ast.Call) -> str:
        values = [*map(self.of, node.args)] if not _is_named(node, "backend") else []
        if isinstance(node.func, ast.Attribute) and self._parameter(node.func.value).type == "Tensor":
            own = self.of(node.func.value)
            known = {"numel": f"{own}.numel()", "is_contiguous": f"{own}.is_contiguous()"}
            known |= {"data_ptr": f"reinterpret_cast<std::uintptr_t>({own}.const_data_ptr())"}
            known |= {"stride": f"item_of({own}.strides(), {values[0]})"} if values else {}
            if node.func.attr in known:
                return known[node.func.attr]
        if _is_named(node, "backend"):
            return f"at::globalContext().userEnabled{_BACKENDS[ast.literal_eval(node.args[0])]}SDP()"
        if _is_named(node, "since"):
            return str(_since(node)).lower()
        if _is_named(node, "len"):
            return f"static_cast<std::int64_t>({values[0]}.size())"
        if _is_named(node, "expands"):
            return f"at::is_expandable_to({', '.join(values)})"
        if _is_named(node, "prod"):
            return f"c10::multiply_integers({values[0]})"
        if _is_named(node, "min", "max"):
            return f"std::{ast.unparse(node.func)}<std::int64_t>({', '.join(values)})"
        raise CodeError(f"{ast.unparse(node)} has no translation to C++")


def _is_named(node: ast.Call, *names: str) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in names
