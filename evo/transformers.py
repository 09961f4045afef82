"""Models of Hugging Face's Transformers with evo's norms, additions before norms, and attention: `evo.ready.patch(model)`.

No list of models is kept. What a class does is read from the source of its forward, in any version: a norm says one of
_FORMS; `x = a + b; residual = x; x = self.norm(x)` in a block becomes `x, residual = self.norm(a, b)`, which norms made here
take; and attention is Transformers' own function for "sdpa" with one name in it changed. What says something else stays.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from importlib import import_module
from typing import Any

import torch

import evo.ready
from evo.runtime import Patch

ATTENTION = "evo"
"""What Transformers calls the attention (`attn_implementation`)."""
_ROOTS = ("transformers", "transformers_modules")  # the second has code that comes with a model
_CAST = """\
input_dtype = x.dtype
x = x.to(torch.float32)
variance = x.pow(2).mean(-1, keepdim=True)
x = x * torch.rsqrt(variance + self.EPS)
return {}"""
_CALLED = """\
output = self._norm(x.float())
output = output * {}
return output.type_as(x)
return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.EPS)"""
_FORMS = {
    _CAST.format("self.weight * x.to(input_dtype)"): (False, True),
    _CAST.format("(self.weight * x).to(input_dtype)"): (False, False),
    _CAST.format("(self.weight.to(torch.float32) * x).to(input_dtype)"): (False, False),
    _CALLED.format("self.weight.float()"): (False, False),
    _CALLED.format("(1.0 + self.weight.float())"): (True, False),
}
"""What an RMS norm's forward, and its `_norm`, may say. Whether 1 is added to the weight, and whether the result has the
dtype of the product with the weight, else the input's. The first rounds before that product, too, and ours does not."""
_SDPA = "torch.nn.functional.scaled_dot_product_attention"


def patch(model: torch.nn.Module) -> Patch:
    """Has a model use evo's functions until `undo` of what is returned, whose text tells what was replaced and what was not,
    and why. Other models of the process stay as they are, but for the attention of those with the same configuration object.
    Copies and pickles of a patched model are patched for good. Hooks of a norm that has got an addition are given both terms
    and both results."""
    done, modules = Patch(), [*model.modules()]
    for module in modules:
        cls: Any = type(module)
        if _is_theirs(module) and (norm := _rms_norm(cls)) is not None:
            done.exchange(module, norm)
    for module in modules:
        if _is_theirs(module):
            _fuse(module, done)
    _attend(modules, done)
    return done


def _is_theirs(module: torch.nn.Module) -> bool:
    """Whether a module does what its class of Transformers says. One with a forward of its own has hooks of accelerate's or
    a kernel of the Hub's."""
    return type(module).__module__.partition(".")[0] in _ROOTS and "forward" not in vars(module)


def _offered(name: str) -> Any:
    """A function or module that is shipped; None if it is not."""
    return getattr(evo.ready, name, None)


# -- classes ----------------------------------------------------------------------------------------------------------------


class _Made(torch.nn.Module):
    """A module whose class was made here: its pickle holds what the class is made from."""

    _of: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        return (_remade, self._of, *made[2:])


def _remade(make: Callable[..., type], *of: Any) -> Any:
    if "transformers" in sys.modules:
        _register()
    made: Any = make(*of)
    return made.__new__(made)


def _derived(forward: Callable[..., Any], make: Callable[..., Any], parent: type, *of: Any) -> type:
    """A class with this forward, under its parent's name, since rules for sharding go by names."""
    body = {"forward": forward, "_of": (make, parent, *of), "__module__": __name__, "__doc__": parent.__doc__}
    return type(parent.__name__, (_Made, parent), body)


