"""The Python launcher of a function that a kernel states (statement.py), and all that a package offers beside it.

From function.py of a kernel's folder a module is made, as somebody would write it for one kernel alone: the function, its
modules, `explain`, `patch`, `also_serve`, what torch.compile sees, gradients. Its code is text that is compiled when the
package is imported, so that a call costs what its conditions cost and no more. native_code.py writes the same of the native
launcher; judged.py has the calls by which variants are judged.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from math import prod
from struct import pack
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from . import frontend as shared
from .dispatch import BACKENDS, Dispatch
from .expression import NO_VALUE, TYPES, in_python, locals_of, names_in, strides_in
from .judged import Judge
from .native import ALL, NONE, PAY, Native
from .native_code import native_code
from .package import BACKWARD, Package
from .statement import OFFERED, Bound, Function, resolve


def frontend_of(package: Package) -> ModuleType:
    """The module with what a package offers: its frontend.py if somebody has written one, else what follows from the
    statement in its function.py."""
    name = f"{package.name}.frontend"
    if package.path("frontend.py").is_file():
        return import_module(name)
    function: Function = import_module(f"{package.name}.function").FUNCTION
    kernel = import_module(f"{package.name}.kernel").KERNEL
    package.complete(kernel)
    found = sys.modules[name] = ModuleType(name, f"`{function.name}`, as function.py states it.")
    try:
        _Launcher(package, kernel, function, found).fill()
    except BaseException:
        del sys.modules[name]
        raise
    return found


class _Launcher:
    """Fills the module of one function."""

    def __init__(self, package: Package, kernel: Any, function: Function, module: ModuleType) -> None:
        self._package, self._module, self._bound = package, module, Bound(function, kernel)
        self._kernel, self._function, self._parameters = kernel, function, function.parameters
        self._order = [d["name"] for d in package.dimensions]
        self._backward: Any = None
        """The module of the package within this one that computes gradients, if there is one that is stated, too."""
        if package.path(f"{BACKWARD}/manifest.json").is_file():
            found = import_module(f"{package.name}.{BACKWARD}").frontend
            self._backward = found if hasattr(found, "BOUND") else None

    def fill(self) -> None:
        function, m = self._function, self._module
        original: Any = function.resolved
        text = "\n\n".join(self._parts())
        file = f"<{m.__name__}, of function.py>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        vars(m).update(shared=shared, torch=torch, PACKAGE=self._package, _pytorchs=original, ALL=ALL, **_CONSTANTS)
        vars(m)["_returned"] = function.returned
        recording = ALL if function.gradient else PAY if self._backward is not None else NONE
        vars(m).update(BOUND=self._bound, _backward=self._backward, _call=None, _in_graphs=False, _recording=recording)
        self._package.unasked = frozenset(function.saved)
        m.DISPATCH = Dispatch(self._package, m)  # type: ignore[attr-defined]
        m.DISPATCH.also_serve(more=self._backward is not None)
        exec(compile(text, file, "exec"), vars(m))
        takes_all = not any(p.keyword for p in self._parameters.values())
        if self._bound.may_be_refused:
            takes_all, vars(m)["_original"] = False, shared.of_any_dtypes(vars(m)["_original"])
        m.ORIGINAL = original if takes_all else vars(m)["_original"]  # type: ignore[attr-defined]
        own: FunctionType = getattr(m, function.name)
        own.__doc__ = f"As {function.path or original.__name__}, for every input."
        if function.returned:
            asked = " or ".join(f"return_{name}=True" for name in function.saved)
            own.__doc__ += f" {asked}: that, too, behind the results and without a gradient."
        if isinstance(original, BuiltinFunctionType):  # torch.jit.script has PyTorch's in its place
            torch.jit._builtins._register_builtin(own, f"aten::{original.__name__}")
        else:
            own.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]
        classes = {}
        for name, (parent, _) in function.modules.items():
            theirs = resolve(parent)
            ours = type(name, (theirs,), {"forward": getattr(m, f"_forward_{name}"), "__module__": m.__name__})
            ours.__doc__ = f"As {parent}: same constructor, parameters and state_dict."
            if function.path:
                classes[theirs] = ours
            else:
                ours.__doc__ += f" Its forward takes the tensors of {function.name} and gives its results."
            setattr(m, name, ours)
        judge = Judge(self._package, self._bound, m)
        vars(m).update(exact=judge.exact, comparable=judge.comparable, cases=judge.cases, timed=judge.timed)
        vars(m).update(served_sizes=judge.served_sizes, ties=judge.ties, DATA_DECIDE=function.data_decide)
        vars(m).update(same_in_any_batch=judge.same_in_any_batch, by_variant=judge.by_variant, large_batch=judge.large_batch)
        pair = None if self._backward is None else (self._backward.BOUND, self._backward.PACKAGE)
        code = native_code(self._bound, self._package, pair)
        by_python = None if function.operator else vars(m)["_of_looked_at"]
        gradients = None if self._backward is None else self._backward.DISPATCH
        m.NATIVE = Native(  # type: ignore[attr-defined]
            m.DISPATCH, function.name, vars(m)["_fake"], partial(_use, m), gradients, source=code, original=by_python
        )
        m.patch = _patch_of(m, function, classes)  # type: ignore[attr-defined]
        m.also_serve, m.build = partial(_also_serve, m), partial(_build, m)  # type: ignore[attr-defined]
        m.also_serve.__doc__, m.build.__doc__ = _also_serve.__doc__, _build.__doc__
        m.variants = m.DISPATCH.variants  # type: ignore[attr-defined]
        m.__all__ = sorted({function.name, *function.modules, *OFFERED})  # type: ignore[attr-defined]

    # -- the text -------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[str]:
        function = self._function
        names, looked = ", ".join(self._parameters), ", ".join(self._bound.looked_at)
        original = f"_pytorchs({', '.join(self._passed())})"
        flags = [f"return_{name}" for name in function.saved if function.returned]
        asked, told = " or ".join(flags), "".join(f", {flag}=False" for flag in flags)
        declared, more, rest = function.declared, "", ""
        if self._takes_more():
            declared = declared.replace("*, ", "*_more, ") if "*, " in declared else f"{declared}, *_more"
            rest = ", **_named"
            places = ", ".join(name for name, p in self._parameters.items() if not p.keyword)
            named = "".join(f"{name}={name}, " for name, p in self._parameters.items() if p.keyword)
            more = f"    if _more or _named:\n        return _pytorchs({places}, *_more, {named}**_named)\n"
        if flags:
            found = f"_with_saved(({', '.join(flags)},), {names}{rest and f', *_more{rest}'})"
            more = f"    if {asked}:\n        return {found}\n{more}"
        yield f"""\
