"""What lies in kernels/: of a package of `module`, the manifest and the sources. It is for this repository: `evo.ready`
finds it there, takes the frontend and the headers from the templates, and has the sources compiled where they run.

A source that is much like another is told by a unified diff from it; `show --source` of a package prints it whole.
"""

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from evo.errors import UsageError
from evo.export import Contents, Exporter
from evo.export.module import make_package, with_backward
from evo.runtime.manifest import compiled_when_loaded
from evo.runtime.package import DIFFERENCES

_KEPT_OF_RECORD = ("run", "order", "operator", "device", "created")
_OF_BINARY = ("binary", "same_code_as_measured")
_LINES_A_STEP = 3
"""Lines of difference by which a further diff between a source and a whole file must be shorter, because nobody reads a
long chain of diffs."""


def _sources_of(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> Contents:
    """The content of a shipped package: the manifest and the sources, without PTX (a source is compiled for newer GPUs,
    too), binaries, headers, and what the database tells better. A build that nobody measured has no digest of the
    source."""
    variants = []
    for v in (v for v in manifest["variants"] if not compiled_when_loaded(v["arch"])):
        if v["recipe"] is None:
            raise UsageError(f"{v['candidate']} is in a language that is not compiled where it runs: export it as a module")
        left = (*_OF_BINARY, *(["source_digest"] if v["standing"] == "compiled" else []))
        kept = {name: value for name, value in v.items() if name not in left} | _origin(v)
        if "points" in v:
            kept["points"] = [p | _origin(p) for p in v["points"]]
        variants.append(kept)
    names = dict.fromkeys(r["source"] for r in (*variants, *manifest["general"]))
    general = [{name: value for name, value in g.items() if name != "genome"} for g in manifest["general"]]
    return {**manifest, "variants": variants, "general": general}, stored({name: files[name].decode() for name in names})


def _origin(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"record": {name: record["record"][name] for name in _KEPT_OF_RECORD if name in record["record"]}}


def stored(texts: Mapping[str, str]) -> dict[str, bytes]:
    """Files that hold these sources: each whole, or in DIFFERENCES its difference from another one, if that is shorter. A
    minimum spanning tree, by Prim."""
    lines = {name: text.split("\n") for name, text in texts.items()}
    nearest = {name: (len(text), "") for name, text in lines.items()}
    depth, parents = {"": -1}, dict[str, str]()
    while nearest:
        name = min(nearest, key=lambda name: nearest[name])
        parents[name] = parent = nearest.pop(name)[1]
        depth[name] = depth[parent] + 1
        for other, known in nearest.items():
            size = len(_difference(lines[name], lines[other])) + _LINES_A_STEP * (depth[name] + 1)
            nearest[other] = min(known, (size, name))
    told: list[str] = []
    for name in (name for name in texts if parents[name]):
        told += [f"--- {parents[name]}", f"+++ {name}", *_difference(lines[parents[name]], lines[name])]
    files = {name: text.encode() for name, text in texts.items() if not parents[name]}
    return files | ({DIFFERENCES: "\n".join([*told, ""]).encode()} if told else {})


def _difference(before: list[str], after: list[str]) -> list[str]:
    """A unified diff without context and its first two lines. Unlike difflib's own, it takes no frequent line for junk."""
    found = []
    for what, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if what != "equal":
            old, new = (f"{start + (end > start)},{end - start}" for start, end in ((i, j), (k, m)))
            found += [f"@@ -{old} +{new} @@", *(f"-{line}" for line in before[i:j]), *(f"+{line}" for line in after[k:m])]
    return found


EXPORTER = Exporter(
    name="shipped",
    contents=with_backward("shipped", lambda *parts: _sources_of(*make_package(*parts))),
    advice=lambda out: [f"once it lies in kernels/, try it:  python -m evo.ready.{out.name} check"],
    holds="several",
)
