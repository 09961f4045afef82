"""A Python package that stands alone: PyTorch's function, with tuned variants behind it where they apply.

What lies in it: __init__.py; the kernel's function.py and kernel.py, by which its function is made and judged, with what
they import of the kernel's folder, of its family and of evo.problem (problem/); or in place of these the kernel's own
frontend.py, frontend.cpp and what they share with others (_shared/); the run time (evo/runtime, as it is);
manifest.json, the provenance; for each variant, a winner built for one architecture, its readable source
and its binary; sources for sizes that nothing was tuned for; the local headers that the sources include.

A source is rendered for the sizes that are compiled in. Where one of them stands in it as a number and decides nothing
else of its text, another number there is another size's source: byte for byte the one that would be rendered for that.
Which sizes a genome is legal for and what a launch then needs is asked of the kernel's own space and plan, and listed, so
that a package carries neither. Beside its variants it carries sources for whole ranges of sizes, for those that no
variant's genome is legal for: `general` in table [module] of formats.toml, and what all of these have in common, `every`.
"""

from __future__ import annotations

import ast
import itertools
import keyword
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from evo import __version__, runtime
from evo.errors import KernelError, SpaceError, TemplateError, UsageError
from evo.export import Contents, Exporter, ExportRequest, check_replaceable, with_manifest
from evo.export._package import build_package, plan_record, workload_record
from evo.problem.formats import all_tables, unfit
from evo.problem.genome import Genome
from evo.problem.kernel import FUNCTION_FILES, SAME, Dimension, Kernel, Workload
from evo.problem.loading import load_function, load_kernel, template_root
from evo.problem.render import Source, render
from evo.problem.space import Space
from evo.runtime.manifest import MANIFEST, compiled_when_loaded, read_manifest
from evo.runtime.nvrtc import own_arch
from evo.runtime.package import BACKWARD, INIT, MAIN, NESTED, Unavailable, slower
from evo.runtime.statement import Bound
from evo.targets import Target, find_language, find_target

_RUNTIME = Path(runtime.__file__).parent
_NATIVE_FRONTEND = "frontend.cpp"
_TAKEN = frozenset({"evo", "torch", *sys.stdlib_module_names})
_INTRODUCTION = '''"""{title} for PyTorch, in place of {replaces}.

What no variant serves is left to PyTorch. Found and written by evo {version}; manifest.json tells how.

    python -m PACKAGE build     build the native launcher: cheaper calls
    python -m PACKAGE check     compare with PyTorch and float64
    python -m PACKAGE bench     time beside PyTorch
    python -m PACKAGE show      what it was tuned for, and whether that runs here
"""
'''


def _advice(out: Path) -> list[str]:
    busy = "right, its time not known (the machine was too busy)"
    variants = read_manifest(out / MANIFEST)["variants"]
    number = Counter((v["arch"], busy if (v["timing"] or {}).get("disturbed") else v["standing"]) for v in variants)
    run = f"python -m {out.name}"
    lines = [f"built for {'; '.join(f'{arch}: {n} {standing}' for (arch, standing), n in number.items())}"]
    lines.append(f"try it:  {run} check   and   {run} bench   in {out.resolve().parent}")
    if any((out / file).is_file() for file in (_NATIVE_FRONTEND, FUNCTION_FILES[0])):
        lines.append(f"build its native launcher, once a machine, which makes calls cheaper:  {run} build")
    return lines


def remarks(out: Path) -> list[str]:
    """Sentences on what was requested and is missing or replaced in an export, with the reasons."""
    manifest = read_manifest(out / MANIFEST)
    found = remarks(out / BACKWARD) if (out / BACKWARD / MANIFEST).is_file() else []
    for v in manifest["variants"]:
        if instead := v["instead_of"]:
            told = f"is {v['candidate']}, not {instead['candidate']} ({instead['reason']})"
            found.append(f"{v['workload']['key']}: what is built for {v['arch']} {told}")
        for p in (v, *v.get("points", ())):
            if reason := slower({**v, **p}):
                found.append(f"{p['workload']['key']}: left to PyTorch on {v['arch']} ({reason})")
    for m in manifest["left_out"]:
        found.append(f"{m['workload']}: nothing is exported for {m['arch']}; of {m['candidate']}, for one: {m['reason']}")
    return found


