"""What a package needs to compile a variant for a size that nothing was tuned for, written into its manifest.

A source is rendered for the sizes that are compiled in. Where one of them stands in it as a number and decides nothing
else of its text, another number there is another size's source: byte for byte the one that would be rendered for that.
Which sizes a genome is legal for and what a launch then needs is asked of the kernel's own space and plan, and listed, so
that a package carries neither. Beside its variants it carries sources for whole ranges of sizes, for those that no
variant's genome is legal for: the kernel describes them in formats.toml, tables [[module.general]].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from evo.errors import KernelError, SpaceError, TemplateError
from evo.export._manifest import recipe, sha256_of
from evo.problem.formats import all_tables
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Limits, Workload
from evo.problem.render import Source, render
from evo.problem.space import Space
from evo.targets import Target, find_target

__all__ = ["add_fallbacks"]

_REACH = 4
"""A variant is compiled for sizes up to so many times smaller or larger than its own."""
_PER_DOUBLING = 128
"""So many sizes between one and its double are listed; all of them where there are fewer."""
_MOST_LISTED = 512
"""Of a general source's sizes. Of a longer range, `_PROBES` are asked after."""
_PROBES = 64


def add_fallbacks(folder: Path, kernel: Kernel, manifest: dict[str, Any]) -> None:
    """Adds `jit` to the records of variants, and a list `general` of further sources, which are written to `folder`.

    None and nothing for a target for which the kernel compiles in no size, or several. Raises KernelError for a wrong table
    of the kernel's, TemplateError.
    """
    manifest["general"] = []
    for name in dict.fromkeys(v["target"] for v in manifest["variants"]):
        variants = [v for v in manifest["variants"] if v["target"] == name]
        spaces = _Spaces(kernel, find_target(name))
        for record in variants:
            record["jit"] = _of_variant(spaces, record, variants) if spaces.dimension else None
        if spaces.dimension:
            manifest["general"] += _general(folder, spaces, variants, manifest["headers"])


