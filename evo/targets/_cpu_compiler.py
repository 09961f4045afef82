"""Finds the machine's C++ compiler and has ninja run it: one source file to one shared library."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from evo.errors import CompileError, DeviceError, UsageError
from evo.problem.render import Source

__all__ = ["FLAGS", "LIBRARIES", "build_library", "check_arch", "compiler_path", "compiler_version", "extra_features"]

_CANDIDATES = ("g++", "c++", "clang++")
_REMEDY = "install one (apt install g++, dnf install gcc-c++, xcode-select --install)"

# IEEE semantics stay (no -ffast-math, which also sets a mode bit of the whole process): errno and traps are
# not looked at, and a*b+c may be fused, as CUDA does by default.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-Wno-psabi",
    "-fdiagnostics-color=never",
    "-pipe",
)

# -fopenmp at the link would tie a candidate to libgomp beside PyTorch's own copy: two pools of threads that
# fight for the cores. So the libraries are named, without it; the session offers PyTorch's runtime instead.
LIBRARIES = ("-nodefaultlibs", "-Wl,--as-needed", "-Wl,--build-id=none", "-lstdc++", "-lm", "-lgcc_s", "-lgcc", "-lc")

_ALLOWED = re.compile(
    r"-O([0-3sgz]|fast)?|-f(?!plugin)[\w=+:,.-]+|-m[\w=+,.-]+|-W(?![lap],)[\w=+-]+|--param[= ][\w-]+=\d+"
    r"|-[DU][A-Za-z_]\w*(=[\w.+-]*)?|-std=(c|gnu)\+\+\d\w|-g\d?"
)
"""What a candidate may ask for: optimisation, code generation, macros; no paths, plug-ins, linker options."""

_SECONDS_OF_CPU = 600
"""A compiler that outlives the process that wanted its result ends after this much work."""

_SOURCE, _LIBRARY = "candidate.cpp", "candidate.so"


@cache
def compiler_path(wanted: str | None = None) -> str:
    """Absolute path of `wanted`, or of the first of g++, c++ and clang++ there is. Raises DeviceError."""
    names = (wanted,) if wanted else _CANDIDATES
    for name in names:
        if found := shutil.which(name):
            return found
    raise DeviceError(f"no C++ compiler found (looked for {', '.join(names)}): {_REMEDY}")


@cache
def compiler_version(path: str) -> str:
    """Name and version as the compiler gives them: g++ (Debian 12.2.0-14) 12.2.0. Raises DeviceError."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"the C++ compiler {path} does not run ({error}): {_REMEDY}") from error
    return done.stdout.partition("\n")[0].strip()


@cache
def check_arch(path: str, arch: str) -> None:
    """Raises DeviceError if the compiler has no -march=`arch`."""
    known = re.fullmatch(r"[a-z0-9][\w.+-]*", arch) is not None
    if known and arch != "native":
        command = [path, f"-march={arch}", "-fsyntax-only", "-x", "c++", "/dev/null"]
        known = subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    if not known:
        raise DeviceError(
            f"{compiler_version(path)} knows no CPU architecture {arch!r}: use native, or such as x86-64-v3"
        )


_FEATURE = re.compile(
    r"^#define __((?:S?SSE|SSSE|AVX|AMX|FMA|BMI|F16C|LZCNT|POPCNT|MOVBE|TBM|XOP|V?AES|V?PCLMUL|GFNI|SHA|ADX|SM[34])\w*?"
    r"|ARM_FEATURE_\w+)(?:__)? ",
    re.MULTILINE,
)
"""Macros that stand for instructions a compiler may choose by itself."""


@cache
def extra_features(path: str, arch: str) -> tuple[str, ...]:
    """Instruction sets of -march=`arch` that -march=native, this machine, lacks. Both must be known to the compiler."""
    return tuple(sorted(_features(path, arch) - _features(path, "native")))


def _features(path: str, arch: str) -> set[str]:
    command = [path, f"-march={arch}", "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return set(_FEATURE.findall(done.stdout))


@cache
def _ninja() -> str:
    """The binary of the PyPI package, or the system's. Raises DeviceError."""
    try:
        import ninja

        name = str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        name = "ninja"
    found = shutil.which(name) or shutil.which("ninja")
    if found is None:
        raise DeviceError("ninja was not found: pip install ninja")
    return found


def build_library(source: Source, arch: str, compiler: str, workdir: Path) -> tuple[bytes, str]:
    """The shared library and the compiler's warnings.

    Raises CompileError with the compiler's log, UsageError if `workdir` is full or cannot be written to.
    """
    is_clang = "clang" in compiler_version(compiler)
    command = [
        compiler,
        *FLAGS,
        f"-march={arch}",
        *_checked(source.flags),
        *(f"-I{folder}" for folder in source.include_dirs),
        _SOURCE,
        "-o",
        _LIBRARY,
        *(() if is_clang else LIBRARIES),  # clang's OpenMP calls (__kmpc_...) need its own runtime, linked
    ]
    shell = f"export LC_ALL=C; ulimit -t {_SECONDS_OF_CPU}; exec {shlex.join(command)}"
    rule = shell.replace("$", "$$")
    try:
        (workdir / _SOURCE).write_text(source.text, encoding="utf-8")
        steps = f"rule library\n  command = {rule}\nbuild {_LIBRARY}: library {_SOURCE}\n"
        (workdir / "build.ninja").write_text(steps, encoding="utf-8")
        done = subprocess.run(
            [_ninja(), "--quiet", "-C", str(workdir)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        log = done.stdout.rpartition(shell)[2].replace("ninja: build stopped: subcommand failed.", "").strip()
        if "No space left on device" in log or "Disk quota exceeded" in log:
            raise UsageError(f"the compiler ran out of disk space in {workdir} or the temporary folder: free some")
        if done.returncode:
            raise CompileError(log or f"{compiler} failed without a word: {done.stderr.strip()}")
        return (workdir / _LIBRARY).read_bytes(), log
    except OSError as error:
        raise UsageError(
            f"cannot compile in {workdir} ({error.strerror}): free some space or fix its rights"
        ) from error


def _checked(flags: Iterable[str]) -> list[str]:
    for flag in flags:
        if not _ALLOWED.fullmatch(flag):
            raise CompileError(
                f"compiler flag {flag!r} is not one a candidate may set for target cpu: "
                f"-O, -f, -m, -W, -D, -U, -g, -std and --param are"
            )
    return list(flags)