def make_package(*parts: ExportRequest) -> Contents:
    """Makes the package, also for other formats.

    An item's record may hold `source_digest`, the digest of the measured source. If another one is rendered now it is
    refused, because the record would not be true of it. Raises UsageError for that, for a kernel without function.py, for
    an architecture that nothing can be built for; TemplateError and CompileError.
    """
    kernel = load_kernel(parts[0].kernel)
    offered = _offered_by(kernel)
    manifest, files = build_package(kernel, parts)
    if any(part.few for part in parts):
        manifest["variants"] = _merged(manifest["variants"], files, parts)
    _add_fallbacks(kernel, manifest, files)
    for record in (*manifest["variants"], *manifest["general"]):  # only now: templates write for which one they are rendered
        arch = record["arch"]
        try:
            own = own_arch(files[record["source"]].decode(), arch)
        except Unavailable as error:
            raise KernelError(f"kernel {kernel.name!r}, {record['source']}: {error}") from None
        record |= {name: own for name in ("arch", "measured_arch") if record.get(name) == arch}
    introduction = _INTRODUCTION.format(title=kernel.title, replaces=kernel.replaces or "its own", version=__version__)
    files["__init__.py"] = f"{introduction}\n{INIT}".encode()
    files["__main__.py"] = MAIN.encode()
    files |= {f"runtime/{path.name}": path.read_bytes() for path in _RUNTIME.iterdir() if path.suffix in (".py", ".h")}
    return manifest, files | offered


def with_backward(format: str, make: Callable[..., Contents]) -> Callable[..., Contents]:
    """Makes the package as `make` does, also for requests of two kernels, one of which is the other's backward: a package
    within the package. Raises UsageError for a backward whose forward does not give what it takes."""

    def contents(*parts: ExportRequest) -> Contents:
        kernels = {part.kernel: load_kernel(part.kernel) for part in parts}
        names = {kernel.name for kernel in kernels.values()}
        backward = [part for part in parts if kernels[part.kernel].backward_of in names]
        forward = [part for part in parts if part not in backward]
        manifest, files = make(*forward)
        if backward:
            _check_given(kernels[backward[0].kernel], kernels[forward[0].kernel], forward)
            _check_pair(kernels[backward[0].kernel], kernels[forward[0].kernel])
            nested = with_manifest(format, *make(*backward))
            if "__init__.py" in nested:
                introduction, _, init = nested["__init__.py"].partition(INIT.encode())
                nested["__init__.py"] = b"".join([introduction, NESTED.encode(), INIT.encode(), init])
            files |= {f"{BACKWARD}/{n}": data for n, data in nested.items() if not n.startswith("runtime/")}
        return manifest, files

    return contents


def _check_given(backward: Kernel, forward: Kernel, parts: Sequence[ExportRequest]) -> None:
    """Raises UsageError if no winner gives the outputs of the forward that the backward takes."""
    outputs = [a.name for a in forward.arguments if a.kind == "output"]
    known = {a.name for a in forward.arguments if a.kind == "input"} | {f"d{name}" for name in outputs}
    wanted = [a.name for a in backward.arguments if a.kind == "input" and not a.optional and a.name not in known]
    given = [dict(item.workload.options) for part in parts for item in part.items]
    if not any(all(options.get(name) for name in wanted) for options in given):
        raise UsageError(
            f"{backward.name} takes {' and '.join(wanted)}, which none of these winners of {forward.name} gives: search it"
            f" for a workload with {','.join(f'{name}=true' for name in wanted)}, too"
        )