@cache
def _rms_norm(parent: type) -> type | None:
    """For an RMS norm of a known form, a class that takes a sum's two terms, too; None for another class."""
    found, rms_norm, add_rms_norm = _form(parent), _offered("rms_norm"), _offered("add_rms_norm")
    if found is None or rms_norm is None:
        return None
    eps, centred, promotes = found

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        weight = self.weight.float() + 1.0 if centred else self.weight
        if residual is None:
            y, total = rms_norm(x, weight.shape, weight, getattr(self, eps)), x
        else:
            y, total = add_rms_norm(x, residual, weight, getattr(self, eps))
        if weight.dtype is not total.dtype or y.dtype is not total.dtype:
            y = y.to(torch.promote_types(weight.dtype, total.dtype) if promotes else total.dtype)
        return y if residual is None else (y, total)

    return _derived(forward, _rms_norm, parent)


@cache
def _layer_norm(parent: type) -> type:
    """A LayerNorm over the last dimension that takes a sum's two terms, too."""
    single, add_layer_norm = parent.forward, _offered("add_layer_norm")  # type: ignore[attr-defined]

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return single(self, x)
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    return _derived(forward, _layer_norm, parent)


# -- additions before norms -------------------------------------------------------------------------------------------------


def _fuse(block: torch.nn.Module, done: Patch) -> None:
    """Has a block hand both terms of a sum to the norm that comes right after."""
    norms = {name: norm for name, child in block.named_children() if (norm := _adding(child)) is not None}
    if not norms:
        return
    cls: Any = type(block)
    title, read = cls.__name__, _block(cls, frozenset(norms))
    if isinstance(read, str):
        done.left[f"additions in {title}: {read}"] += 1
        return
    made, fused = read
    for name, norm in norms.items():
        if name not in fused:
            done.left[f"the addition before {title}.{name}: none is right before it in {title}.forward"] += 1
            continue
        done.replaced[f"the addition before {title}.{name}"] += 1
        child = getattr(block, name)
        if norm is not type(child):
            done.exchange(child, norm, count=False)
    if made is not None:
        done.exchange(block, made, count=False)


def _adding(norm: Any) -> type | None:
    """The class of a norm that takes two terms; None if it cannot."""
    cls: Any = type(norm)
    make = cls._of[0] if isinstance(norm, _Made) else None
    if "forward" in vars(norm):
        return None
    if make is _rms_norm:
        return cls if _offered("add_rms_norm") is not None else None
    plain = cls in (torch.nn.LayerNorm, _offered("LayerNorm")) and len(norm.normalized_shape) == 1
    if make is _layer_norm or (plain and _offered("add_layer_norm") is not None):
        return cls if make is _layer_norm else _layer_norm(cls)
    return None


@cache
def _block(parent: type, norms: frozenset[str]) -> tuple[type | None, frozenset[str]] | str:
    """The class of a block, and which of its norms take sums there (None if none does); or why its forward was not read."""
    try:
        tree, function = _parsed(parent.forward)  # type: ignore[attr-defined]
        fusing = _Fusing(tree.args.args[0].arg, norms)
        fusing.visit(tree)
        made = None
        if fusing.fused:
            made = _derived(_run(tree, function), _made_block, parent, norms)
        return made, frozenset(fusing.fused)
    except _Unread as error:
        return str(error)


def _made_block(parent: type, norms: frozenset[str]) -> type:
    found = _block(parent, norms)
    if isinstance(found, str) or found[0] is None:
        raise TypeError(f"{parent.__name__} was patched in another version of Transformers: load the model's state_dict")
    return found[0]


