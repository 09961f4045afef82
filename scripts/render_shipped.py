"""Renders the sources of kernels/ again, after a template was mended in a way that changes no choice of a search.

    python scripts/render_shipped.py attention "why it was mended" [--dry]

Genomes, launches and recorded timings stay. What follows from the text is made anew: sources, digests, registers, hashes of
the machine code. It compiles with the release of NVRTC that the manifest names (scripts/other_nvrtc.sh has one beside the
environment's own); another release is refused. `--dry` prints registers and spills before and after, and writes nothing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evo.export import MANIFEST, sha256_of, written
from evo.export.module import _Form, _general
from evo.export.shipped import stored
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.runtime.manifest import read_manifest
from evo.targets import compile_source, find_target

KERNELS = Path(__file__).resolve().parent.parent / "kernels"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="below kernels/, such as layernorm/backward")
    parser.add_argument("reason")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    folder = KERNELS / options.folder
    manifest = read_manifest(folder / MANIFEST)
    here = find_target("cuda").compiler()
    if other := {v["compiler"] for v in manifest["variants"]} - {here}:
        parser.error(f"{folder} was compiled by {', '.join(other)}, and {here} is here: run it with that one")
    kernel = load_kernel(manifest["kernel"]["name"])
    texts = {v["source"]: mended(kernel, v, dry=options.dry) for v in manifest["variants"]}
    fixed = [d for d in kernel.dimensions if d.name in kernel.compile_time_dims["cuda"]]
    for record, source in _general(kernel, find_target("cuda"), fixed[0], manifest["variants"]):
        next(g for g in manifest["general"] if g["source"] == record["source"])["jit"] = record["jit"]
        texts[record["source"]] = source.text
    if options.dry:
        return
    kept = {name: digest for name, digest in manifest["files"].items() if "/" in name}  # the backward's
    for name in {*manifest["files"]} - {*kept}:
        (folder / name).unlink()
    files = stored(texts)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    manifest["files"] = dict(sorted({**kept, **{name: sha256_of(data) for name, data in files.items()}}.items()))
    again = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "reason": options.reason}
    manifest["rendered_again"] = [*manifest.get("rendered_again", []), again | {"measured_as": manifest["kernel"]["digest"]}]
    manifest["kernel"]["digest"] = kernel.digest
    (folder / MANIFEST).write_bytes(written(manifest))
    read_manifest(folder / MANIFEST)  # refuses what it cannot read


def mended(kernel: Kernel, record: dict[str, Any], *, dry: bool) -> str:
    """The text of a variant's source; its record follows."""
    workload = kernel.workload("cuda", record["workload"]["key"])
    genome = Genome.of(record["genome"])
    target = find_target("cuda")
    source = render(kernel, "cuda", genome, workload, record["arch"])
    with TemporaryDirectory() as workdir:
        binary = compile_source(source, record["arch"], Path(workdir))
    before = (record["registers"], record["spill_bytes"])
    print(f"{record['source']} {record['arch']}: registers, spills {before} -> {(binary.registers, binary.spill_bytes)}")
    if dry:
        return source.text
    record |= {
        "code_hash": binary.code_hash,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "smem_static_bytes": binary.smem_static_bytes,
    }
    if "source_digest" in record:
        record["source_digest"] = source.digest
    dimensions = [d for d in kernel.dimensions if d.name in kernel.compile_time_dims["cuda"]]
    form = _Form(kernel, target, dimensions[0], workload, genome, record["arch"])
    record["jit"] = form.described(form.around())
    return source.text


if __name__ == "__main__":
    main()