def {function.name}({declared}{told}{rest}):
{more}    if _is_compiling():
        _found = _compiled({names})
    elif _call is not None:
        _found = _call({looked})
    else:
        _found = served(DISPATCH, {names})
    return {original} if _found is None else _found"""
        positional = function.positional
        yield f"""\
def SUBJECT({positional}):
    return {function.name}({function.passed})"""
        yield f"""\
def _original({positional}):
    return {original}"""
        yield f"def _of_looked_at({looked}):\n    return _original({', '.join(f'{n}={n}' for n in self._bound.looked_at)})"
        yield f"""\
def explain({positional}{told}):
    \"\"\"Which way such a call takes here and now: "variant 0 (...)", or "PyTorch: " and the reason.\"\"\"
    if _is_compiling():
        return "within torch.compile: PyTorch's operation, unless also_serve(compiled=True) was called"
    if NATIVE.explain is not None{asked and f" and not ({asked})"}:
        _found = NATIVE.explain({looked})
        return _found if _found.startswith("PyTorch") else f"{{_found}}, native launcher"
    _saved = {f"1 if {asked} else " if asked else ""}0
    _found = _choose(DISPATCH, {names}, _saved)
    if _found is RECORDING:
        _found = _choose_recorded(DISPATCH, {names}, _saved)
    if isinstance(_found, str):
        return f"PyTorch: {{_found}}"
    return f"{{_found[0].variant}}{{_found[0].how}}, Python launcher\""""
        yield self._choose(positional)
        yield self._key(positional)
        launching, every = [*self._launching()], ", ".join(f"{name}_" for name in self._outputs)
        chosen = [f"_found = _choose(_table, {names})", "if _found is RECORDING:"]
        chosen += [f"    return _record(_table, {names})", "if type(_found) is str:", "    return None"]
        own = ", ".join(f"{name}_" for name in self._bound.results)
        yield _made_of(f"served(_table, {positional})", *chosen, *launching, f"    return {own}", "return None")
        # With what the backward takes; the call was chosen.
        yield _made_of(f"_launch(_found, {names})", *launching, f"    return ({every},)", "return None")
        yield from self._record(names)
        if flags:
            yield self._with_saved(names, original)
        yield self._compiled(names)
        for name, (given, call) in function.forwards.items():
            yield f"def _forward_{name}(self, {given}):\n    return {call}"

    def _with_saved(self, names: str, original: str) -> str:
        """A call that is asked for outputs which are `saved` else: by a variant that gives them all. Gradients are recorded
        of the results alone."""
        number = len(self._bound.results)
        return _made_of(
            f"_with_saved(_asked, {names})",
            "_results, _rest = None, []",
            f"_found = None if _is_compiling() else _choose(DISPATCH, {names}, 1)",
            "if _found is RECORDING:",
            f"    _results = _record(DISPATCH, {names}, 1, _rest)",
            "elif type(_found) is tuple:",
            f"    _own = _launch(_found, {names})",
            "    if _own is not None:",
            f"        _results, _rest = {'_own[0]' if number == 1 else f'_own[:{number}]'}, _own[{number}:]",
            "if _results is None:",
            f"    _results = {original}",
            f"_results = {'(_results,)' if number == 1 else 'tuple(_results)'}",
            f"_rest = _returned(_rest or None, *_results, {names})",
            "return _results + tuple(t for t, asked in zip(_rest, _asked) if asked)",
        )

    def _takes_more(self) -> bool:
        """Whether PyTorch's function has arguments that the signature lacks: calls with these are its own."""
        try:
            return len(inspect.signature(self._function.resolved).parameters) > len(self._parameters)
        except ValueError:  # one that is not written in Python
            return False

    def _passed(self) -> Iterator[str]:
        for name, parameter in self._parameters.items():
            value = self._function.passes.get(name, name)
            yield f"{name}={value}" if parameter.keyword else value

    def _choose(self, positional: str) -> str:
        """A call out of the table with addresses of the tensors, or why PyTorch is to do it. _saved: whether it gives what
        the backward takes."""
        lines = list[str]()
        for name in self._bound.looked_at:
            parameter = self._parameters[name]
            given = f"{name} is not None and " if parameter.optional else ""
            wrong, reason = (text.format(name, parameter.length) for text in TYPES[parameter.kind][:2])
            lines += [f"if {given}({wrong}):", f"    return {reason!r}"]
        lines += self._settled()
        first = self._bound.first
        for reason, text in self._bound.fits(of_tensors=False).items():
            lines += [f"if not ({in_python(text)}):", f"    return {reason!r}"]
        lines += [f"_at = addresses({', '.join(self._bound.together)})", "if type(_at) is str:", "    return _at"]
        for name in self._bound.apart:
            lines += [
                f"_of = addresses({name})",
                "if type(_of) is str:",
                "    return _of",
                f"if {name} is not None and {name}.device != {first}.device:",
                f"    return \"{name} is on another device\"",
                "_at += _of",
            ]
        sizes = ["_saved" if name in self._function.saved else self._bound.size(name) for name in self._order]
        fits = self._bound.fits(of_tensors=True)
        lines += locals_of([*fits.values(), *sizes])
        for reason, text in fits.items():
            lines += [f"if not ({in_python(text)}):", f"    return {reason!r}"]
        lines += [
            f"if {first}.is_cuda:",
            f"    _device = {first}.get_device()",
            f"elif {first}.is_cpu:",
            "    _device = -1",
            "else:",
            f"    return f\"nothing was tuned for {{{first}.device.type}}\"",
        ]
        dtype = in_python(self._bound.problem_dtype)
        lines += [f"_problem = (_device, {dtype}, {', '.join(map(in_python, sizes))})"]
        lines = ["try:", *(f"    {line}" for line in lines), f"except _NONE:\n        return {NO_VALUE!r}"]
        lines += ["_chosen = _table[_problem]"]
        lines.append("return _chosen if type(_chosen) is str else (_chosen, _at)")
        return _made_of(f"_choose(_table, {positional}, _saved=0)", *lines)

    def _settled(self, *texts: str) -> Iterator[str]:
        """Lines by which sizes that were given in a list or torch.Size are in a tuple: those in some expressions, or all."""
        used = {name for text in texts for name in names_in(text)} or {*self._parameters}
        for name, p in self._parameters.items():
            if p.type == "int[]" and name in used:
                yield f"{name} = {f'None if {name} is None else ' if p.optional else ''}tuple({name})"

    def _key(self, positional: str) -> str:
        """The problem of a call, with or without what the backward takes."""
        sizes = {name: self._bound.size(name) for name in self._order}
        texts = ("_saved" if name in self._function.saved else in_python(text) for name, text in sizes.items())
        first = self._bound.first
        dtype = in_python(self._bound.problem_dtype)
        key = f"({first}.get_device() if {first}.is_cuda else -1, {dtype}, {', '.join(texts)})"
        return _made_of(f"_key({positional}, *, _saved=0)", *self._settled(), *locals_of(sizes.values()), f"return {key}")

    @property
    def _outputs(self) -> Mapping[str, str]:
        """Form of each output that a call may be asked for, and whether it is, by its name; without a form, it is the
        output's own."""
        return {**self._bound.results, **dict.fromkeys(self._function.saved, "")}

    @property
    def _conditions(self) -> list[str]:
        """The expressions for whether optional results are asked for."""
        return [self._bound.size(name) for name in self._bound.results if self._bound.is_optional(name)]

    def _is_asked(self, output: str) -> str:
        """An expression for whether an optional output is asked for; empty for one that always is."""
        if not self._bound.is_optional(output):
            return ""
        saved = f"_chosen.variant.sizes[{output!r}]"
        return saved if output in self._function.saved else in_python(self._bound.size(output))

    def _launching(self) -> Iterator[str]:
        """Lines that end with the condition that a call which was found has been launched."""
        function, bound, arguments = self._function, self._bound, self._kernel.arguments
        yield f"_chosen, ({''.join(f'at_{name}, ' for name in (*bound.together, *bound.apart))}) = _found"
        for name in (argument for of, argument in bound.inputs.items() if bound.is_made_dense(of)):
            given = f"{name} is not None and " if self._parameters[name].optional else ""
            yield f"if {given}not {name}.is_contiguous():"  # PyTorch's own kernels copy it, too
            yield f"    {name} = {name}.contiguous()"
            yield f"    at_{name} = {name}.data_ptr()"
        outputs = {a.name: a for a in arguments if a.name in self._outputs}
        passed = {name for a in arguments for name in (a.name, *a.fields)}
        numbers = [bound.number(name) for name in self._kernel.options if name in passed]
        shapes = [text for text in bound.results.values() if text not in function.given_tensors]
        texts = [*numbers, *function.expanded.values(), *shapes, *self._conditions]
        yield from self._settled(*texts)
        yield from locals_of(texts)
        for output, form in self._outputs.items():
            made, asked_for = self._made(outputs[output], form), self._is_asked(output)
            yield f"{output}_ = {made}{f' if {asked_for} else None' if asked_for else ''}"
        for output, initial in ((a.name, a.initial) for a in arguments if a.initial and a.name in self._outputs):
            given = f"if {output}_ is not None:\n    " if self._is_asked(output) else ""
            yield given + (f"{output}_.zero_()" if initial == "zeros" else f"{output}_.copy_({bound.inputs[initial]})")
        if any(a.kind == "workspace" for a in arguments):
            yield f"_held = workspace(_chosen, {bound.first})"
            yield "_memory = [t.data_ptr() for t in _held]"
        for tensor in bound.strided:
            name, axes = bound.inputs.get(tensor, f"{tensor}_"), 1 + max(self._axes_of(tensor))
            whole = f".expand({in_python(function.expanded[name])})" if name in function.expanded else ""
            yield f"stride_{tensor} = {(0,) * axes} if {name} is None else {name}{whole}.stride()"
        # A mode that went unnoticed might have made a result something else than a plain tensor.
        plain = " and ".join(f"type({output}_) is Tensor" for output in bound.results if not bound.is_optional(output))
        yield f"if {plain} and _chosen({', '.join(self._values())}):"

    def _axes_of(self, tensor: str) -> Iterator[int]:
        for a in self._kernel.arguments:
            if a.stride_of is not None and a.stride_of[0] == tensor:
                yield a.stride_of[1]

    def _made(self, argument: Any, form: str) -> str:
        first = self._bound.first
        more = f", dtype={in_python(self._bound.dtype(argument))}" if argument.dtype != "problem" else ""
        if not form:
            sizes = "".join(f"{n if type(n) is int else f'_chosen.sizes[{self._order.index(n)}]'}, " for n in argument.shape)
            return f"{first}.new_empty(({sizes}){more})"
        if form in self._function.given_tensors:
            dense = "" if argument.name in self._bound.strided else ", memory_format=_CONTIGUOUS"
            return f"_empty_like({form}{more}{dense})"
        return f"{first}.new_empty({in_python(form)}{more})"

    def _values(self) -> Iterator[str]:
        """What the entry point is called with, in order."""
        bound, number = self._bound, 0
        values = {name: f"_chosen.sizes[{place}]" for place, name in enumerate(self._order)}
        for a in self._kernel.arguments:
            if a.kind == "input":
                values[a.name] = f"at_{bound.inputs[a.name]}" if a.name in bound.inputs else "0"
            elif a.kind == "output":
                there = f"0 if {a.name}_ is None else " if bound.is_optional(a.name) else ""
                values[a.name] = f"{there}{a.name}_.data_ptr()" if a.name in self._outputs else "0"
            elif a.kind == "workspace":
                values[a.name] = f"_memory[{number}]"
                number += 1
            elif a.stride_of is not None:
                values[a.name] = f"stride_{a.stride_of[0]}[{a.stride_of[1]}]"
        for a in self._kernel.parameters:
            if a.kind == "structure":
                fields = (values.get(name) or in_python(bound.number(name)) for name in a.fields)
                yield f"_pack({a.layout!r}, {', '.join(fields)})"
            else:
                yield values.get(a.name) or in_python(bound.number(a.name))

    def _record(self, names: str) -> Iterator[str]:
        """A call that records gradients, and how it is chosen: as one that records none."""
        function, tensors, bound = self._function, ", ".join(self._function.given_tensors), self._bound
        pays, backward = list[str](), None if self._backward is None else self._backward.BOUND
        results, kept = [*bound.results], bound.kept(backward)
        run = [f"_own = _launch(_found, {names})", "if _own is None:", f"    _own = _original({names})"]
        run += [f"    return {'_own, _own' if function.gradient else '_own,' + ' None,' * len(kept + function.saved)}"]
        if function.returned:  # beside the results, of which alone autograd knows
            run += ["if _rest is not None:", f"    _rest.extend(_own[{len(results)}:])"]
        result = "_own[0]" if len(results) == 1 else f"_own[:{len(results)}]"
        first = ", ".join([result, *(f"_own[{results.index(name)}]" for name in kept)])
        gradients = [f"return shared.derive(lambda {tensors}: _original({names}), _of_results, _tensors, _wanted)"]
        if function.gradient:
            wanted = ", ".join(["torch.ops." + in_python(function.gradient), *["None"] * (len(function.given_tensors) - 1)])
            run.append(f"return {first}")
            gradients = [f"({tensors},), (result,), (gradient,) = _tensors, _kept, _of_results", f"return ({wanted},)"]
        elif backward is None:
            run.append(f"return ({first}{', None' * len(function.saved)},)")
        else:
            passed = bound.passed_to(backward).values()
            forms = {name: form if form in function.given_tensors else bound.first for name, form in bound.results.items()}
            of = {f"gradient_{name}": form for name, form in forms.items()} | {n: forms[n] for n in kept}
            of |= {"wanted": "_wanted"} | dict.fromkeys(function.saved, "None")
            yield _made_of(
                f"_saving(_table, _chosen, {names})",
                f"if not {self._bound.first}.requires_grad:",
                "    return None",
                f"_wanted = [t is not None and t.requires_grad for t in ({tensors},)]",
                f"if type(_backward.DISPATCH[_backward._key({', '.join(of.get(name, name) for name in passed)})]) is str:",
                "    return None",
                f"if {' and '.join(self._is_asked(name) for name in function.saved) or True}:",
                "    return _chosen",
                f"_other = _table[_key({names}, _saved=1)]",
                "return None if type(_other) is str else _other",
            )
            pays = [
                f"if _saving(_table, _found[0], {names}) is None:",
                '    return "no variant of the backward serves it"',
            ]
            run += [
                f"_saves = None if _own[-1] is not None else _saving(_table, _found[0], {names})",
                f"_other = None if _saves is None else _launch((_saves, _found[1]), {names})",
                f"return ({first}, *(_own if _other is None else _other)[{len(results)}:])",
            ]
            own, each = {"wanted": "_wanted"}, [*backward.results]
            places = (f"_own[{each.index(name)}]" if len(each) > 1 else "_own" for name in backward.gradients)
            gradients = [
                f"({tensors},), [{', '.join(kept + function.saved)}] = _tensors, _kept",
                f"{''.join(f'gradient_{name}, ' for name in results)}= _of_results",
                "if all(t is not None for t in _kept) and _wanted[0] and not torch.is_grad_enabled():",
                f"    _own = _backward.served(_backward.DISPATCH, {', '.join(own.get(n, n) for n in passed)})",
                "    if _own is not None:",
                f"        return ({', '.join(places)},)",
                *gradients,
            ]
        yield _made_of(
            f"_choose_recorded(_table, {names}, _saved=0)",
            "if not _recording:",
            "    return RECORDING",
            "with torch.no_grad():",
            f"    _found = _choose(_table, {names}, _saved)",
            *(["if type(_found) is str or _recording == ALL:", "    return _found", *pays] if pays else []),
            "return _found",
        )
        yield _made_of(
            f"_record(_table, {names}, _saved=0, _rest=None)",
            f"_found = _choose_recorded(_table, {names}, _saved)",
            "if type(_found) is str:",
            "    return None",
            *("def _run():", *(f"    {line}" for line in run)),
            *("def _gradients(_of_results, _kept, _tensors, _wanted):", *(f"    {line}" for line in gradients)),
            f"return shared.Recorded.apply(_run, _gradients, {tensors})",
        )

    def _compiled(self, names: str) -> str:
        """What torch.compile is to see: the operator where it may be a variant, which is looked up when it runs; None:
        PyTorch's operation. And what the operator gives for tensors without data."""
        function, first = self._function, self._bound.first
        fits = (text for kind in (False, True) for text in self._bound.fits(of_tensors=kind).values())
        asked = [text for text in fits if not _concerns_memory(text)]
        fixed = sorted({name for v in self._package.variants for name in v.fixed} - {*function.saved})
        sizes = {name: self._bound.size(name) for name in fixed}
        dtype = in_python(self._bound.problem_dtype)
        lines = ["if not _in_graphs or NATIVE.operator is None:", "    return None", *self._settled()]
        lines += locals_of([*asked, *sizes.values()])
        if not function.gradient:
            recorded = " or ".join(f"({n} is not None and {n}.requires_grad)" for n in function.given_tensors)
            # Which variants serve both passes of a call that records gradients is known where it is eager.
            lines += [f"if _recording != ALL and torch.is_grad_enabled() and ({recorded}):", "    return None"]
        lines += [f"if not ({in_python(text)}):\n        return None" for text in asked]
        of = ", ".join(f"{name!r}: {in_python(text)}" for name, text in sizes.items())
        lines += [
            f"if PACKAGE.tuned({first}.device.type, str({dtype})[6:], {{{of}}}):",
            f"    return NATIVE.operator({', '.join(function.operands)})",
            "return None",
        ]
        made = list[str]()
        for a in (a for name in self._bound.results for a in self._kernel.arguments if a.name == name):
            asked_for = self._is_asked(a.name)
            made.append(self._made(a, self._bound.results[a.name]) + (f" if {asked_for} else None" if asked_for else ""))
        heads = ", ".join(f"{name}=None" for name in self._function.operands)
        shapes = [text for text in self._bound.results.values() if text not in self._function.given_tensors]
        fake = _made_of(f"_fake({heads})", *locals_of([*shapes, *self._conditions]), f"return {', '.join(made)}")
        return _made_of(f"_compiled({names})", *lines) + f"\n\n{fake}"