class _Fusing(ast.NodeTransformer):
    """Statements of a forward in which norms get both terms of a sum."""

    def __init__(self, own: str, norms: frozenset[str]) -> None:
        self._own, self._norms = own, norms
        self.fused = set[str]()

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, field, None), list):
                setattr(node, field, self._statements(statements))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`self.norm(a + b)`, of which the norm alone is used."""
        self.generic_visit(node)
        if self._is_norm(node) and isinstance(total := node.args[0], ast.BinOp) and isinstance(total.op, ast.Add):
            return ast.Subscript(self._normed(node, total), ast.Constant(0), ast.Load())
        return node

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        for at in reversed(range(len(body))):
            match body[at]:
                case ast.Assign([ast.Name(name)], ast.BinOp(op=ast.Add()) as total):
                    body = body[:at] + self._rewritten(name, total, body[at:])
        return body

    def _rewritten(self, name: str, total: ast.BinOp, body: list[ast.stmt]) -> list[ast.stmt]:
        """body: begins with NAME = TOTAL. Perhaps `if OTHER is None: ...` and `RESIDUAL = NAME` follow, then
        `NAME = self.norm(NAME)`."""
        first, *rest = body
        between = rest.pop(0) if rest and isinstance(rest[0], ast.If) and _asks_for_none(rest[0], but=name) else None
        kept: ast.Name | None = None
        match rest:
            case [ast.Assign([ast.Name() as kept], ast.Name(same)), ast.Assign([ast.Name(y)], ast.Call() as call), *_]:
                length = 2
            case [ast.Assign([ast.Name(y)], ast.Call() as call), *_]:
                same, length = name, 1
            case _:
                return body
        if not (same == y == name and self._is_norm(call) and ast.unparse(call.args[0]) == name):
            return body
        value: ast.expr = self._normed(deepcopy(call), total)
        target: ast.expr = ast.Name(name, ast.Store())
        if kept is None:
            value = ast.Subscript(value, ast.Constant(0), ast.Load())
        else:
            target = ast.Tuple([target, ast.Name(kept.id, ast.Store())], ast.Store())
        fused: list[ast.stmt] = [ast.Assign([target], value)]
        if isinstance(between, ast.If):
            apart = self._statements(deepcopy([first, *between.body, *rest[:length]]))
            fused = [ast.If(between.test, apart, fused)]
        return fused + rest[length:]

    def _is_norm(self, call: ast.Call) -> bool:
        match call:
            case ast.Call(ast.Attribute(ast.Name(own), name), [_], []):
                return own == self._own and name in self._norms
        return False

    def _normed(self, call: ast.Call, total: ast.BinOp) -> ast.Call:
        assert isinstance(call.func, ast.Attribute)
        self.fused.add(call.func.attr)
        call.args = [total.left, total.right]
        return call


def _asks_for_none(node: ast.If, but: str) -> bool:
    match node:
        case ast.If(ast.Compare(ast.Name(name), [ast.Is() | ast.IsNot()], [ast.Constant(None)]), _, []):
            return name != but
    return False


# -- attention --------------------------------------------------------------------------------------------------------------


def _attend(modules: list[torch.nn.Module], done: Patch) -> None:
    """Has the configurations of models that ask for "sdpa" ask for ours."""
    theirs = sys.modules.get("transformers.modeling_utils")
    models = [m for m in modules if theirs is not None and isinstance(m, theirs.PreTrainedModel)]
    configs = {id(m.config): m.config for m in models}.values()
    for config in configs:
        title = f"attention of {type(config).__name__}"
        asked = getattr(config, "_attn_implementation_internal", None)
        of: list[Any] = [type(m) for m in models if m.config is config]
        if asked == ATTENTION:
            continue
        reasons = [f"it is {asked!r}, not 'sdpa'" if asked != "sdpa" else "", *(_fixed(cls) for cls in of), _register()]
        if reason := next(filter(None, reasons), ""):
            done.left[f"{title}: {reason}"] += 1
            continue
        config._attn_implementation_internal = ATTENTION
        done.callback(_ask_again, config, asked)
        done.replaced[title] += 1


def _ask_again(config: Any, asked: str) -> None:
    if config._attn_implementation_internal == ATTENTION:
        config._attn_implementation_internal = asked


@cache
def _fixed(cls: Any) -> str:
    """Why a model cannot be given another attention; empty if it can."""
    if not getattr(cls, "_can_set_attn_implementation", lambda: False)():
        return f"{cls.__name__} does not ask Transformers for its attention"
    try:
        source = inspect.getsource(sys.modules[cls.__module__])
    except (OSError, KeyError, TypeError):
        return f"the source of {cls.__name__} cannot be read"
    by_name = re.search(r"_attn_implementation\s*(==|!=|in|not in)\s.*[\"']sdpa[\"']", source)
    return f"{cls.__name__} asks whether it is 'sdpa'" if by_name else ""


@cache
def _register() -> str:
    """Makes our attention known to Transformers. Empty, or why not."""
    if (ours := _offered("scaled_dot_product_attention")) is None:
        return "no attention is shipped"
    try:
        masks = import_module("transformers.masking_utils")
        functions: Any = import_module("transformers.modeling_utils").AttentionInterface
        theirs = functions._global_mapping["sdpa"]
        mask = masks.AttentionMaskInterface._global_mapping["sdpa"]
        tree, function = _parsed(theirs)
    except (ImportError, AttributeError, KeyError, _Unread) as error:
        return f"this version of Transformers has no interface for attention that is known here ({error})"
    places = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) == _SDPA]
    if len(places) != 1:
        return f"Transformers' function for it calls {_SDPA} {len(places)} times"
    _Renamed(places[0]).visit(tree)
    try:
        functions.register(ATTENTION, _run(tree, function, _evo_attention=ours))
    except _Unread as error:
        return str(error)
    masks.AttentionMaskInterface.register(ATTENTION, mask)
    return ""


class _Renamed(ast.NodeTransformer):
    def __init__(self, place: ast.AST) -> None:
        self._place = place

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name("_evo_attention", ast.Load()) if node is self._place else self.generic_visit(node)


# -- sources ----------------------------------------------------------------------------------------------------------------


class _Unread(Exception):
    """Why a function's source says nothing."""


