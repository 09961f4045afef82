"""Template + genome + workload = source. A template is Jinja, sandboxed and strict about undefined names, or a plain source
whose parameters are macros."""

import hashlib
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.meta import find_referenced_templates
from jinja2.sandbox import SandboxedEnvironment

from evo.discovery import find_plugin, plugin_names
from evo.errors import TemplateError
from evo.problem.fill import fill_plain
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Limits, Workload
from evo.problem.loading import Notation, own_notations, template_root
from evo.problem.space import TEMPLATE, Value


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rendered source text with everything that the compiled code depends on except the compiler."""

    text: str
    target: str
    language: str
    entry: str
    flags: tuple[str, ...] = ()
    include_dirs: tuple[str, ...] = ()

    @cached_property
    def includes(self) -> dict[str, str]:
        """Local headers reached from the text, by the name they are included under, and their text."""
        found: dict[str, str] = {}
        pending = _INCLUDE.findall(self.text)
        while pending:
            name = pending.pop()
            path = next((p for d in self.include_dirs if (p := Path(d) / name).is_file()), None)
            if path is not None and name not in found:
                found[name] = path.read_text()
                pending += _INCLUDE.findall(found[name])
        return found

    @cached_property
    def digest(self) -> str:
        """sha256 of text, reached local headers, entry and flags; hexadecimal."""
        digest = hashlib.sha256()
        for part in (self.target, self.entry, self.text, *self.flags, *map("\0".join, sorted(self.includes.items()))):
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()


_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


class _Files(jinja2.FileSystemLoader):
    """A file is read again when its content has changed: an edit may leave the time of change as it was."""

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        text, path, _ = super().get_source(environment, template)
        return text, path, lambda: self._is(environment, template, (text, path))

    def _is(self, environment: jinja2.Environment, template: str, known: tuple[str, str]) -> bool:
        with suppress(jinja2.TemplateNotFound, OSError):
            return super().get_source(environment, template)[:2] == known
        return False


@cache
def template_environment(*folders: Path) -> SandboxedEnvironment:
    """Templates are text, not HTML, and are looked up in these folders."""
    return SandboxedEnvironment(
        loader=_Files(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


class _Asked(UserDict[str, Value]):
    """A point that notes which of its parameters were read."""

    def __init__(self, point: Mapping[str, Value]) -> None:
        self.asked: set[str] = set()
        super().__init__(point)

    def __getitem__(self, name: str) -> Value:
        self.asked.add(name)
        return super().__getitem__(name)


def render(kernel: Kernel, target: str, genome: Genome, workload: Workload, arch: str) -> Source:
    """The source of one candidate.

    Template variables: `p` (the genome's parameters), `dtype`, `dims` and `options` (those that are compiled in), `arch`,
    `types` (of an argument's elements or number in C++, by name). In a plain source, parameters, dimensions, options and,
    as NAME_type, types are macros.
    Raises TemplateError with the file, the line and what is wrong.
    """
    file, notation = _template_file(kernel, target, genome)
    binding, point = kernel.binding(target, workload), _Asked(genome.parameters)
    flags = tuple(kernel.compile_flags(target, point))
    values = {**kernel.inactive.get(target, {}), **genome.parameters}
    if file.suffix == ".j2":
        text = _fill(kernel, file.name, notation, SimpleNamespace(**values), binding, arch)
    else:
        plans = kernel.plans(target, point, workload)
        types = types_of(kernel, notation, binding)
        macros = {**dict(binding.dims), **dict(binding.options), **values}
        macros.pop(TEMPLATE, None)  # which chose the file, and is a word of C++
        needed = genome.parameters.keys() - point.asked
        names = {a.name: a.kind in ("input", "output") for a in kernel.parameters}
        tensors = [name for name, is_tensor in names.items() if is_tensor]
        declares = notation.declares_kernels
        text = fill_plain(file, kernel.entry, macros, types, needed, declares, arguments=[*names], tensors=tensors)
        if isinstance(plans[0].threads, int) and (axis := re.search(r"\bthreadIdx\s*\.\s*[yz]\b", text)):
            raise TemplateError(
                f"{file} uses {axis[0]}, and its blocks have one axis: give LaunchPlan(threads=(X, Y, Z), ...) in kernel.py"
                " the threads along each"
            )
    return Source(
        text=text,
        target=target,
        language=notation.name,
        entry=kernel.entry,
        flags=flags,
        include_dirs=(str(kernel.folder), str(template_root())),
    )


def unread_parameters(
    kernel: Kernel, target: str, limits: Limits, points: Iterable[tuple[Workload, Genome]]
) -> list[str]:
    """Parameters whose value nothing reads: no part of the Jinja template, nor launches, workspace and compile flags at any
    of these points, which render. None of a template where the name of an included part is computed, and of a plain source,
    of which `render` refuses them."""
    of_file: dict[Path, list[tuple[Workload, Genome]]] = {}
    for workload, genome in points:
        of_file.setdefault(_template_file(kernel, target, genome)[0], []).append((workload, genome))
    unread = set[str]()
    for file, own in of_file.items():
        if (read := _read_in(kernel, file)) is None:
            continue
        for workload, genome in own:
            point = _Asked(genome.parameters)
            kernel.compile_flags(target, point)
            kernel.sequence(target, point, workload, limits)
            read |= point.asked
        unread |= {name for _, genome in own for name in genome.parameters} - read
    return sorted(unread)


def _read_in(kernel: Kernel, file: Path) -> set[str] | None:
    """What a Jinja template and what it includes read; None where the name of an included part is computed, and for a plain
    source."""
    if file.suffix != ".j2":
        return None
    environment = template_environment(*(folders := (kernel.folder, template_root())))
    read, pending, parts = {TEMPLATE}, [file.name], set[str]()
    while pending:
        parts.add(name := pending.pop())
        tree = environment.parse(Path(environment.get_template(name).filename or "").read_text(encoding="utf-8"))
        read |= {node.attr for node in tree.find_all(nodes.Getattr)}
        read |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        included = set(find_referenced_templates(tree))
        if None in included:
            return None
        pending += [other for other in included - parts if other and any((folder / other).is_file() for folder in folders)]
    return read


def _template_file(kernel: Kernel, target: str, genome: Genome) -> tuple[Path, Notation]:
    """The template of a genome, and its language: a kernel's one for the target, TARGET.SUFFIX, or of several the one that
    the genome names, TARGET.TEMPLATE.SUFFIX; and .j2 behind that if it is Jinja. Raises TemplateError."""
    own = own_notations()
    stem = f"{target}.{genome.parameters[TEMPLATE]}" if TEMPLATE in genome.parameters else target
    plain = {f"{stem}{n.suffix}" for n in own if n.plain}
    found = sorted(
        p for p in kernel.folder.glob(f"{stem}.*") if p.name in plain or re.fullmatch(r"\.\w+\.j2", p.name[len(stem) :])
    )
    if len(found) == 1:
        suffix = found[0].name.removeprefix(stem).removesuffix(".j2")
        others = (find_plugin("language", name) for name in plugin_names("language"))  # which takes longer
        for notation in chain(own, others):
            if notation.suffix == suffix and target in notation.targets:
                return found[0], notation
        raise TemplateError(f"{found[0]} is in no language for target {target}: {_known_suffixes(target)}")
    raise TemplateError(
        f"kernel {kernel.name!r} needs one template for target {target} in {kernel.folder}, {stem}.SUFFIX.j2, or a source"
        f" whose parameters are macros, {stem}.SUFFIX; it has {', '.join(p.name for p in found) or 'none'}:"
        f" {_known_suffixes(target)}"
    )


def _known_suffixes(target: str) -> str:
    known: list[Notation] = [find_plugin("language", name) for name in plugin_names("language")]
    return "; ".join(f"{n.suffix} is {n.name}" for n in known if target in n.targets) or f"there is none for {target}"


def types_of(kernel: Kernel, notation: Notation, binding: Workload) -> dict[str, str]:
    """Type of each argument's elements, or of the number that it is, by name, as a language writes it."""
    dtypes = {a.name: a.dtype_of(binding) for a in kernel.arguments if a.kind != "structure"}
    return {name: notation.types[dtype] for name, dtype in dtypes.items() if dtype in notation.types}


# -- a template in Jinja ------------------------------------------------------------------------------------------


def _fill(
    kernel: Kernel, file: str, notation: Notation, point: SimpleNamespace, binding: Workload, arch: str
) -> str:
    spaces: dict[str, dict[str, Any]] = {"dims": dict(binding.dims), "options": dict(binding.options)}
    spaces["types"] = types_of(kernel, notation, binding)
    named = {"p": point, **{name: SimpleNamespace(**values) for name, values in spaces.items()}}
    try:
        template = template_environment(kernel.folder, template_root()).get_template(file)
        return template.render(**named, dtype=binding.dtype, arch=arch)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{kernel.folder / (error.name or file)}, line {error.lineno}: {error.message}") from error
    except jinja2.UndefinedError as error:
        place = _place(error, kernel.folder / file)
        said, known_of = "'types.SimpleNamespace object' has no attribute", "p, dims, options or types lack"
        message = (error.message or "").replace(said, known_of)
        known = ", ".join(["dtype", "arch", *(f"{of}.{name}" for of, values in named.items() for name in vars(values))])
        raise TemplateError(f"{place}: {message}; there are {known}") from error
    except Exception as error:  # a filter or an expression in the template failed
        raise TemplateError(f"{_place(error, kernel.folder / file)}: {error}") from error


def _place(error: BaseException, file: Path) -> str:
    """Place of an error, in `file` or in a file that it includes. Jinja rewrites tracebacks so that the innermost template
    frame carries the template's own file and line."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return next((f"{name}, line {line}" for name, line in reversed(frames) if name.endswith(".j2")), str(file))
