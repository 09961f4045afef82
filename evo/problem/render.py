"""Jinja template + genome + workload = source. Sandboxed, and strict about undefined names."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from evo.errors import TemplateError
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload, template_root


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rendered source text with everything that the compiled code depends on except the compiler."""

    text: str
    target: str
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


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@cache
def template_environment(*folders: Path) -> SandboxedEnvironment:
    """Templates are text, not HTML, and are looked up in these folders."""
    return SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(kernel: Kernel, target: str, genome: Genome, workload: Workload, arch: str) -> Source:
    """The source of one candidate.

    Template variables: `p` (the genome's parameters), `dtype`, `dims` and `options` (those that are compiled in), `arch`.
    Raises TemplateError with the file, the line and what is wrong.
    """
    file, binding = _template_file(kernel, target), kernel.binding(target, workload)
    try:
        text = template_environment(kernel.folder, template_root()).get_template(file).render(
            p=SimpleNamespace(**{**kernel.inactive.get(target, {}), **genome.parameters}),
            dtype=binding.dtype,
            dims=SimpleNamespace(**dict(binding.dims)),
            options=SimpleNamespace(**dict(binding.options)),
            arch=arch,
        )
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{kernel.folder / (error.name or file)}, line {error.lineno}: {error.message}") from error
    except jinja2.UndefinedError as error:
        place = _place(error, kernel.folder / file)
        raise TemplateError(f"{place}: {error.message}; parameters here: {', '.join(genome.parameters)}") from error
    except Exception as error:  # a filter or an expression in the template failed
        raise TemplateError(f"{_place(error, kernel.folder / file)}: {error}") from error
    return Source(
        text=text,
        target=target,
        entry=kernel.entry,
        flags=tuple(kernel.compile_flags(target, genome.parameters)),
        include_dirs=(str(kernel.folder), str(template_root())),
    )


def _template_file(kernel: Kernel, target: str) -> str:
    """Name of the kernel's one template for a target: the target's, the language's, and j2. Raises TemplateError."""
    found = sorted(path.name for path in kernel.folder.glob(f"{target}.*.j2"))
    if len(found) != 1:
        raise TemplateError(
            f"kernel {kernel.name!r} needs one template for target {target} in {kernel.folder}, {target}.LANGUAGE.j2, such"
            f" as cuda.cu.j2 or cpu.cpp.j2; it has {', '.join(found) or 'none'}"
        )
    return found[0]


def _place(error: BaseException, file: Path) -> str:
    """Where it happened, in `file` or in what that includes. Jinja rewrites tracebacks so that the innermost template frame
    carries the template's own file and line."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return next((f"{name}, line {line}" for name, line in reversed(frames) if name.endswith(".j2")), str(file))