def _check_pair(backward: Kernel, forward: Kernel) -> None:
    """Raises KernelError if both functions are stated, and autograd of the one cannot call the other."""
    one, other = load_function(forward), load_function(backward)
    if one is not None and other is not None:
        try:
            Bound(one, forward).passed_to(Bound(other, backward))
        except ValueError as error:
            raise KernelError(f"{backward.folder / FUNCTION_FILES[0]}: {error}") from None


_NEAR = 1.5
"""How many times the time of a problem's winner another variant may take, and stand in for it."""
_ABLE = ("target", "arch", "measured_on")
_SAME = ("target", "arch", "measured_on", "launch", "fixed", "standing")
_OF_POINT = ("candidate", "workload", "timing", "record")


def _merged(
    variants: Sequence[dict[str, Any]], files: dict[str, bytes], parts: Sequence[ExportRequest]
) -> list[dict[str, Any]]:
    """The variants with each code once: its `points` are the further problems that it won, and those that it could run
    where their own winner was slower than PyTorch, which is not kept: the fastest there of those that are, with `slowdown`,
    its time over the winner's, if that is known to be near. Files that are not needed any more are taken out of `files`."""
    kept: list[dict[str, Any]] = []
    for v in sorted(variants, key=lambda v: bool(slower(v))):
        names, code = (_ABLE, None) if slower(v) else (_SAME, files[v["binary"]])
        alike = (k for k in kept if all(k[n] == v[n] for n in names) and code in (None, files[k["binary"]]))
        same = [k for k in alike if _compiled_in(k) == _compiled_in(v)]
        if not same:
            kept.append({**v, "points": []})
            continue
        near = _near(v, parts) if slower(v) else {}
        times = [near.get(Genome.of(k["genome"]).digest, math.inf) for k in same]
        least = min(times)
        known = {"slowdown": round(least, 3)} if least < math.inf else {}
        same[times.index(least)]["points"].append({name: v[name] for name in _OF_POINT} | known)
    needed = {name for v in kept for name in (v["source"], v["binary"])}
    for name in {name for v in variants for name in (v["source"], v["binary"])} - needed:
        del files[name]
    return kept


def _near(winner: Mapping[str, Any], parts: Sequence[ExportRequest]) -> dict[str, float]:
    """The candidates for a winner's problem that its search timed as near to it, by the digest of their genomes: their times
    over its."""
    items = parts[winner["measured_on"]].items
    item = next(i for i in items if i.workload.key == winner["workload"]["key"])
    if item.timing is not None:  # of an earlier export, which has the one that is near, if any is
        return {item.genome.digest: item.score}
    found = dict[str, float]()
    for other in itertools.chain([item], item.alternatives):
        if not other.score <= _NEAR * item.score < math.inf:
            break
        found.setdefault(other.genome.digest, max(1.0, other.score / item.score))
    return found


def _compiled_in(variant: Mapping[str, Any]) -> tuple[Any, ...]:
    workload = variant["workload"]
    return workload["dtype"], *(workload["dims"][name] for name in variant["fixed"])


def check_module(kernel: Kernel, workloads: Sequence[Workload], out: Path) -> None:
    """Raises, before a search whose winners are to become a module, what would keep all of them from that: UsageError for
    the folder or the workloads, and what `_offered_by` raises."""
    check_replaceable(out, EXPORTER.name)
    _check_name(out)
    _offered_by(kernel)
    table = all_tables(kernel).get(EXPORTER.name, {})
    if all(reasons := [unfit(table, workload) for workload in workloads]):
        raise UsageError(f"no winner for {workloads[0].key} can be exported: {reasons[0]}")


def _importable_package(*parts: ExportRequest) -> Contents:
    """The folder's name is the one to import. Raises what `_check_name` and `make_package` raise."""
    _check_name(parts[0].out)
    return make_package(*parts)


