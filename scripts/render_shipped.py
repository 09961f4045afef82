"""Renders the sources of kernels/ again, after a template was mended in a way that changes no choice of a search.

    python scripts/render_shipped.py attention "why it was mended" [--dry]

Genomes, launches and recorded timings stay. What follows from the text is made anew: sources, digests, registers, hashes of
the machine code. It compiles with the release of NVRTC that the manifest names (scripts/other_nvrtc.sh has one beside the
environment's own); another release is refused. `--dry` prints registers and spills before and after, and writes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evo.export import _lines
from evo.export.module import _Form, _general
from evo.export.shipped import _told_by_edits
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.runtime.package import Package
from evo.targets import find_target

KERNELS = Path(__file__).resolve().parent.parent / "kernels"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="below kernels/, such as layernorm/backward")
    parser.add_argument("reason")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    folder = KERNELS / options.folder
    manifest = json.loads((folder / "manifest.json").read_text())
    here = find_target("cuda").compiler()
    if other := {v["compiler"] for v in manifest["variants"]} - {here}:
        parser.error(f"{folder} was compiled by {', '.join(other)}, and {here} is here: run it with that one")
    kernel = load_kernel(manifest["kernel"]["name"])
    texts = {v["source"]: mended(kernel, v, dry=options.dry) for v in manifest["variants"]}
    fixed = [d for d in kernel.dimensions if d.name in kernel.compile_time_dims["cuda"]]
    for record, source in _general(kernel, find_target("cuda"), fixed[0], manifest["variants"]):
        old = next(g for g in manifest["general"] if g["source"] == record["source"])
        old |= {name: record[name] for name in ("source_sha256", "jit")}
        texts[record["source"]] = source.text
    if options.dry:
        return
    manifest["edited"] = _told_by_edits(texts)
    for name in {*manifest["files"]} - {n for n in manifest["files"] if n.startswith("backward/")}:
        (folder / name).unlink()
        del manifest["files"][name]
    for name, text in texts.items():
        if name not in manifest["edited"]:
            (folder / name).write_bytes(text.encode())
            manifest["files"][name] = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"] = dict(sorted(manifest["files"].items()))
    again = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "reason": options.reason}
    manifest["rendered_again"] = [*manifest.get("rendered_again", []), again | {"measured_as": manifest["kernel"]["digest"]}]
    manifest["kernel"]["digest"] = kernel.digest
    (folder / "manifest.json").write_text(_lines(json.loads(json.dumps(manifest)), 0) + "\n")
    Package(folder.name, [str(folder)])  # refuses what it cannot read


def mended(kernel: Kernel, record: dict[str, Any], *, dry: bool) -> str:
    """The text of a variant's source; its record follows."""
    workload = kernel.workload("cuda", record["workload"]["key"])
    genome = Genome.of(record["genome"])
    target = find_target("cuda")
    source = render(kernel, "cuda", genome, workload, record["arch"])
    with TemporaryDirectory() as workdir:
        binary = target.compile(source, record["arch"], Path(workdir))
    before = (record["registers"], record["spill_bytes"])
    print(f"{record['source']} {record['arch']}: registers, spills {before} -> {(binary.registers, binary.spill_bytes)}")
    if dry:
        return source.text
    record |= {
        "source_sha256": hashlib.sha256(source.text.encode()).hexdigest(),
        "source_digest": source.digest,
        "code_hash": binary.code_hash,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "smem_static_bytes": binary.smem_static_bytes,
    }
    dimensions = [d for d in kernel.dimensions if d.name in kernel.compile_time_dims["cuda"]]
    form = _Form(kernel, target, dimensions[0], workload, genome, record["arch"])
    record["jit"] = form.described(record["launch"], form.around())
    return source.text


if __name__ == "__main__":
    main()