def _of_variant(
    spaces: _Spaces, record: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    key = record["workload"]["key"]
    if record["arch"].startswith("compute_") and any(
        v["workload"]["key"] == key and v["arch"].startswith("sm_") for v in variants
    ):
        return None  # one source of the same is enough: it is compiled where it runs
    workload = spaces.kernel.workload(spaces.target.name, key)
    genome = Genome.of(record["genome"])
    form = _Form(spaces, workload, genome, record["arch"])
    return form.described(record["launch"], form.around())


class _Spaces:
    """Of one kernel and target. `dimension`: the one that is compiled in; None if there is none, or several."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        found = [d for d in kernel.dimensions if d.name in kernel.compile_time_dims[target.name]]
        self.dimension = found[0] if len(found) == 1 else None
        self._limits: dict[str, Limits] = {}

    def launch(self, genome: Genome, workload: Workload, arch: str) -> dict[str, Any] | None:
        """The plan of a launch; None where the genome is not legal."""
        space = self.of(workload, arch)
        if space is None or not space.is_legal(genome.parameters):
            return None
        return asdict(self.kernel.plan(self.target.name, genome.parameters, workload))

    def of(self, workload: Workload, arch: str) -> Space | None:
        """None where the kernel does not take the workload."""
        if arch not in self._limits:
            self._limits[arch] = self.target.limits(arch)
        if self.kernel.validate(workload):
            return None
        try:
            return self.kernel.space(self.target.name, workload, self._limits[arch])
        except SpaceError:
            return None


class _Form:
    """A genome, and the source that is its own at every size."""

    def __init__(self, spaces: _Spaces, workload: Workload, genome: Genome, arch: str) -> None:
        assert spaces.dimension is not None
        self._spaces, self._dimension, self._arch = spaces, spaces.dimension, arch
        self.workload, self.genome = workload, genome
        self.own = workload.dim(self._dimension.name)

    def render(self, size: int | _Blank) -> Source:
        kernel, target = self._spaces.kernel, self._spaces.target.name
        binding = kernel.binding(target, self.workload)
        fixed = replace(binding, dims=((self._dimension.name, size),))  # type: ignore[arg-type]
        # PTX is compiled from the text that machine code of that architecture is.
        return render(kernel, target, self.genome, fixed, self._arch.replace("compute_", "sm_"))

    def around(self) -> Iterator[int]:
        """Sizes not far from its own."""
        return _listed(max(self._dimension.low, self.own // _REACH), min(self._dimension.high, self.own * _REACH))

    def described(self, plan: Mapping[str, Any], sizes: Iterable[int]) -> dict[str, Any] | None:
        """For the manifest: where in the source the size stands, the sizes it may be, how it is compiled. None if the source
        depends on the size in another way, or none is legal. `plan`: the launch at its own size, of which those at others
        are told as changes."""
        name, spaces = self._dimension.name, self._spaces
        changes: dict[int, dict[str, Any]] = {}
        for n in sizes:
            launch = spaces.launch(self.genome, _with_size(self.workload, name, n), self._arch)
            if launch is not None:
                changes[n] = {k: v for k, v in launch.items() if v != plan[k]}
        if not changes:
            return None
        blanks = self._blanks({self.own, min(changes), max(changes)})
        if blanks is None:
            return None
        return {"dimension": name, "blanks": blanks, "sizes": _as_ranges(changes)}

    def _blanks(self, sizes: Iterable[int]) -> list[int] | None:
        """Where the size begins in the source for the workload, in bytes; None if a source for one of `sizes` is another
        one than that says."""
        try:
            parts = self.render(_Blank()).text.encode().split(_Blank.MARK)
            if any(self.render(n).text.encode() != str(n).encode().join(parts) for n in sizes):
                return None
        except TemplateError:  # the template computes with it
            return None
        width, position, found = len(str(self.own)), 0, []
        for part in parts[:-1]:
            position += len(part)
            found.append(position)
            position += width
        return found


class _Blank:
    """In the place of a size: a template may print it, and nothing else."""

    MARK = b"\0size\0"

    def __str__(self) -> str:
        return self.MARK.decode()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the size is not known yet")

    __bool__ = __int__ = __index__ = __float__ = __len__ = __iter__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


def _general(
    folder: Path, spaces: _Spaces, variants: Sequence[Mapping[str, Any]], headers: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The kernel's own sources for ranges of sizes, for the dtypes and compiled-in options that variants have."""
    kernel, target = spaces.kernel, spaces.target.name
    arch = min((v["arch"] for v in variants), key=lambda a: (int("".join(filter(str.isdigit, a)) or 0), a))
    samples: dict[tuple[object, ...], Workload] = {}
    for variant in variants:
        sample = kernel.workload(target, variant["workload"]["key"])
        samples.setdefault((sample.dtype, kernel.binding(target, sample).options), sample)
    for row in all_tables(kernel).get("module", {}).get("general", []):
        if missing := sorted({"target", "dtypes", "from", "to", "as_for"} - set(row)):
            raise KernelError(f"kernel {kernel.name!r}: a table [[module.general]] of its formats.toml lacks {missing[0]!r}")
        for sample in samples.values():
            if row["target"] == target and sample.dtype in row["dtypes"]:
                yield _general_record(folder, spaces, row, sample, arch, headers)


def _general_record(
    folder: Path, spaces: _Spaces, row: Mapping[str, Any], sample: Workload, arch: str, headers: dict[str, str]
) -> dict[str, Any]:
    """As a variant's record, without a binary. Raises KernelError."""
    assert spaces.dimension is not None
    kernel, target, name = spaces.kernel, spaces.target, spaces.dimension.name
    first, last = row["from"], row["to"]
    where = f"kernel {kernel.name!r}, [[module.general]] for {name} from {first} to {last}"
    workload = _with_size(sample, name, row["as_for"])
    space = spaces.of(workload, arch)
    if space is None:
        raise KernelError(f"{where}: the kernel does not take {name}={row['as_for']}")
    known = {n: v for n, v in row.get("parameters", {}).items() if n in space.by_name}  # an architecture may lack some
    form = _Form(spaces, workload, Genome.of(space.complete(known)), arch)
    launch = spaces.launch(form.genome, workload, arch)
    if launch is None:
        raise KernelError(f"{where}: {'; '.join(space.violations(form.genome.parameters))}")
    all_listed = last - first < _MOST_LISTED
    sizes = range(first, last + 1) if all_listed else {first + (last - first) * i // _PROBES for i in range(_PROBES + 1)}
    described = form.described(launch, sizes)
    if described is None:
        raise KernelError(f"{where}: the source depends on it in another way than as a number in it")
    if not all_listed:
        if any(r["launch"] for r in described["sizes"]) or sum(map(_count, described["sizes"])) < len(sizes):
            raise KernelError(f"{where}: not every size in it is legal with one and the same launch")
        described["sizes"] = [{"first": first, "last": last, "step": 1, "launch": {}}]
    source, options = form.render(form.own), dict(kernel.binding(target.name, workload).options)
    file = f"general_{sample.dtype}{''.join(f'_{n}' for n, v in options.items() if v)}_{first}_to_{last}.{target.language}"
    for path, text in {file: source.text, **source.includes}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    headers.update({name: sha256_of(text) for name, text in source.includes.items()})
    return {
        "target": target.name,
        "arch": arch,
        "workload": {
            "dims": dict(workload.dims) | {n: int(v) for n, v in options.items()},
            "dtype": workload.dtype,
        },
        "fixed": list(kernel.compile_time_dims[target.name]),
        "genome": form.genome.parameters,
        "source": file,
        "source_sha256": sha256_of(source.text),
        "recipe": recipe(target.name, source.flags),
        "launch": launch,
        "jit": described,
    }


def _with_size(workload: Workload, name: str, size: int) -> Workload:
    return replace(workload, dims=tuple((n, size if n == name else k) for n, k in workload.dims))


def _listed(first: int, last: int) -> Iterator[int]:
    """All from first to last, or from where there are too many, the multiples of a power of two."""
    size = first
    while size <= last:
        yield size
        step = max(1, (1 << size.bit_length() >> 1) // _PER_DOUBLING)
        size = (size // step + 1) * step


def _as_ranges(changes: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sizes with the same launch and the same distance from one to the next, together."""
    found: list[dict[str, Any]] = []
    for size in sorted(changes):
        latest = found[-1] if found else None
        if latest is not None and latest["launch"] == changes[size]:
            step = size - latest["last"]
            if latest["last"] == latest["first"] or step == latest["step"]:
                latest["last"], latest["step"] = size, step
                continue
        found.append({"first": size, "last": size, "step": 1, "launch": dict(changes[size])})
    return found


def _count(sizes: Mapping[str, Any]) -> int:
    return len(range(sizes["first"], sizes["last"] + 1, sizes["step"]))