def _check_name(out: Path) -> None:
    """Raises UsageError for a folder whose name cannot be imported."""
    name = out.absolute().name
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise UsageError(
            f"the folder's name becomes the module's, and {name!r} cannot be imported: use letters, digits and _"
        )
    if name in _TAKEN:
        raise UsageError(f"a module called {name!r} would hide the one of that name: choose another --out")


def _offered_by(kernel: Kernel) -> dict[str, bytes]:
    """The files by name that make and judge the function that PyTorch code calls. Raises UsageError if the kernel has
    neither a statement of it nor a frontend, which is not run; KernelError for what cannot be read, or does not fit the
    kernel."""
    stated, frontend = (kernel.folder / file for file in FUNCTION_FILES)
    if frontend.is_file():
        if not re.search(r"^__all__ = ", frontend.read_text(encoding="utf-8"), re.MULTILINE):
            raise KernelError(f"{frontend} does not say what is public: define __all__ = [...]")
        found = dict[str, bytes]()
        _check_alone(frontend, frontend.read_text(encoding="utf-8"))
        for path in filter(Path.is_file, (frontend, kernel.folder / _NATIVE_FRONTEND)):
            found |= {path.name: path.read_bytes()} | _shared_by(kernel, path.read_text(encoding="utf-8"))
        return found
    if load_function(kernel) is None:
        raise UsageError(
            f"kernel {kernel.name!r} has no {stated.name} in {kernel.folder}, the function that PyTorch code would call:"
            " write one like that of a kernel which evo new NAME makes, or export a record of it with --format t4"
        )
    return _imported(kernel, "kernel.py", stated.name)


def _imported(kernel: Kernel, *first: str) -> dict[str, bytes]:
    """Modules of a kernel and what they import of its folder, of families and of evo.problem, by their names in a package,
    where they refer to each other. Raises KernelError for an import of something that a package cannot have."""
    found, waiting = dict[str, bytes](), list(first)
    while waiting:
        name = waiting.pop()
        if name in found or name.startswith("runtime/"):
            continue
        path = next(filter(Path.is_file, _places_of(kernel, name)), None)
        if path is None:
            raise KernelError(f"the modules of kernel {kernel.name!r} import {name}, which is not in {kernel.folder}")
        text = path.read_text(encoding="utf-8")
        dots = "." * (name.count("/") + 1)
        renamed = {"problem": f"{dots}problem", "errors": f"{dots}problem.errors", "runtime": f"{dots}runtime"}
        text = re.sub(r"(?m)^([ \t]*)import (evo\.[\w.]+)\.(\w+) as (\w+)[ \t]*$", r"\1from \2 import \3 as \4", text)
        for part, to in renamed.items():
            text = re.sub(rf"(?m)^(\s*)from evo\.{part}\b", rf"\1from {to}", text)
        _check_alone(path, text)
        found[name] = text.encode()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                above = name.split("/")[: -node.level]
                module = [*above, *(node.module or "").split(".")] if node.module else above
                as_file = "/".join(module) + ".py"
                if as_file.startswith("runtime/") or (node.module and any(p.is_file() for p in _places_of(kernel, as_file))):
                    waiting.append(as_file)
                else:
                    waiting += ["/".join([*module, alias.name]) + ".py" for alias in node.names]
    return found


