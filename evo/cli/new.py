"""evo new: the folder of a new kernel, small and complete, or made around an existing CUDA source."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from evo.adoption import ARCH, CPU, FILES, TARGET, adopt
from evo.adoption.folder import rendered
from evo.cli.options import Json, answer
from evo.errors import UsageError
from evo.problem.loading import kernel_names, own_notations, unfilled
from evo.problem.plain import text_of
from evo.report.terminal import Terminal
from evo.targets import answers

_STARTER = Path(__file__).with_name("_starter")


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the kernel, and of the folder to make.")],
    cu: Annotated[Path | None, typer.Option("--cu", metavar="FILE.cu", help="Source to search: CUDA, or C++ (CPU).")] = None,
    entry: Annotated[str | None, typer.Option(help="The kernel of a source that has several.")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the source instead of linking to it.")] = False,
    json: Json = False,
) -> None:
    """Write the folder of a new kernel: a small complete one to change, or one around your own source."""
    folder = Path(name)
    if not (name.isascii() and name.isidentifier()):
        raise UsageError(f"{name!r} cannot be a kernel's name: use letters, digits and underscores, no digit first")
    if name in kernel_names():
        raise UsageError(f"{name!r} is the name of a kernel that comes with evo: choose another; nothing was written")
    if folder.exists():
        raise UsageError(f"{name} exists: choose another name, or remove it; nothing was written")
    if cu is None and (entry is not None or copy):
        what = "--entry names a function of" if entry is not None else "--copy copies"
        raise UsageError(f"{what} the file given with --cu, which is missing")
    adopted = adopt(cu, entry) if cu is not None else None
    facts = {"name": name, "file": cu and cu.name, "k": adopted}
    files = rendered(facts, "kernel.py", "function.py")
    links = dict[str, Path]()
    if cu is not None and adopted is not None:
        source = FILES[adopted.target]
        links = {source: cu, **{header: cu.parent / header for header in adopted.headers}}
        if adopted.variables:
            files[f"{source}.j2"] = adopted.as_template(text_of(links.pop(source)))
        if adopted.target != CPU:
            files |= rendered(facts, FILES[CPU])
    else:
        starters = [(n.targets[0], path) for n in own_notations() if (path := _STARTER.with_suffix(n.suffix)).is_file()]
        files |= {f"{target}{path.suffix}": path.read_text() for target, path in starters}
    try:
        for file, text in files.items():
            _place(folder / file).write_text(text, encoding="utf-8")
        for file, path in links.items():
            if copy:
                _place(folder / file).write_bytes(path.read_bytes())
            else:
                at = _place(folder / file)
                at.symlink_to(os.path.relpath(path.resolve(), at.parent.resolve()))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}): run evo new in a folder of yours") from error
    steps = [f"evo check {name}" if answers(TARGET) else f"evo check {name} --arch {ARCH}"]  # without a GPU it compiles
    if adopted and adopted.target == CPU:
        steps = [f"evo check {name} --target {CPU}"]
    record = {
        "folder": name,
        "files": sorted({**files, **links}),
        "links": {file: str(path) for file, path in links.items() if not copy},
        "entry": adopted.entry if adopted else "vector_add",
        "parameters": adopted.parameters if adopted else {},
        "left_out": adopted.left_out if adopted else (),
        "to_fill_in": [
            {"file": file, "line": line, "what": what}
            for file in ("kernel.py", "function.py") for line, what in unfilled(folder / file)
        ],
        "next": steps if cu else [f"evo check {name} --target cpu", f"evo search {name} --target cpu --budget 30s", *steps],
    }
    answer(json, record, _print_new)


def _place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _print_new(console: Terminal, record: dict[str, Any]) -> None:
    folder, linked = record["folder"], set(record["links"])
    console.say(f"wrote {', '.join(f'{folder}/{file}' for file in record['files'] if file not in linked)}")
    for file, path in record["links"].items():
        console.say(f"linked {folder}/{file} to {path}, which is searched as it is (--copy copies it)")
    if record["left_out"]:
        console.say(f"left out when {record['entry']} is compiled for a GPU: {', '.join(record['left_out'])}")
    values = {name: ", ".join(map(str, v)) or "numbers up to that of cores" for name, v in record["parameters"].items()}
    found = "; ".join(f"{name} in {text}" for name, text in values.items())
    if FILES[CPU] in record["files"] and not record["to_fill_in"]:
        found = "on a GPU block_size_x, per_thread; on a CPU threads, chunk"
    console.say(f"to be searched: {found or 'nothing yet: give kernel.py parameters that the source uses as macros'}")
    for place in record["to_fill_in"]:
        console.say(f"fill in {folder}/{place['file']}, line {place['line']}: {place['what']}")
    console.say(f"{'then' if record['to_fill_in'] else 'next'}: {'; '.join(record['next'])}")
