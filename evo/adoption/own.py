"""A function with its kernel's source as its docstring, as the folder of a kernel."""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import re
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from evo.adoption import BEFORE, CPU, FILES, FLOATS, TARGET, Adopted, adopt, usual_sizes
from evo.adoption.folder import rendered
from evo.adoption.geometry import numbers_of
from evo.errors import UsageError
from evo.problem.kernel import DTYPE_BYTES, Argument
from evo.problem.plain import read_source
from evo.problem.space import Value

_SMALL = 1e-2
"""An option with a default from 0 to this is one that keeps from a division by 0: it is not negative."""
_PLAIN = (bool, int, float, str, type(None))

PerTarget = Sequence[str] | Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the decorator is told beside the function. tiles: (dimensions, size) of what a block computes, along each axis of
    the grid; a size, or a number of threads, is a number or an expression of parameters."""

    cpu: str = ""
    name: str = ""
    space: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    threads: int | str | Sequence[int | str] = ()
    tiles: Sequence[tuple[str, int | str]] = ()
    workloads: PerTarget = ()
    dtypes: PerTarget = ()


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What the templates are told of such a function, beside what its source shows: in Python, or by target."""

    imports: tuple[str, ...]
    constants: tuple[str, ...]
    body: str
    signature: str
    arguments: str
    """Arguments of the call in the reference."""
    tensors: Mapping[str, str]
    sizes: Mapping[str, str]
    fits: Mapping[str, str]
    spaces: Mapping[str, Mapping[str, tuple[Value, ...]]]
    defaults: Mapping[str, Mapping[str, Value | None]]
    dtypes: Mapping[str, tuple[str, ...]]
    workloads: Mapping[str, tuple[str, ...]]
    fixed: Mapping[str, tuple[str, ...]]
    least: Mapping[str, float]


