"""The statement of the function that PyTorch code calls: `FUNCTION` of function.py, beside a kernel.py."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import chain
from typing import Any

from .expression import (
    TYPES,
    CodeError,
    Parameter,
    in_cpp,
    is_count,
    is_implied,
    names_in,
    operator_call,
    parse,
    product,
    schema_of,
)
from .manifest import SAME

_PARAMETER = re.compile(r"(?P<type>\w+(\[\d*\])?)(?P<optional>\?)? (?P<name>\w+)(=(?P<default>.+))?")
_SIGNATURE = re.compile(r"(?P<name>\w+)\((?P<parameters>.*)\) -> (?P<results>Tensor|\(Tensor(, Tensor)*\))", re.DOTALL)
_MADE = ("{}_shape", "{}_stride", "at_{}", "stride_{}")
"""Names that the Python launcher makes of a tensor's."""
_KNOWN = frozenset({"torch", "len", "prod", "min", "max", "since", "backend", "expands", "result", "gradient"})
AUTOCAST = ("original", "lower", "float32")
OFFERED = ("also_serve", "build", "explain", "patch", "variants")
"""What a package offers beside its function."""


def resolve(path: str) -> Any:
    """What a package such as PyTorch has by a path such as "torch.nn.Softmax". Raises ValueError."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (AttributeError, ImportError, ValueError):
        raise ValueError(f"there is no {path}") from None


def _faults_in(what: str, texts: Mapping[str, str], known: Collection[str], kind: str) -> Iterator[str]:
    """What is wrong with expressions in a field; known: the names that they may use, each of which is a `kind`."""
    for key, text in texts.items():
        try:
            unknown = [name for name in names_in(text) if name not in known]
        except (SyntaxError, TypeError) as error:
            yield f"`{what}` has for {key!r} {text!r}, which is no expression ({getattr(error, 'msg', 'it is no text')})"
        else:
            yield from (f"`{what}` has for {key!r} {text!r}, and {name!r} is no {kind}" for name in unknown)


def _is_value(default: str | None) -> bool:
    try:
        return default is None or default.startswith("torch.") or ast.literal_eval(default) is not ...
    except (SyntaxError, ValueError):
        return False


@dataclass(frozen=True, kw_only=True)
class Function:
    """How a call of PyTorch's function becomes a launch of the kernel. Expressions are texts, told in expression.py.

    signature: as PyTorch writes one, with its names and defaults: "softmax(Tensor input, int? dim=None) -> Tensor". Types
    are Tensor, int, int[], float, bool, bool[N] (N of them) and ScalarType, with a question mark if None may be given; what
    follows `*` is given by name alone. The function of a backward kernel has parameters by the names of the forward's
    arguments, results and `saved` outputs, a further tensor for each result, which is its gradient, and perhaps a bool[N],
    which says of each tensor of the forward whether its gradient is wanted. The results are these gradients.
    original: PyTorch's function, which has the same signature, by its path, such as "torch.nn.functional.softmax"; or a
    function of function.py. It does every call that no variant serves.
    tensors: by the kernel's input, the argument that it is. An input that has a shape is handed over dense, with its leading
    axes gathered; one without a shape as it lies, for a kernel that takes strides. Its dtype has to be the kernel's for it.
    sizes: by dimension, an expression. Left out: the one size that it has, or the axis of the first input that is always
    there and has it in its shape; calls whose tensors have other axes than the kernel's shapes say are then left to PyTorch.
    options: likewise, by option; one that is left out is the argument of its name that is no tensor, whether the argument of
    its optional input is there, the dtype of the input for which it chooses that, or the kernel's default. One that is a
    text among the kernel's `choices` and compiled in is the place among them, or the dtype.
    fits: by a reason, an expression that is true for calls which a variant may serve. A call is left to PyTorch for the
    first one that is not: in this order, but those that look at no tensor first. Types of arguments are asked before.
    """

    signature: str
    original: str | Callable[..., Any]
    tensors: Mapping[str, str]
    sizes: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    fits: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, str] = field(default_factory=dict)
    """Form of each result, by output of the kernel, in the order of the function's results: the argument that has the same,
    or an expression of its shape. Left out: the outputs that are not optional, of the form of the first argument whose input
    has the output's shape in the kernel, else of their sizes. The result of an optional output is None in calls whose option
    for it is off."""
    saved: tuple[str, ...] = ()
    """Optional outputs that are no results, but what the backward kernel takes: calls that record gradients ask for them."""
    returned: Callable[..., Iterable[Any]] | None = None
    """Gives the `saved` outputs as calls have them that ask for any, by `return_NAME=True`, behind the results: called with
    a list of them in the kernel's shapes, or None where PyTorch serves and they are to be computed; the results; and the
    arguments."""
    operator: str = ""
    """PyTorch's operator, called with arguments of the function, such as "aten.softmax(input, dim)": what the native
    launcher calls and autograd differentiates. Left out: `original` itself, which is called by way of Python."""
    gradients: tuple[str, ...] = ()
    """Output of the kernel, a backward, that is the gradient of each tensor which the forward takes. Left out: the results,
    one for each tensor."""
    gradient: str = ""
    """An operator of PyTorch's that gives the gradient of the first argument from `gradient`, that of the result, `result`
    and the arguments: calls that record gradients are then served from the start. Left out: gradients are PyTorch's
    derivative of the operator, for which it is called again, where `also_serve` asks for that."""
    autocast: str = "original"
    """What autocast makes of a call: "original": PyTorch's function does it; "lower", "float32": tensors are cast."""
    apart: tuple[str, ...] = ()
    """Tensors whose dtype may be another than the kernel states for them, as `fits` says."""
    expanded: Mapping[str, str] = field(default_factory=dict)
    """Shape to which an argument is expanded, an expression by argument; strides that the entry point takes are then 0 along
    axes that are broadcast."""
    call: Mapping[str, str] = field(default_factory=dict)
    """Value of an argument that is no tensor, by argument, an expression over the kernel's dimensions and options: it makes
    the call that is a problem of the kernel. Left out: an option of the argument's name, else the default."""
    served: Mapping[str, str] = field(default_factory=dict)
    """Size that calls have which `fits` lets through, by dimension, in Python over the kernel's dimensions and options,
    where it restricts sizes to each other more than the kernel does."""
    timed: Mapping[str, Any] = field(default_factory=dict)
    """Options of the problems by which variants are timed, where these are not the kernel's defaults."""
    modules: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Modules by class: the class of PyTorch's that each is derived from, and the call that is its forward, of `self` and of
    arguments of the function: {"Softmax": ("torch.nn.Softmax", "softmax(input, self.dim)")}. It stands in for that class,
    unless `original` is a function of function.py: then it has its parameters alone."""
    passes: Mapping[str, str] = field(default_factory=dict)
    """Value that `original` is given in the place of an argument, in Python, by argument. Those that it alone has a use for
    have to be here: {"bias": "bias"}."""
    data_decide: tuple[str, ...] = ()
    """Options that, where they are on, make the time depend on what tensors hold: such problems are raced wherever they
    were measured."""

    def __post_init__(self) -> None:
        if _SIGNATURE.fullmatch(self.signature.strip()) is None:
            raise ValueError(f'signature {self.signature!r} is not like "NAME(TYPE NAME, TYPE NAME=DEFAULT) -> Tensor"')
        for what in ("tensors", "sizes", "options", "fits", "results", "expanded", "call", "served", "timed", "passes"):
            if not isinstance(given := getattr(self, what), Mapping):
                raise ValueError(f"`{what}` is {given!r}: write a dict, by name, as sizes={{'n': 'x.shape[0]'}}")
        if self.autocast not in AUTOCAST:
            raise ValueError(f"autocast is {self.autocast!r}, which is none of {', '.join(AUTOCAST)}")
        parameters = self.parameters
        if not parameters or next(iter(parameters.values())).type != "Tensor":
            raise ValueError(f"the first argument in signature {self.signature!r} is no Tensor")
        for what, name in [("tensors", n) for n in self.tensors.values()] + [("apart", n) for n in self.apart]:
            if name not in parameters or parameters[name].type != "Tensor":
                raise ValueError(f"`{what}` names {name!r}, which is no Tensor in signature {self.signature!r}")
        made = [form.format(name) for name in self.given_tensors for form in _MADE]
        if taken := [name for name in (self.name, *parameters) if name in {*_KNOWN, *made} or self.name in OFFERED]:
            raise ValueError(f"signature {self.signature!r} has the name {taken[0]!r}, which the launchers have already")
        for head in (self.declared, self.positional):
            try:
                ast.parse(f"def {self.name}({head}): pass")
            except SyntaxError as error:
                raise ValueError(f"signature {self.signature!r} is none of Python's: {error.msg}") from None
        for what in ("sizes", "options", "fits", "expanded", "results", "passes"):
            for fault in _faults_in(what, getattr(self, what), {*parameters, *_KNOWN}, "argument of the function"):
                raise ValueError(fault)

    @property
    def name(self) -> str:
        return self.signature.strip().partition("(")[0]

    @property
    def resolved(self) -> Any:
        """The original, as it is now: it may be replaced by ours later. Raises ValueError."""
        return resolve(self.original) if isinstance(self.original, str) else self.original

    @property
    def path(self) -> str:
        """PyTorch's function, as people call it; empty for one of function.py."""
        return self.original if isinstance(self.original, str) else ""

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters by name, in order. Raises ValueError for one that cannot be read."""
        match = _SIGNATURE.fullmatch(self.signature.strip())
        assert match is not None
        found, keyword = dict[str, Parameter](), False
        for text in filter(None, map(str.strip, match["parameters"].split(","))):
            if text == "*":
                keyword = True
                continue
            part = _PARAMETER.fullmatch(text)
            if part is None or re.sub(r"\[\d+\]", "[N]", part["type"]) not in TYPES:
                known = ", ".join(TYPES)
                raise ValueError(f"{text!r} in signature {self.signature!r} is not TYPE NAME, with a type of {known}")
            if part["name"] in found:
                raise ValueError(f"{part['name']!r} is twice in signature {self.signature!r}")
            if not _is_value(part["default"]):
                raise ValueError(f"{text!r} in signature {self.signature!r} has a default that Python cannot read")
            found[part["name"]] = Parameter(part["name"], part["type"], bool(part["optional"]), part["default"], keyword)
        return found

    @property
    def declared(self) -> str:
        """The parameters as Python declares them."""
        found = list[str]()
        for p in self.parameters.values():
            found += ["*"] if p.keyword and "*" not in found else []
            found.append(p.name if p.default is None else f"{p.name}={p.default}")
        return ", ".join(found)

    @property
    def positional(self) -> str:
        """The parameters as a function declares them that takes all by position."""
        return self.declared.replace("*, ", "")

    @property
    def passed(self) -> str:
        """The arguments as Python passes them on, for a call of the function within another one."""
        return ", ".join(f"{name}={name}" if p.keyword else name for name, p in self.parameters.items())

    @property
    def forwards(self) -> Mapping[str, tuple[str, str]]:
        """The arguments of a forward beside `self` and the call that it makes, by class in `modules`."""
        calls = {name: call for name, (_, call) in self.modules.items()}
        own = (self.name, "self")
        return {name: (", ".join(n for n in names_in(call) if n not in own), call) for name, call in calls.items()}

    @property
    def given_tensors(self) -> tuple[str, ...]:
        """The tensors among the arguments, in order."""
        return tuple(p.name for p in self.parameters.values() if p.type == "Tensor")

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Arguments of the operator, as expressions: of PyTorch's where one is named, else all."""
        if not self.operator:
            return tuple(self.parameters)
        return tuple(value for _, value in operator_call(self.operator)[1])