def _made_of(head: str, *lines: str) -> str:
    """A function's text."""
    return "\n".join([f"def {head}:", *(f"    {line}" for line in lines)])


def _concerns_memory(text: str) -> bool:
    """Whether an expression asks where tensors lie, which is the operator's to look at when it runs."""
    return bool(strides_in(text)) or any(name in text for name in ("is_contiguous", "data_ptr", "backend"))


_CONSTANTS: Mapping[str, Any] = {
    "Tensor": torch.Tensor,
    "_NONE": (ArithmeticError, AttributeError, IndexError, TypeError),  # of an expression that has no value
    "prod": prod,
    "_pack": pack,
    "addresses": shared.addresses,
    "workspace": shared.workspace,
    "expands": lambda own, whole: (
        len(own) <= len(whole) and all(n in (1, size) for n, size in zip(own, whole[len(whole) - len(own) :], strict=True))
    ),
    "backend": lambda name: BACKENDS[name](),
    "RECORDING": shared.RECORDING,
    "_is_compiling": torch.compiler.is_compiling,
    "_empty_like": torch.empty_like,
    "_CONTIGUOUS": torch.contiguous_format,
    "_NUMBERS": frozenset({int, float}),
    "_INT": {int},
    "_SEQUENCES": frozenset({tuple, list, torch.Size}),
    "_dtype": torch.dtype,
}