def _parsed(function: Any) -> tuple[ast.FunctionDef, Any]:
    """The source of a function, with its decorators, and the function that these have got. Raises _Unread."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        # Wrappers of Transformers' own are decorators, and what its classes do to the forward of a derived class.
        if (by := function.__globals__["__name__"]).partition(".")[0] not in _ROOTS:
            raise _Unread(f"its forward was wrapped by {by}")
        function = inner
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise _Unread(f"the source of its forward cannot be read ({error})") from None
    if not isinstance(tree, ast.FunctionDef) or function.__code__.co_freevars:
        raise _Unread("its forward is bound to more than its arguments")
    return tree, function


def _run(tree: ast.FunctionDef, function: Any, **more: Any) -> Any:
    """A function with this source where the other one is from; more: what else it knows by name. Raises _Unread."""
    around = ast.parse(f"def _with({', '.join(more)}): return {tree.name}")
    around.body[0].body.insert(0, tree)  # type: ignore[attr-defined]
    text = ast.unparse(ast.fix_missing_locations(around))
    file = f"<{function.__module__}.{function.__qualname__}, by evo>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = dict[str, Any]()
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    try:
        exec(compile(text, file, "exec", flags, dont_inherit=True), function.__globals__, names)
        made = names["_with"](**more)
    except Exception as error:  # of a decorator, which is anybody's
        raise _Unread(f"its forward cannot be made again ({type(error).__name__}: {error})") from None
    made.__qualname__ = function.__qualname__
    return made


@cache
def _form(cls: Any) -> tuple[str, bool, bool] | None:
    """The attribute that is an RMS norm's eps, and what _FORMS has; None for another class."""
    try:
        text = "\n".join(_body(getattr(cls, name)) for name in ("forward", "_norm") if hasattr(cls, name))
    except _Unread:
        return None
    for eps in ("variance_epsilon", "eps"):
        if (found := _FORMS.get(text.replace(f"self.{eps})", "self.EPS)"))) is not None:
            return eps, *found
    return None


def _body(function: Any) -> str:
    """The statements of a method of one argument, which is called x. Raises _Unread."""
    tree, _ = _parsed(function)
    if len(tree.args.args) != 2 or tree.decorator_list:
        raise _Unread("it is no method of one argument")
    given = tree.args.args[1].arg
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == given:
            node.id = "x"
    documented = ast.get_docstring(tree) is not None
    return "\n".join(map(ast.unparse, tree.body[documented:]))