@dataclass(frozen=True)
class Bound:
    """A statement and the kernel that it is of: what both launchers and the judge of variants need of the two together."""

    function: Function
    kernel: Any

    def faults(self) -> Iterator[str]:
        """What in the statement does not fit the kernel, a sentence each."""
        kernel, function = self.kernel, self.function
        inputs = {a.name: a for a in kernel.arguments if a.kind == "input"}
        outputs = {a.name: a for a in kernel.arguments if a.kind == "output"}
        dimensions, options = {d.name for d in kernel.dimensions}, {*kernel.options}
        arguments = function.parameters
        for what, named, known, kind in (
            ("tensors", function.tensors, inputs, "input of the kernel"),
            ("results", function.results, outputs, "output of the kernel"),
            ("sizes", function.sizes, dimensions, "dimension of the kernel"),
            ("options", function.options, options, "option of the kernel"),
            ("served", function.served, dimensions, "dimension of the kernel"),
            ("timed", function.timed, options, "option of the kernel"),
            ("data_decide", function.data_decide, options, "option of the kernel"),
            ("call", function.call, {*arguments} - {*function.tensors.values()}, "argument beside the inputs of the kernel"),
            ("passes", function.passes, arguments, "argument of the function"),
            ("expanded", function.expanded, function.tensors.values(), "argument that is an input of the kernel"),
        ):
            yield from (f"`{what}` names {name!r}, which is no {kind}" for name in sorted({*named} - {*known}))
        of_kernel = {*dimensions, *options, "torch", *dir(builtins)}
        for what, texts in (("call", function.call), ("served", function.served)):
            yield from _faults_in(what, texts, of_kernel, "dimension or option of the kernel")
        yield from self._faults_of_pytorch()
        needed = {"tensors": (n for n, a in inputs.items() if not a.optional and n not in function.tensors)}
        needed["sizes"] = (name for name in sorted(dimensions - {*self.sizes}))
        needed["results"] = (n for n, a in outputs.items() if not a.optional and n not in self.results)
        yield from (f"`{what}` says nothing of the kernel's {name!r}" for what, names in needed.items() for name in names)
        for name, p in function.parameters.items():
            is_told = p.default is not None or name in {*function.call, *dimensions, *options}
            if p.type != "Tensor" and not is_told:
                yield f"`call` says nothing of argument {name!r}, by which a problem of the kernel becomes a call"
        given = {*function.passes}.union(*map(names_in, (*self._texts, *function.passes.values())))
        for name in [n for n in function.parameters if n not in (*given, *function.tensors.values())]:
            where = "name it in `tensors`, `sizes`, `options` or `fits`, or in `passes` if only `original` has a use for it"
            yield f"argument {name!r} has no effect: {where}"
        for name in (n for n, text in self.options.items() if text == n and function.parameters[n].optional):
            yield f"argument {name!r} may be None: say in `options` which value of the kernel's {name!r} that is"
        compiled_in = set(options).intersection(*map(set, kernel.compile_time_dims.values()))
        for name in function.saved:
            if name not in outputs or name not in compiled_in or name in self.results:
                yield f"`saved` names {name!r}, which is no optional output of the kernel that is compiled in and no result"
        if function.returned and not function.saved:
            yield "`returned` gives the outputs in `saved`, which names none"
        stated = function.signature.rpartition("->")[2].count("Tensor")
        if stated != len(self.results):
            yield f"the signature has {stated} results, and `results` {len(self.results)}: {', '.join(self.results)}"
        if not self.together and len({*chain(*kernel.dtypes.values())}) > 1:
            yield "no tensor among the arguments has the kernel's dtype, by which a variant is chosen, and there are several"
        forms = (text for text in self.results.values() if text not in function.given_tensors)
        for expressions, kinds in (
            (self.sizes.values(), ("int", "bool")),
            (self.options.values(), ("int", "float", "bool", "ScalarType")),
            ((f"not ({text})" for text in self._fits.values()), ("bool",)),
            ((*forms, *function.expanded.values()), ("int[]",)),
        ):
            for text in expressions:
                try:
                    in_cpp(text, function.parameters, *kinds)
                except CodeError as error:
                    yield f"in the expression {text.removeprefix('not ')!r} {error}"

    def _faults_of_pytorch(self) -> Iterator[str]:
        """What in the statement does not fit PyTorch."""
        function, arguments = self.function, self.function.parameters
        keywords = {name: name for name, p in arguments.items() if p.keyword}
        try:
            original = function.resolved
            with suppress(ValueError):  # one that is not written in Python has no signature
                inspect.signature(original).bind(*(name for name in arguments if name not in keywords), **keywords)
        except (TypeError, ValueError) as error:
            yield f"`original` is {function.original!r}, which does not take the arguments of the signature ({error})"
        of_backward = {name: Parameter(name, "Tensor", False, None, False) for name in ("gradient", "result")}
        for what, text, names in (
            ("operator", function.operator, arguments), ("gradient", function.gradient, {**arguments, **of_backward}),
        ):  # fmt: skip
            try:
                _ = text and schema_of(text, names)
            except (SyntaxError, ValueError) as error:
                yield f"`{what}` is {text!r}, which is no call of an operator of PyTorch's: {error}"
                return
        yield from (f"`operator` is given {n!r}, which is no argument" for n in function.operands if n not in arguments)
        for name, (path, call) in function.modules.items():
            try:
                forward = inspect.signature(resolve(path).forward).parameters
            except (AttributeError, TypeError, ValueError):
                yield f"`modules` has for {name!r} {path!r}, which is no class of modules"
                continue
            known, kind = forward if function.path else arguments, f"forward of {path}" if function.path else "function"
            yield from _faults_in("modules", {name: call}, {"self", *known, function.name}, f"parameter of the {kind}")
            keys = [k.arg for n in ast.walk(parse(call)) if isinstance(n, ast.Call) for k in n.keywords]
            wrong = [key for key in keys if key not in arguments]
            yield from (f"`modules` has for {name!r} {call!r}, and {key!r} is no argument of the function" for key in wrong)

    @property
    def first(self) -> str:
        """The tensor whose device and dtype choose a variant."""
        return next(iter(self.together), self.function.given_tensors[0])

    @property
    def problem_dtype(self) -> str:
        """An expression of the kernel's dtype: that of the first tensor that has it, or the only one there is."""
        return f"{self.first}.dtype" if self.together else f"torch.{next(chain(*self.kernel.dtypes.values()))}"

    @property
    def together(self) -> tuple[str, ...]:
        """Tensors that have the kernel's dtype."""
        return tuple(name for name in self.function.given_tensors if name not in self.apart)

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """Tensors whose dtype may be another than that of the first, in the order of the arguments."""
        inputs = (a for a in self.kernel.arguments if a.kind == "input" and a.dtype != "problem")
        own = {self.function.tensors.get(a.name) for a in inputs}
        return tuple(name for name in self.function.given_tensors if name in {*self.function.apart, *own})

    @cached_property
    def looked_at(self) -> tuple[str, ...]:
        """Arguments that choose or make the result, in order: all but those that `original` alone knows a use for."""
        used = {name for text in self._texts for name in names_in(text)}
        used |= {*self.function.given_tensors, *self.function.operands}
        return tuple(name for name in self.function.parameters if name in used)

    @property
    def _texts(self) -> tuple[str, ...]:
        """The expressions that decide whether a variant serves a call, and what it computes."""
        function = self.function
        stated = (self.sizes, self.options, {**self._axes, **function.fits}, self.results, function.expanded)
        return tuple(text for texts in stated for text in texts.values())

    @cached_property
    def sizes(self) -> Mapping[str, str]:
        """`Function.sizes`, with what is left out of it."""
        found = dict(self.function.sizes) | {
            d.name: str(d.low) for d in self.kernel.dimensions if d.low == d.high and d.name not in self.function.sizes
        }
        for name, shape in self._shaped.items():
            for axis, d in enumerate(() if self.function.parameters[name].optional else shape):
                if isinstance(d, str):
                    found.setdefault(d, f"{name}.shape[{axis}]")
        return found

    @property
    def _shaped(self) -> Mapping[str, tuple[str | int, ...]]:
        """The shapes that the kernel states for arguments that are handed over as they are, in the order of its inputs."""
        given = {a.name: a.shape for a in self.kernel.arguments if a.shape}
        handed = ((name, given.get(of, ())) for of, name in self.inputs.items() if name not in self.function.expanded)
        return {name: shape for name, shape in handed if shape}

    @cached_property
    def _by_axis(self) -> Mapping[str, tuple[str | int, ...]]:
        """The `_shaped` that have a dimension which `Function.sizes` leaves out: their axes are those of the kernel."""
        derived = self.sizes.keys() - self.function.sizes.keys()
        return {name: shape for name, shape in self._shaped.items() if {*shape} & derived}

    @cached_property
    def _axes(self) -> Mapping[str, str]:
        """Conditions, by what is told where one is not true: tensors `_by_axis` have the shapes that kernel.py states."""
        counts, alike = dict[str, str](), dict[str, str]()
        for name, shape in self._by_axis.items():
            given = f"{name} is None or " if self.function.parameters[name].optional else ""
            counts[f"{name} has not {len(shape)} axes"] = f"{given}{name}.ndim == {len(shape)}"
            for axis, d in enumerate(shape):
                if (place := f"{name}.shape[{axis}]") != (size := self.size(d)):
                    alike[f"axis {axis} of {name} is not {d}"] = f"{given}{place} == {size}"
        return {**counts, **alike}

    @cached_property
    def options(self) -> Mapping[str, str]:
        """`Function.options`, with those that are an argument of their name, or the dtype of one."""
        found = dict(self.function.options)
        for p in self.function.parameters.values():
            if p.name in self.kernel.options and p.type != "Tensor":
                found.setdefault(p.name, p.name)
        for dtype in self.kernel.choices:
            if taking := self._taking(dtype):
                text = self._named(self.kernel.options[dtype])
                for name in reversed(taking):
                    optional = self.function.parameters[name].optional
                    text = f"{name}.dtype if {name} is not None else {text}" if optional else f"{name}.dtype"
                found.setdefault(dtype, text)
        return found

    def _taking(self, dtype: str) -> tuple[str, ...]:
        """Arguments whose dtype an option chooses, in the order of the kernel's inputs."""
        inputs = (a.name for a in self.kernel.arguments if a.kind == "input" and a.dtype == dtype)
        return tuple(self.function.tensors[name] for name in inputs if name in self.function.tensors)

    @property
    def may_be_refused(self) -> bool:
        """Whether variants take tensors of several floating-point dtypes, of which PyTorch's function may take one alone."""
        return bool(self.function.path) and any(SAME in texts for texts in self.kernel.choices.values())

    def _named(self, dtype: str) -> str:
        """An expression of a dtype by its name among `Kernel.choices`."""
        return self.problem_dtype if dtype == SAME else f"torch.{dtype}"

    def dtype(self, argument: Any) -> str:
        """An expression of the dtype of a tensor argument of the entry point."""
        opmath = f"torch.float64 if {self.problem_dtype} == torch.float64 else torch.float32"
        known = {**self.options, "problem": self.problem_dtype, "opmath": opmath}
        stated: str = argument.dtype
        return f"({known.get(stated) or self._named(self.kernel.options.get(stated, stated))})"

    def fits(self, *, of_tensors: bool) -> Mapping[str, str]:
        """The conditions that look at tensors, or those that do not, which cost less and are asked first."""
        tensors = {*self.function.given_tensors}
        return {r: text for r, text in self._fits.items() if bool(tensors & {*names_in(text)}) is of_tensors}

    @cached_property
    def _fits(self) -> Mapping[str, str]:
        """`Function.fits`, and that each tensor has the dtype that the kernel states for it, and as many elements as its
        sizes say, where that does not follow from `fits` and `sizes`: the kernel would read or write beyond it. One that has
        the kernel's shape of an input before it has to have that one's shape."""
        tensors, stated = self.function.given_tensors, self.function.fits
        optional = {name for name in tensors if self.function.parameters[name].optional}
        needed = (self.inputs.get(a.name) for a in self.kernel.arguments if not a.optional)
        found = {f"{name} is None": f"{name} is not None" for name in needed if name in optional}
        alike = dict[tuple[str | int, ...], str]()
        found |= {**self._axes, **stated}
        for a in self.kernel.arguments:
            name, dtype = self.function.tensors.get(a.name, ""), self.dtype(a)
            given = f"{name} is None or " if name in optional else ""
            own = name in names_in(dtype) and name == next(iter(self._taking(a.dtype)), name)  # the option is its dtype
            if name in self.apart and name not in self.function.apart and not own:
                found[f"{name} is not of the dtype that the kernel takes"] = f"{given}{name}.dtype == {dtype}"
            if a.dtype in self.kernel.choices and a.dtype in self.options:
                texts = self.kernel.choices[a.dtype]
                listed = "".join(f"{self._named(text)}, " for text in texts)
                found[f"{a.dtype} is none of {', '.join(texts)}"] = f"{dtype} in ({listed})"
            other = alike.setdefault(a.shape, name) if a.kind == "input" and name not in optional else name
            form, sizes = self.results.get(a.name, name if a.shape else ""), [*map(self.size, a.shape)]
            is_told = form in self._by_axis and (a.kind == "input" or not self.function.results)
            if form and not is_told and not is_count(form, sizes, tensors, [*self._axes.values(), *stated.values()]):
                count = f"{form}.numel()" if form in tensors else f"prod({form})"
                reason = f"{name or f'the result {a.name}'} has not as many elements as the kernel's {a.name}"
                if other == name:
                    found[reason] = f"{given}{count} == {product(sizes)}"
                else:  # PyTorch's function may broadcast one to the other
                    found[f"{name} has not the shape of {other}"] = f"{name}.shape == {other}.shape"
        return found

    @cached_property
    def results(self) -> Mapping[str, str]:
        """`Function.results`, with what is left out of it."""
        if self.function.results:
            return self.function.results
        shapes = [*self._shaped.items()]
        alike = {shape: name for name, shape in reversed(shapes) if not self.function.parameters[name].optional}
        outputs = [a for a in self.kernel.arguments if a.kind == "output" and not a.optional]
        of_sizes = {a.name: f"({''.join(f'{self.size(d)}, ' for d in a.shape)})" for a in outputs}
        return {a.name: alike.get(a.shape) or (of_sizes[a.name] if shapes else self.first) for a in outputs}

    @cached_property
    def strided(self) -> tuple[str, ...]:
        """Tensors of the entry point that lie as they lie, since it takes their strides."""
        return tuple(dict.fromkeys(a.stride_of[0] for a in self.kernel.arguments if a.stride_of is not None))

    @cached_property
    def inputs(self) -> Mapping[str, str]:
        """Arguments that are handed over, by the input that each is, in the order of the entry point."""
        names = (a.name for a in self.kernel.arguments if a.kind == "input")
        return {name: self.function.tensors[name] for name in names if name in self.function.tensors}

    def is_optional(self, output: str) -> bool:
        """Whether a call may ask for an output or not."""
        return any(a.name == output and a.optional for a in self.kernel.arguments)

    def is_gathered(self, name: str) -> bool:
        """Whether an input has a shape of the kernel's own, to which the axes of its argument are gathered."""
        return any(a.name == name and a.shape for a in self.kernel.arguments)

    def is_made_dense(self, name: str) -> bool:
        """Whether an input that lies otherwise is copied, since no condition refuses it."""
        given, fits = self.inputs[name], self.function.fits.values()
        return self.is_gathered(name) and not any(is_implied(f"{given}.is_contiguous()", text, given) for text in fits)

    def size(self, name: str | int) -> str:
        """An expression of a dimension, a number, or an option that is compiled in."""
        if isinstance(name, int):
            return str(name)
        function, choices = self.function, self.kernel.choices.get(name, ())
        if text := self.sizes.get(name) or self.options.get(name):
            if not any(a.dtype == name for a in self.kernel.arguments):
                return text
            places = (f"{place} if ({text}) == {self._named(dtype)} else " for place, dtype in enumerate(choices))
            return "".join(places) + "0"
        if name in function.tensors:
            return f"{function.tensors[name]} is not None"
        is_output = any(a.name == name for a in self.kernel.arguments)
        return str(self.kernel.number_of(name, False if is_output else self.kernel.options[name]))

    def passed_to(self, backward: Bound) -> Mapping[str, str]:
        """What autograd gives each parameter of the function of the backward kernel: an argument, a result or a saved output
        of this one, `gradient_` before the name of a result, or `wanted`. Raises ValueError where a parameter is none."""
        own, found = backward.function, dict[str, str]()
        gradients = iter([f"gradient_{name}" for name in self.results])
        for name, p in own.parameters.items():
            if name in {*self.function.parameters, *self.results, *self.function.saved}:
                found[name] = name
            elif p.type == "Tensor" and (gradient := next(gradients, "")):
                found[name] = gradient
            elif p.type == f"bool[{len(self.function.given_tensors)}]":
                found[name] = "wanted"
            else:
                raise ValueError(f"parameter {name!r} is neither an argument nor a saved output of {self.function.name}")
        if len(backward.gradients) != len(self.function.given_tensors) or {*backward.gradients} != {*backward.results}:
            raise ValueError(f"its results are not the gradients of the tensors that {self.function.name} takes")
        return found

    @property
    def gradients(self) -> tuple[str, ...]:
        """`Function.gradients`, with what is left out of it."""
        return self.function.gradients or tuple(self.results)

    def kept(self, backward: Bound | None) -> tuple[str, ...]:
        """Results that are kept for the gradients: the one that a formula takes, or else those that the backward takes,
        which no argument has the name of."""
        if self.function.gradient:
            return tuple(self.results)
        own = {*self.results} - {*self.function.parameters}
        return () if backward is None else tuple(name for name in self.passed_to(backward).values() if name in own)

    def number(self, name: str) -> str:
        """An expression of an option that is a number which the entry point takes."""
        return self.options.get(name) or repr(self.kernel.options[name])