def _use(module: Any, native: Native) -> None:
    module._call = native.call
    native.serve_gradients(module._recording)


def _build(module: Any) -> str:
    """Builds the native launcher, once a machine and version of PyTorch: half a minute. This process uses it from here on,
    later ones from their start. Returns where it lies. Raises RuntimeError, with what is missing here."""
    return str(module.NATIVE.build())


def _also_serve(
    module: Any,
    *,
    gradients: bool | None = None,
    compiled: bool | None = None,
    untuned: bool | None = None,
    slower: bool | None = None,
    measure: bool | None = None,
    wait: bool | None = None,
    batch_invariant: bool | None = None,
) -> None:
    """What else variants serve; None leaves it as it is. Raises ValueError.

    gradients: calls that record gradients, which have the same results as those that record none. True: all; where no
    variant of the backward serves, PyTorch computes its own forward pass again and differentiates it. False: none. At first
    all where the kernel states how the gradient follows from the result; those of which variants serve both passes where the
    package holds the backward kernel; else none.
    compiled, off at first, with the native launcher only: calls within torch.compile and torch.export, where a variant
    stands as one operation that nothing is fused with, in place of code that the compiler writes.
    untuned: sizes that are compiled in and that no variant has, which are compiled when they are first met, and compared
    with PyTorch and float64. On at first on a GPU, where that takes a second or two; off on a CPU, where it takes more.
    slower, off at first: problems whose nearest variant was measured, and PyTorch was faster. Where what was measured there
    is not in the package, the two nearest variants are raced; none serves where none is within 16 times in each dimension.
    measure, on at first: problems unlike all that were measured are served by the fastest in a short race of the two nearest
    variants and PyTorch, at the first such call, once a machine; a variant whose sizes are in some dimension over 16 times
    farther than the nearest one's is not in it. Off: by the nearest variant.
    wait: calls for which variants are being compiled. At first they wait, on a GPU for 1.5 s at most, after which PyTorch
    serves until the variants are there. True: as long as it takes, for measurements. False: 1.5 s on a CPU, too.
    batch_invariant, off at first: results of calls, not gradients, have for each row (of attention: each element of the
    batch) the same bits whatever else is in the batch. One variant serves all sizes of the batch, also where PyTorch was
    faster, after a test of that at its first call here; what no variant serves is PyTorch's, and as that has it. ValueError
    for a package without a batch.
    """
    if batch_invariant is not None:
        module.DISPATCH.also_serve(batch_invariant=batch_invariant)
    if gradients is not None:
        module._recording = ALL if gradients else NONE
        module.NATIVE.serve_gradients(module._recording)
        module.DISPATCH.also_serve(more=gradients and module._backward is not None)
    if compiled is not None:
        module._in_graphs = compiled
    for served in (module, *([] if module._backward is None else [module._backward])):
        served.DISPATCH.also_serve(untuned=untuned, slower=slower, measure=measure, wait=wait)


def _patch_of(module: Any, function: Function, classes: Mapping[type, type]) -> Any:
    def functions() -> dict[str, Any]:
        place, _, name = function.path.rpartition(".")
        return {name: getattr(module, function.name)} if place == "torch.nn.functional" else {}

    if not classes:

        def patch() -> shared.Patch:
            """Has the whole process use this in torch.nn.functional: until `undo` of what is returned, or to the end of the
            block that it opens."""
            return shared.Patch(functions())

        return patch

    def patch_model(model: torch.nn.Module | None = None) -> shared.Patch:
        """Has existing models use this: until `undo` of what is returned, or to the end of the block that it opens.

        With a model: its modules of PyTorch's class become this package's. Without: the function in torch.nn.functional is
        ours, for the whole process.
        """
        return shared.Patch(functions()) if model is None else shared.Patch(model=model, classes=classes)

    patch_model.__name__ = "patch"
    return patch_model
