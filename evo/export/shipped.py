"""What lies in kernels/: of a package of `module`, the manifest and the sources. It is for this repository: `evo.ready`
finds it there, takes the frontend and the headers from the templates, and has the sources compiled where they run."""

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from evo.export import Contents, Exporter
from evo.export.module import make_package, with_backward

_KEPT_OF_RECORD = ("run", "order", "operator", "device", "created")
_OF_BINARY = ("binary", "binary_sha256", "same_code_as_measured")
_MOST_EDITED = 100
"""Up to so many lines and edits, a source is told by how it differs from one that is stored."""


def _sources_of(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> Contents:
    """Leaves out PTX (a source is compiled for newer GPUs, too), binaries, headers, and what the database tells better."""
    variants = []
    for v in (v for v in manifest["variants"] if not v["arch"].startswith("compute_")):
        kept = {name: value for name, value in v.items() if name not in _OF_BINARY} | _origin(v)
        if "points" in v:
            kept["points"] = [p | _origin(p) for p in v["points"]]
        variants.append(kept)
    names = dict.fromkeys(r["source"] for r in (*variants, *manifest["general"]))
    edited = _told_by_edits({name: files[name].decode() for name in names})
    told = {**manifest, "variants": variants, "headers": {}, "edited": edited}
    return told, {name: files[name] for name in names if name not in edited}


def _origin(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"record": {name: record["record"][name] for name in _KEPT_OF_RECORD if name in record["record"]}}


def _told_by_edits(texts: Mapping[str, str]) -> dict[str, list[Any]]:
    """Of the sources that are much like an earlier one, by name, how they differ from it, as `Package.source` reads it."""
    known: dict[str, list[str]] = {}
    told: dict[str, list[Any]] = {}
    for name, text in texts.items():
        lines = text.split("\n")
        others = ((_edits(before, lines), other) for other, before in known.items())
        edits, nearest = min(others, default=([], ""), key=lambda pair: _size(pair[0]))
        if nearest and _size(edits) <= _MOST_EDITED:
            told[name] = [nearest, *edits]
        known[name] = lines
    return told


def _edits(before: list[str], after: list[str]) -> list[list[Any]]:
    changes = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    found = [(i, j - i, after[k:m]) for what, i, j, k, m in reversed(changes) if what != "equal"]
    return [[first, number, "\n".join(lines)] if lines else [first, number] for first, number, lines in found]


def _size(edits: list[list[Any]]) -> int:
    return sum(2 + sum(text.count("\n") + 1 for text in texts) for _, _, *texts in edits)


EXPORTER = Exporter(
    name="shipped",
    contents=with_backward("shipped", lambda *parts: _sources_of(*make_package(*parts))),
    advice=lambda out: [f"once it lies in kernels/, try it:  python -m evo.ready.{out.name} check"],
    holds="several",
)
