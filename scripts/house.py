"""How much there is to learn: lines and files of each room, words of the documentation, classes, modules that only one
other module imports, and the files and types that a candidate passes on its way from `ask` to its row.

    python scripts/house.py [FOLDER]     # of this checkout, or of another one

The way of a candidate is listed by hand below, as docs/architecture.md draws it; the script fails where a name on it does
not exist any more.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

WAY = {
    "evo/search/samplers/evolution.py": (),
    "evo/search/loop.py": (),
    "evo/search/tasks.py": (),
    "evo/evaluation.py": ("Proposal", "Candidate", "Binary", "Build", "Check", "Timing", "Evaluation"),
    "evo/executors/local.py": (),
    "evo/executors/_worker.py": (),
    "evo/problem/render.py": ("Source",),
    "evo/targets/languages/cuda_cpp.py": (),
    "evo/runtime/nvrtc.py": (),
    "evo/targets/_machine_code.py": (),
    "evo/executors/_device.py": (),
    "evo/measure/__init__.py": ("Request",),
    "evo/targets/__init__.py": ("Loaded",),
    "evo/targets/_cuda_session.py": (),
    "evo/targets/_cuda_loaded.py": (),
    "evo/measure/gate.py": (),
    "evo/measure/harness.py": (),
    "evo/measure/clock.py": (),
    "evo/lineage/store.py": (),
    "evo/lineage/write.py": (),
}
"""File: the types in it that a candidate passes."""


def tracked(root: Path, *folders: str) -> list[Path]:
    """Files under version control, generated ones left out by that."""
    out = subprocess.run(["git", "ls-files", "-z", *folders], cwd=root, capture_output=True, text=True, check=True)
    return [root / name for name in out.stdout.split("\0") if name and (root / name).is_file()]


def lines(paths: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def words(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths if path.suffix == ".md")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, own: str, is_package: bool, known: set[str]) -> set[str]:
    """Modules of evo that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = own.split(".")
                above = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*above, *([base] if base else [])])
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found & known


def importers(root: Path, sources: list[Path]) -> dict[str, set[str]]:
    """By module that is no package: who imports it."""
    names = {module_name(path, root): path for path in sources}
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for other in imported(tree, name, path.name == "__init__.py", set(names)):
            if other != name:
                found[other].add(name)
    return {n: found[n] for n, path in names.items() if path.name not in ("__init__.py", "__main__.py")}


def defines(path: Path, name: str) -> bool:
    return path.is_file() and f"class {name}" in path.read_text(encoding="utf-8")


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    sources = [p for p in tracked(root, "evo") if p.suffix == ".py"]
    print(f"{'room':<22}{'lines':>8}{'files':>7}")
    rooms: dict[str, list[Path]] = defaultdict(list)
    for path in tracked(root, "evo"):
        parts = path.relative_to(root).parts
        rooms["/".join(parts[:2]) if len(parts) > 2 else "evo/*.py"].append(path)
    for room, paths in sorted(rooms.items()):
        print(f"{room:<22}{lines(paths):>8,}{len(paths):>7}")
    for top in ("evo", "tests", "templates", "kernels", "benchmarks", "scripts"):
        paths = tracked(root, top)
        print(f"{top:<22}{lines(paths):>8,}{len(paths):>7}")
    print(f"words: README {words([root / 'README.md']):,}, docs/ {words(tracked(root, 'docs')):,}")
    classes = sum(isinstance(n, ast.ClassDef) for p in sources for n in ast.walk(ast.parse(p.read_text(encoding="utf-8"))))
    alone = sorted(name for name, who in importers(root, sources).items() if len(who) == 1)
    print(f"classes in evo: {classes}; modules with one importer: {len(alone)}")
    print(*(f"    {name}" for name in alone), sep="\n")
    missing = [f"{file}: {name}" for file, names in WAY.items() for name in names if not defines(root / file, name)]
    print(f"a candidate passes {len(WAY)} files and {sum(map(len, WAY.values()))} types")
    if missing:
        print(*(f"not there any more: {name}" for name in missing), sep="\n", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
