"""The winners of an earlier export, as requests of exporters: what another run found is added to them in a new one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evo.errors import UsageError
from evo.export import MANIFEST, ExportItem, ExportRequest
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.loading import load_kernel
from evo.ready import packages
from evo.runtime.manifest import compiled_when_loaded, read_manifest
from evo.runtime.package import BACKWARD


def folder_of(name: str) -> Path | None:
    """The folder of an export that is named by a path with a slash, ./NAME, or as evo.ready.NAME; None where the name is no
    export's, but perhaps a run's."""
    folder = packages().get(name, Path(name) if "/" in name else None)
    return folder if folder is not None and (folder / MANIFEST).is_file() else None


def requests_from(folder: Path, out: Path, others: Sequence[ExportRequest] = ()) -> list[ExportRequest]:
    """A request for each machine on which variants of an export were measured, also of its backward. Variants that were only
    compiled for an architecture are made anew: of these, or where they are not legal there, of those. others: a kernel of
    one's own lies where these have it. Raises UsageError for an export that cannot be read."""
    try:
        manifest = read_manifest(folder / MANIFEST)
    except ImportError as error:
        raise UsageError(str(error)) from error
    if "variants" not in manifest:
        raise UsageError(f"{folder} is an export of format {manifest.get('format')}, which holds no variants to add to")
    known = {load_kernel(part.kernel).name: part.kernel for part in others}
    reference, found = known.get(manifest["kernel"]["name"], manifest["kernel"]["name"]), []
    kernel = load_kernel(reference)
    again = {"rendered_again": manifest["rendered_again"]} if "rendered_again" in manifest else {}
    elsewhere: dict[str, list[ExportItem]] = {}
    for v in manifest["variants"]:
        if v["standing"] != "measured":
            for item in _items(kernel, {**v, "source_digest": None}):
                elsewhere.setdefault(item.workload.key, []).append(item)
    for number, machine in enumerate(manifest["measured_on"]):
        own = [v for v in manifest["variants"] if v["measured_on"] == number and v["standing"] == "measured"]
        for target, arch in dict.fromkeys((v["target"], v["arch"]) for v in own if not compiled_when_loaded(v["arch"])):
            alike = [v for v in own if (v["target"], v["arch"]) == (target, arch)]
            items = (item for v in alike for item in _items(kernel, v))
            found.append(
                ExportRequest(
                    kernel=reference,
                    digest=manifest["kernel"]["digest"],
                    target=target,
                    arch=arch,
                    items=tuple(replace(item, alternatives=elsewhere.get(item.workload.key, ())) for item in items),
                    out=out,
                    environment={**machine, **again},
                    builds=_architectures(manifest["variants"], target),
                    few=any(v["points"] for v in alike),
                )
            )
    if (folder / BACKWARD / MANIFEST).is_file():
        found += requests_from(folder / BACKWARD, out, others)
    return found


def _architectures(variants: Sequence[Mapping[str, Any]], target: str) -> tuple[str, ...]:
    of_target = (v["arch"] for v in variants if v["target"] == target)
    return tuple(dict.fromkeys(arch for arch in of_target if not compiled_when_loaded(arch)))


def _items(kernel: Kernel, variant: Mapping[str, Any]) -> Iterator[ExportItem]:
    """What a variant won: of a problem that another candidate won, which was slower than PyTorch and is not kept, the
    variant stands for that one."""
    code = {name: variant[name] for name in ("source_digest", "code_hash") if name in variant}
    for won in (variant, *variant["points"]):
        yield ExportItem(
            workload=kernel.workload(variant["target"], won["workload"]["key"]),
            genome=Genome.of(variant["genome"]),
            candidate=won["candidate"],
            record={**won["record"], **code},
            timing=won["timing"],
            score=won.get("slowdown", math.inf),
        )


def beside(parts: Sequence[ExportRequest], earlier: Sequence[ExportRequest]) -> list[ExportRequest]:
    """Requests, and of earlier exports what they have no winner for, which the first of these that has one gives. All are
    for the architectures that an earlier export holds, too."""
    builds = {part.target: part.builds for part in reversed(earlier)}
    found = [replace(part, builds=(*dict.fromkeys((part.arch, *builds.get(part.target, ()))),)) for part in parts]
    for part in earlier:
        known = {(other.kernel, other.target, other.arch, item.workload) for other in found for item in other.items}
        left = [i for i in part.items if (part.kernel, part.target, part.arch, i.workload) not in known]
        found += [replace(part, items=tuple(left))] if left else []
    return found