class Own:
    """A function, as its text has it. Raises UsageError for one that cannot be a kernel."""

    def __init__(self, function: Callable[..., Any], given: Given) -> None:
        self.name, self._given = given.name or getattr(function, "__name__", ""), given
        if not isinstance(function, FunctionType) or not self.name.isidentifier():
            raise UsageError(f"evo.kernel takes a function with a name, got {function!r}")
        self.function = function
        self._node = self._read()
        self.file = Path(function.__code__.co_filename).name
        if function.__code__.co_freevars:
            names = ", ".join(function.__code__.co_freevars)
            raise self.fault(f"its body uses {names} of the function around it: hand it over as an argument, or write it in")
        text = inspect.cleandoc(function.__doc__ or "")
        self.sources = {TARGET if "__global__" in text else CPU: text} if text else {}
        if given.cpu:
            self.sources[CPU] = inspect.cleandoc(given.cpu)
        if not self.sources:
            raise self.fault("it has no source: write it as the docstring, in CUDA C++ or, for the CPU, in C++")
        arguments = self._node.args
        if arguments.vararg or arguments.kwarg or arguments.posonlyargs:
            raise self.fault("it takes *, ** or arguments by place alone: give each argument a name")
        every = [*arguments.args, *arguments.kwonlyargs]
        defaults = [*([None] * (len(arguments.args) - len(arguments.defaults))), *arguments.defaults, *arguments.kw_defaults]
        self.keywords = [a.arg for a in arguments.kwonlyargs]
        self.tensors = {a.arg: _dimensions(a.annotation) for a, d in zip(every, defaults, strict=True) if d is None}
        self.options = {a.arg: self._number(a.arg, d) for a, d in zip(every, defaults, strict=True) if d is not None}
        if not self.tensors:
            raise self.fault("it takes no tensor: its arguments without a default are its tensors")
        returned = self._node.returns
        parts = returned.elts if isinstance(returned, ast.Tuple) else [returned] if returned is not None else []
        self.returned = [_dimensions(part) for part in parts]

    def fault(self, what: str) -> UsageError:
        return UsageError(f"@evo.kernel on {self.function.__name__}: {what}")

    def _read(self) -> ast.FunctionDef:
        try:
            linecache.checkcache(self.function.__code__.co_filename)
            found = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body[0]
        except (OSError, SyntaxError, TypeError, IndexError):
            found = None
        if not isinstance(found, ast.FunctionDef):
            raise self.fault("its text cannot be read: write it with `def` in a file or in a notebook's cell")
        return found

    def _number(self, name: str, node: ast.expr | None) -> float:
        try:
            value = ast.literal_eval(node) if node is not None else None
        except ValueError:
            value = None
        if not isinstance(value, float):
            raise self.fault(f"the default of {name} is no float: a kernel's options are such, and tensors have no default")
        return value

    @property
    def declared(self) -> str:
        """The parameters as Python declares them."""
        found = [n for n in (*self.tensors, *self.options) if n not in self.keywords]
        found += ["*", *self.keywords] if self.keywords else []
        return ", ".join(f"{n}={self.options[n]!r}" if n in self.options else n for n in found)

    @property
    def passed(self) -> str:
        return ", ".join(f"{n}={n}" if n in self.keywords else n for n in (*self.tensors, *self.options))

    # -- the folder ---------------------------------------------------------------------------------------------------

    def files(self) -> dict[str, str]:
        """The files of its kernel's folder, by name. Raises UsageError."""
        with tempfile.TemporaryDirectory(prefix="evo-own-") as folder:
            found = dict[str, Adopted]()
            for target, text in self.sources.items():
                file = Path(folder, FILES[target])
                file.write_text(text, encoding="utf-8")
                try:
                    found[target] = adopt(file, None, target)
                except UsageError as error:
                    raise self.fault(str(error).removeprefix("--cu ").replace(f"{file}", file.name)) from None
        self._check_given(found)
        k = found.get(TARGET) or found[CPU]
        if TARGET in found and CPU in found:
            self._check_alike(found[TARGET], found[CPU])
        arguments, dimensions = self._shaped(k)
        k = replace(k, arguments=arguments, dimensions=dimensions, options=self.options, questions=())
        if TARGET in found:
            found[TARGET] = k = self._launched(self._searched(TARGET, k))
        if CPU in found:
            found[CPU] = self._searched(CPU, replace(found[CPU], dimensions=dimensions))
        stated = self._stated(k, found)
        sources = {FILES[target]: f"{text}\n" for target, text in self.sources.items()}
        facts = {"name": self.name, "file": "", "k": k, "own": stated}
        return {**rendered(facts, "kernel.py", "function.py"), **sources}

    def _check_given(self, found: Mapping[str, Adopted]) -> None:
        given, own = self._given, " and ".join(self.sources)
        if unused := [n for n in given.space if not any(n in self._asked(t, k) for t, k in found.items())]:
            raise self.fault(f"{unused[0]} of its space is used by no source, nor by threads= or tiles=: leave it out")
        for option, per_target in (("workloads", given.workloads), ("dtypes", given.dtypes)):
            if isinstance(per_target, Mapping) and (unknown := per_target.keys() - self.sources.keys()):
                raise self.fault(f"{option}= is for {min(unknown)!r}, and its sources are for {own}: name one of these")

    def _check_alike(self, gpu: Adopted, cpu: Adopted) -> None:
        one, other = ([(a.name, a.dtype if a.kind == "scalar" else "") for a in k.arguments] for k in (gpu, cpu))
        if (gpu.entry, one) != (cpu.entry, other):
            raise self.fault(
                f"the source for the CPU has another {cpu.entry}(...) than the docstring's {gpu.entry}(...): give both one"
                " name, and parameters of the same names, order and types"
            )

    def _shaped(self, k: Adopted) -> tuple[tuple[Argument, ...], tuple[str, ...]]:
        """The arguments of the entry point with their shapes, and the dimensions."""
        inputs = {a.name.removesuffix(BEFORE) for a in k.arguments if a.kind == "input"}
        numbers = {a.name: a.dtype for a in k.arguments if a.kind == "scalar"}
        if inputs != {*self.tensors}:
            read = ", ".join(sorted(inputs)) or "none"
            raise self.fault(
                f"its tensors are {', '.join(self.tensors)}, and the source reads {read}: give both the same names (a"
                " pointer to const is read)"
            )
        floats = {n for n, dtype in numbers.items() if dtype in FLOATS}
        if floats != {*self.options}:
            own, theirs = (", ".join(sorted(names)) or "none" for names in (self.options, floats))
            raise self.fault(f"its arguments with a default are {own}, and the source's floats {theirs}: give both the same")
        outputs = [a.name for a in k.arguments if a.kind == "output"]
        if self.returned and len(self.returned) != len(outputs):
            raise self.fault(f"its annotation has {len(self.returned)} results, and the source writes {', '.join(outputs)}")
        sizes = [n for n in numbers if n not in floats]
        annotated = [*self.tensors.values(), *self.returned]
        if all(shape is None for shape in annotated) and len(sizes) <= 1:
            shape = (*(sizes or ["n"]),)
            return tuple(replace(a, shape=shape) if a.kind != "scalar" else a for a in k.arguments), shape
        if missing := [n for n, shape in self.tensors.items() if shape is None]:
            example = f'{missing[0]}: "{" ".join(sizes) or "n"}"'
            raise self.fault(
                f"the shape of {missing[0]} is not known: annotate each tensor with its dimensions, as in {example}"
            )
        first = next(iter(self.tensors.values()))
        results = [shape or first for shape in self.returned] or [first] * len(outputs)
        shapes = {**self.tensors, **dict(zip(outputs, results, strict=True))}
        known = dict.fromkeys(d for shape in self.tensors.values() for d in shape or ())
        for d in [*sizes, *(d for shape in results for d in shape or ())]:
            if d not in known:
                raise self.fault(f"{d} is in the shape of no tensor that it takes: annotate these with their dimensions")
        of_entry = {a.name: shapes.get(a.name.removesuffix(BEFORE)) or () for a in k.arguments}
        made = (replace(a, shape=of_entry[a.name]) if a.kind != "scalar" else a for a in k.arguments)
        return tuple(made), tuple(known)

    def _launched(self, k: Adopted) -> Adopted:
        """With what is given of the launch."""
        given, names, threads, tiles, axes = self._given, {*k.parameters}, k.threads, k.tiles, k.axes
        if given.threads:
            several = (given.threads,) if isinstance(given.threads, int | str) else given.threads
            parts = [_of_point(part, names) for part in several]
            threads = f"({', '.join(parts)})" if len(parts) > 1 else parts[0]
        threads = threads or "256"
        if given.tiles:
            tiles = "".join(f'("{whole}", {_of_point(size, names)}), ' for whole, size in given.tiles).strip()
            axes = len(given.tiles) > 1
        if not tiles:
            raise self.fault(
                "its source does not show the grid: say how much of which dimension a block computes, as"
                f' tiles=(("{k.dimensions[0]}", 1),), and threads=, its threads'
            )
        return replace(k, threads=threads, tiles=tiles, axes=axes)

    def _searched(self, target: str, k: Adopted) -> Adopted:
        """With the parameters that are given in the place of those that the source shows. What stands for one macro is one,
        and what the source defines is its default if it is among the values."""
        source, launch = read_source(self.sources[target]), {n: getattr(k, n) for n in ("threads", "tiles", "smem_bytes")}
        asked = self._asked(target, k)
        given = {n: tuple(v) for n, v in self._given.space.items() if n in asked}
        macros, shown = {source.spelled(n) or n: n for n in given}, numbers_of(source)
        parameters = {n: v for n, v in k.parameters.items() if n not in macros and n not in k.dimensions} | given
        default = {n: k.default.get(n) for n in parameters}
        for macro, n in macros.items():
            usual = given[n][len(given[n]) // 2]
            default[n] = next((v for v in (shown.get(macro), k.default.get(macro)) if v in given[n]), usual)
            launch = {part: text.replace(f'point["{macro}"]', f'point["{n}"]') for part, text in launch.items()}
        return replace(k, parameters=parameters, default=default, **launch)

    def _asked(self, target: str, k: Adopted) -> set[str]:
        """Names of the space that the source for a target, or on a GPU its launch, uses."""
        source, given = read_source(self.sources[target]), self._given
        launch = f"{given.threads} {given.tiles} {k.threads} {k.tiles}" if target == TARGET else ""
        return {n for n in given.space if source.spelled(n) or re.search(rf"\b{n}\b", launch)}

    # -- the statement ------------------------------------------------------------------------------------------------

    def _stated(self, k: Adopted, found: Mapping[str, Adopted]) -> Stated:
        sources = {target: read_source(text) for target, text in self.sources.items()}
        scalars = {a.name for a in k.arguments if a.kind == "scalar"}
        fixed = {t: tuple(d for d in k.dimensions if d not in scalars and sources[t].spelled(d)) for t in found}
        dtypes = {t: self._of(t, self._given.dtypes) or found[t].dtypes for t in found}
        if wrong := [d for ds in dtypes.values() for d in ds if d not in DTYPE_BYTES]:
            raise self.fault(f"{wrong[0]!r} is no dtype of a kernel: say dtypes=(...), of {', '.join(DTYPE_BYTES)}")
        usual = usual_sizes(k.dimensions, {d: k.sizes[d] for d in k.fixed if d in k.dimensions})
        sizes = ",".join(f"{d}={size}" for d, size in usual.items())
        workloads = {t: self._of(t, self._given.workloads) or (f"{sizes},dtype={dtypes[t][0]}",) for t in found}
        imports, constants = self._used()
        return Stated(
            imports=imports,
            constants=constants,
            body=self._body(),
            signature=self._signature(k),
            arguments=self._called(k),
            tensors={a.name: a.name.removesuffix(BEFORE) for a in k.arguments if a.kind == "input"},
            spaces={t: kernel.parameters for t, kernel in found.items()},
            defaults={t: kernel.default for t, kernel in found.items()},
            dtypes=dtypes,
            workloads=workloads,
            fixed=fixed if any(fixed.values()) else {},
            least={n: 0.0 for n, v in self.options.items() if 0 <= v <= _SMALL},
            **self._places(k),
        )

    def _of(self, target: str, given: PerTarget) -> tuple[str, ...]:
        """What is given for a target."""
        found = given.get(target, ()) if isinstance(given, Mapping) else given
        return (found,) if isinstance(found, str) else tuple(found)

    def _signature(self, k: Adopted) -> str:
        found = [f"Tensor {n}" for n in self.tensors if n not in self.keywords]
        found += [f"float {n}={v!r}" for n, v in self.options.items() if n not in self.keywords]
        found += ["*"] if self.keywords else []
        found += [f"Tensor {n}" if n in self.tensors else f"float {n}={self.options[n]!r}" for n in self.keywords]
        number = sum(a.kind == "output" for a in k.arguments)
        results = "Tensor" if number == 1 else f"({', '.join(['Tensor'] * number)})"
        return f"{self.function.__name__}({', '.join(found)}) -> {results}"

    def _called(self, k: Adopted) -> str:
        inputs = {a.name.removesuffix(BEFORE): f'inputs["{a.name}"]' for a in k.arguments if a.kind == "input"}
        given = {**{n: inputs[n] for n in self.tensors}, **{n: f'workload.option("{n}")' for n in self.options}}
        return ", ".join(f"{n}={text}" if n in self.keywords else text for n, text in given.items())

    def _places(self, k: Adopted) -> dict[str, Any]:
        """`sizes` and `fits` of the function, where they do not follow from the kernel's shapes."""
        first = next(iter(self.tensors))
        if any(shape is not None for shape in self.tensors.values()) or not self._is_for_any_shape():
            return {"sizes": {}, "fits": {}}
        fits = {f"{n} has not the shape of {first}": f"{n}.shape == {first}.shape" for n in self.tensors if n != first}
        return {"sizes": {k.dimensions[0]: f"{first}.numel()"}, "fits": fits}

    def _is_for_any_shape(self) -> bool:
        """Whether the body gives for two axes what it gives for all their elements along one."""
        import torch

        given = [torch.arange(1.0, 7.0, dtype=torch.float64).roll(i) / 7 for i in range(len(self.tensors))]
        try:
            flat, shaped = (
                self.function(**dict(zip(self.tensors, tensors, strict=True)))
                for tensors in (given, [t.view(2, 3) for t in given])
            )
            pairs = zip(*((r,) if isinstance(r, torch.Tensor) else r for r in (flat, shaped)), strict=True)
            return all(two.shape == (2, 3) and torch.equal(one, two.reshape(-1)) for one, two in pairs)
        except Exception:  # it may be for other tensors
            return False

    # -- the function's own text --------------------------------------------------------------------------------------

    def _body(self) -> str:
        node = ast.parse(ast.unparse(self._node)).body[0]
        assert isinstance(node, ast.FunctionDef)
        node.decorator_list, node.returns, node.name = [], None, self.name
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        if self.function.__doc__ is not None:
            node.body = node.body[1:]
        if not node.body or all(isinstance(n, ast.Pass) for n in node.body):
            raise self.fault("it has no body: write what the kernel computes, in PyTorch, and return it")
        return ast.unparse(node)

    def _used(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Lines that give the body what it uses of its module: imports, and constants."""
        body = ast.parse(self._body())
        names = dict.fromkeys(n.id for n in ast.walk(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        own, imports, constants = self.function.__globals__, list[str](), list[str]()
        for name in (n for n in names if n in own and n not in self.function.__code__.co_varnames):
            value = own[name]
            place = getattr(value, "__module__", None)
            if isinstance(value, ModuleType):
                *above, last = value.__name__.split(".")
                line = f"from {'.'.join(above)} import {last}" if above else f"import {last}"
                imports.append(line if name == last else f"{line} as {name}")
            elif isinstance(value, _PLAIN):
                known = not isinstance(value, float) or math.isfinite(value)
                constants.append(f"{name} = {value!r}" if known else f'{name} = float("{value!r}")')
            elif type(value).__module__ == "torch" and re.fullmatch(r"torch\.\w+", repr(value)):  # a dtype
                constants.append(f"{name} = {value!r}")
                imports.append("import torch")
            elif place not in (None, "__main__", self.function.__module__) and hasattr(value, "__name__"):
                line = f"from {place} import {value.__name__}"
                imports.append(line if name == value.__name__ else f"{line} as {name}")
            else:
                raise self.fault(
                    f"its body uses {name} of {self.file}, and is written to a file of its own: write {name} into the"
                    " function, or import it from a module"
                )
        return tuple(sorted({*imports})), tuple(constants)


def _dimensions(annotation: ast.expr | None) -> tuple[str, ...] | None:
    """The dimensions that an annotation names: "rows cols", or Annotated[Tensor, "rows cols"]; None where it is neither."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        annotation = annotation.slice.elts[-1]
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        words = re.split(r"[\s,]+", annotation.value.strip())
        return tuple(words) if all(w.isidentifier() for w in words) else None
    return None


def _of_point(text: int | str, parameters: set[str]) -> str:
    """An expression of parameters, in which each is one of `point`."""
    return re.sub(r"[A-Za-z_]\w*", lambda n: f'point["{n[0]}"]' if n[0] in parameters else n[0], str(text))