def _check_alone(path: Path, text: str) -> None:
    """Raises KernelError for an import that only works where the kernel lies. text: what a package has of the file."""
    for node in ast.walk(ast.parse(text)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        for module in modules:
            first = module.partition(".")[0]
            beside = (path.parent / f"{first}.py").is_file() and first not in sys.stdlib_module_names
            if first == "evo" or beside:
                raise KernelError(
                    f"{path}, line {getattr(node, 'lineno', 0)}: a package that stands alone cannot import {module}: write"
                    " from .MODULE import NAME for one beside it; of evo, it may have what is imported from"
                    " evo.problem.MODULE, evo.runtime.MODULE or evo.errors"
                )


def _places_of(kernel: Kernel, name: str) -> list[Path]:
    """Where a module of a package may come from."""
    if name == "problem/errors.py":
        return [_RUNTIME.parent / "errors.py"]
    if name.startswith("problem/"):
        return [_RUNTIME.parent / name]
    return [kernel.folder / name, template_root() / name]


def _shared_by(kernel: Kernel, frontend: str) -> dict[str, bytes]:
    """The files that a frontend, in Python or C++, shares with others: those that its text imports from or includes of
    `_shared`, which must need nothing else of it. Raises KernelError for a missing file."""
    names = [f"_shared/{module}.py" for module in re.findall(r"^from \._shared\.(\w+) import ", frontend, re.MULTILINE)]
    names += re.findall(r'^#include "(_shared/[\w.]+)"', frontend, re.MULTILINE)
    found = {}
    for name in names:
        path = next((p for p in (kernel.folder / name, template_root() / name) if p.is_file()), None)
        if path is None:
            raise KernelError(f"the frontend of kernel {kernel.name!r} needs {name}, which is not in {template_root()}")
        found[name] = path.read_bytes()
    return found


# -- sources for sizes that nothing was tuned for ---------------------------------------------------------------

_REACH = 4
"""Largest factor between a variant's own size and the sizes that it is compiled for."""
_PER_DOUBLING = 128
"""Largest number of sizes between one and its double that are listed."""
_MOST_LISTED = 512
"""Largest number of sizes of a general source that are asked for each; of a longer range, `_PROBES` are."""
_PROBES = 64


def _add_fallbacks(kernel: Kernel, manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    """Adds `jit` to the records of variants, and a list `general` of further sources, which are added to `files`.

    None and nothing for a target for which the kernel compiles in no size, or several. Raises KernelError for a wrong table
    of the kernel's, TemplateError.
    """
    manifest["general"] = []
    for target in map(find_target, dict.fromkeys(v["target"] for v in manifest["variants"])):
        variants = [v for v in manifest["variants"] if v["target"] == target.name]
        fixed = [d for d in kernel.dimensions if d.name in kernel.compile_time_dims[target.name]]
        # One source is enough for machine code and PTX: it is compiled where it runs.
        machine_code = {v["workload"]["key"] for v in variants if not compiled_when_loaded(v["arch"])}
        for v in variants:
            v["jit"] = None
            needless = compiled_when_loaded(v["arch"]) and v["workload"]["key"] in machine_code
            if len(fixed) == 1 and not needless and v["recipe"] is not None:
                workload = kernel.workload(target.name, v["workload"]["key"])
                form = _Form(kernel, target, fixed[0], workload, Genome.of(v["genome"]), v["arch"])
                v["jit"] = form.described(form.around())
        if len(fixed) == 1:
            for record, source in _general(kernel, target, fixed[0], variants):
                manifest["general"].append(record)
                files |= {n: text.encode() for n, text in {record["source"]: source.text, **source.includes}.items()}


@dataclass(frozen=True)
class _Form:
    """A genome, and the source that is its own at every size of the dimension that is compiled in."""

    kernel: Kernel
    target: Target
    dimension: Dimension
    workload: Workload
    genome: Genome
    arch: str

    @property
    def own(self) -> int:
        return self.workload.dim(self.dimension.name)

    def render(self, size: int | _Blank) -> Source:
        fixed = replace(self.workload, dims=((self.dimension.name, size),))  # type: ignore[arg-type]
        # PTX is compiled from the text that machine code of that architecture is.
        return render(self.kernel, self.target.name, self.genome, fixed, self.target.machine_code(self.arch))

    def launch(self, size: int) -> dict[str, Any] | None:
        """The plan of a launch; None where the genome is not legal."""
        workload = _with_size(self.workload, self.dimension.name, size)
        space = _space_of(self.kernel, self.target, workload, self.arch)
        if space is None or not space.is_legal(self.genome.parameters):
            return None
        return plan_record(self.kernel, self.target.name, self.genome, workload)

    def around(self) -> Iterator[int]:
        """Sizes not far from its own: all, or where there are too many, the multiples of a power of two."""
        size = max(self.dimension.low, self.own // _REACH)
        while size <= min(self.dimension.high, self.own * _REACH):
            yield size
            step = max(1, (1 << size.bit_length() >> 1) // _PER_DOUBLING)
            size = (size // step + 1) * step

    def described(self, sizes: Iterable[int]) -> dict[str, Any] | None:
        """A record for the manifest: where in the source the size stands, and the sizes it may be, with the fields of their
        launches that differ from its own. None if the source depends on the size in another way, or none is legal."""
        launches = {n: launch for n in sizes if (launch := self.launch(n)) is not None}
        blanks = self._blanks({self.own, min(launches), max(launches)}) if launches else None
        if blanks is None:
            return None
        own = plan_record(self.kernel, self.target.name, self.genome, self.workload)
        return {"dimension": self.dimension.name, "blanks": blanks, "sizes": _as_ranges(launches, own)}

    def _blanks(self, sizes: Iterable[int]) -> list[int] | None:
        """Where the size begins in the source for the workload, in bytes; None if a source for one of `sizes` is another
        one than that says."""
        try:
            parts = self.render(_Blank()).text.encode().split(_Blank.MARK)
            if any(self.render(n).text.encode() != str(n).encode().join(parts) for n in sizes):
                return None
        except TemplateError:  # the template computes with it
            return None
        own = str(self.own).encode()
        return [len(own.join(parts[: i + 1])) for i in range(len(parts) - 1)]


class _Blank(jinja2.StrictUndefined):
    """A stand-in for a size: a template may print it, and nothing else."""

    MARK = b"\0size\0"

    def __str__(self) -> str:  # type: ignore[override]
        return self.MARK.decode()


def _general(
    kernel: Kernel, target: Target, dimension: Dimension, variants: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], Source]]:
    """The kernel's own sources for ranges of sizes, for the dtypes and compiled-in options that variants have."""
    arch = min((v["arch"] for v in variants), key=lambda a: (int("".join(filter(str.isdigit, a)) or 0), a))
    samples: dict[tuple[object, ...], Workload] = {}
    for variant in variants:
        sample = kernel.workload(target.name, variant["workload"]["key"])
        samples.setdefault((sample.dtype, kernel.binding(target.name, sample).options), sample)
    table = all_tables(kernel).get("module", {})
    every = table.get("every", {})
    for stated in table.get("general", []):
        parameters = {**every.get("parameters", {}), **stated.get("parameters", {})}
        row = {**every, **stated, "parameters": parameters}
        if missing := sorted({"target", "dtypes", "from", "to", "as_for"} - set(row)):
            raise KernelError(f"kernel {kernel.name!r}: a source in [module] general of formats.toml lacks {missing[0]!r}")
        for sample in samples.values():
            if row["target"] == target.name and sample.dtype in row["dtypes"]:
                workload = _with_size(sample, dimension.name, row["as_for"])
                yield _general_record(_Form(kernel, target, dimension, workload, Genome.of({}), arch), row)


def _general_record(bare: _Form, row: Mapping[str, Any]) -> tuple[dict[str, Any], Source]:
    """The record of a general source, like a variant's but without a binary; and the source. bare: without a genome, which
    the row of the kernel's table gives. Raises KernelError."""
    kernel, target, workload, name = bare.kernel, bare.target, bare.workload, bare.dimension.name
    first, last, step = row["from"], row["to"], row.get("step", 1)
    where = f"kernel {kernel.name!r}, [module] general, for {name} from {first} to {last}"
    space = _space_of(kernel, target, workload, bare.arch)
    if space is None:
        raise KernelError(f"{where}: the kernel does not take {name}={row['as_for']}")
    form = replace(bare, genome=Genome.of(space.adapted(row.get("parameters", {}))))
    launch = form.launch(form.own)
    if launch is None:
        raise KernelError(f"{where}: {'; '.join(space.violations(form.genome.parameters))}")
    in_row = range(first, last + 1, step)
    all_listed = len(in_row) <= _MOST_LISTED
    sizes = in_row if all_listed else {in_row[(len(in_row) - 1) * i // _PROBES] for i in range(_PROBES + 1)}
    described = form.described(sizes)
    if described is None:
        raise KernelError(f"{where}: the source depends on it in another way than as a number in it")
    if not all_listed:
        if any(form.launch(n) != launch for n in sizes):
            raise KernelError(f"{where}: not every size in it is legal with one and the same launch")
        described["sizes"] = [{"first": first, "last": last} | ({"step": step} if step > 1 else {})]
    source = form.render(form.own)
    language, options = find_language(source.language), dict(kernel.binding(target.name, workload).options)
    on = "".join(f"_{v if n in kernel.choices else n}" for n, v in options.items() if v and v != SAME)
    record = {
        "target": target.name,
        "arch": form.arch,
        "workload": workload_record(kernel, workload),
        "fixed": list(kernel.compile_time_dims[target.name]),
        "genome": form.genome.parameters,
        "source": f"general_{workload.dtype}{on}_{first}_to_{last}{language.suffix}",
        "recipe": language.recipe(source.flags),
        "launch": launch,
        "jit": described,
    }
    return record, source


def _space_of(kernel: Kernel, target: Target, workload: Workload, arch: str) -> Space | None:
    """The search space of a workload; None where the kernel does not take it."""
    if kernel.validate(workload):
        return None
    try:
        return kernel.space(target.name, workload, target.limits(arch))
    except SpaceError:
        return None


def _with_size(workload: Workload, name: str, size: int) -> Workload:
    return replace(workload, dims=tuple((n, size if n == name else k) for n, k in workload.dims))


_OF_RANGE: Mapping[str, Any] = {"step": 1, "launch": {}, "growth": {}}
"""The fields of a range that states nothing else. Its last size is then the first."""


def _as_ranges(launches: Mapping[int, Mapping[str, Any]], own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sizes with the same distance from one to the next, whose launches are the same or, for three or more, grow by the same
    from one to the next: `launch` has what the first one's has others than `own`, and what grows."""
    sizes, found = sorted(launches), []
    steps = [(n - m, _growth(launches[m], launches[n])) for m, n in itertools.pairwise(sizes)]
    at = 0
    while at < len(sizes):
        last = at
        while last < len(steps) and steps[last] == steps[at]:
            last += 1
        step, growth = steps[at] if last > at else (1, {})
        if growth is None or (growth and last == at + 1):
            last, step, growth = at, 1, {}
        first = launches[sizes[at]]
        changed = {name: value for name, value in first.items() if value != own.get(name) or name in growth}
        more = {"last": sizes[last], "step": step, "launch": changed, "growth": growth}
        found.append({"first": sizes[at]} | {n: v for n, v in more.items() if v != _OF_RANGE.get(n, sizes[at])})
        at = last + 1
    return found


def _growth(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, int] | None:
    """Growth of the numbers in a launch over those in another; None where the two differ otherwise."""
    growth = {n: v - one[n] for n, v in other.items() if v != one.get(n) and type(v) is type(one.get(n)) is int}
    grown = {**one, **{name: one[name] + more for name, more in growth.items()}}
    return growth if grown == other and all(more > 0 for more in growth.values()) else None


EXPORTER = Exporter(name="module", contents=with_backward("module", _importable_package), advice=_advice, holds="several")
