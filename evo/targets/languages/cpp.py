"""C++ with OpenMP, compiled by the system's compiler into shared libraries.

Architectures are what -march takes: native (this machine's), x86-64-v3, znver4, armv8-a, ...
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from evo.errors import CompileError, DeviceError, UsageError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.runtime.cpu import features, model
from evo.targets import Language

if TYPE_CHECKING:
    from evo.problem.render import Source


class Cpp:
    """The methods are those of `evo.targets.Language`. `compiler`: name or path; None takes the first of
    g++, c++, clang++."""

    name = "cpp"
    title = "C++"
    targets: tuple[str, ...] = ("cpu",)
    suffix = ".cpp"
    headers: tuple[str, ...] = (".h",)
    plain = True
    types: Mapping[str, str] = {
        "float16": "_Float16", "bfloat16": "unsigned short", "float32": "float", "float64": "double",
        "float8_e4m3fn": "unsigned char", "float8_e5m2": "unsigned char", "bool": "bool", "uint8": "unsigned char",
        "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    }  # fmt: skip
    """A dtype that C++ lacks has the type of its bits."""
    declares_kernels = False

    def __init__(self, compiler: str | None = None) -> None:
        self._compiler = compiler

    def compiler(self) -> str:
        """Name of the compiler with the processor, on which the meaning of -march=native depends."""
        instructions = hashlib.sha256(" ".join(sorted(features())).encode()).hexdigest()[:8]
        return f"{compiler_version(compiler_path(self._compiler))}, on {model()} [{instructions}]"

    def linker(self) -> str:
        return ""

    def compile(self, source: Source, arch: str, workdir: Path, device_arch: str = "") -> Binary:
        """Raises CompileError; DeviceError for no compiler or an unknown arch; UsageError for a full disk."""
        from evo.targets._machine_code import code_hash

        path = compiler_path(self._compiler)
        check_arch(path, arch)
        command = [
            path,
            *FLAGS,
            f"-march={arch}",
            *source.flags,
            *(f"-I{folder}" for folder in source.include_dirs),
            _SOURCE,
            "-o",
            _LIBRARY,
            # clang's OpenMP calls (__kmpc_...) need its own runtime, linked.
            *(() if "clang" in compiler_version(path) else LIBRARIES),
        ]
        try:
            (workdir / _SOURCE).write_text(source.text, encoding="utf-8")
            done = subprocess.run(
                command,
                cwd=workdir,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            log = done.stdout.strip()
            if "No space left on device" in log or "Disk quota exceeded" in log:
                raise UsageError(f"the compiler ran out of disk space in {workdir} or the temporary folder: free some")
            if done.returncode:
                raise CompileError(log or f"{path} failed without a word: exit code {done.returncode}")
            code = (workdir / _LIBRARY).read_bytes()
        except OSError as error:
            raise UsageError(
                f"cannot compile in {workdir} ({error.strerror}): free some space or fix its rights"
            ) from error
        return Binary(code=code, code_hash=code_hash(code), log=log)

    def occupancy(self, binary: Binary, launch: Launch, limits: Limits) -> float | None:
        return None

    def recipe(self, flags: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {"flags": [*FLAGS, *flags], "libraries": list(LIBRARIES)}


_CANDIDATES = ("g++", "c++", "clang++")
_REMEDY = "install one (apt install g++, dnf install gcc-c++, xcode-select --install)"

# IEEE semantics (no -ffast-math, which also sets a mode bit of the whole process), except that errno and traps are
# ignored, and a*b+c may be fused, as CUDA does by default.
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

# Linked with -fopenmp, a candidate would load libgomp in addition to PyTorch's own copy: two pools of threads that
# compete for the cores. So libraries are named without it; the session provides PyTorch's runtime instead.
LIBRARIES = ("-nodefaultlibs", "-Wl,--as-needed", "-Wl,--build-id=none", "-lstdc++", "-lm", "-lgcc_s", "-lgcc", "-lc")

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
            f"{compiler_version(path)} knows no CPU architecture {arch!r}: use native, or one such as x86-64-v3"
        )


_FEATURE = re.compile(
    r"^#define __((?:S?SSE|SSSE|AVX|AMX|FMA|BMI|F16C|LZCNT|POPCNT|MOVBE|TBM|XOP|V?AES|V?PCLMUL|GFNI|SHA|ADX|SM[34])\w*?"
    r"|ARM_FEATURE_\w+)(?:__)? ",
    re.MULTILINE,
)
"""Macros of instruction sets that a compiler may use on its own."""


@cache
def extra_features(path: str, arch: str) -> tuple[str, ...]:
    """Instruction sets of -march=`arch` that -march=native, this machine, lacks. Both must be known to the compiler."""
    return tuple(sorted(_features(path, arch) - _features(path, "native")))


def _features(path: str, arch: str) -> set[str]:
    command = [path, f"-march={arch}", "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return set(_FEATURE.findall(done.stdout))


LANGUAGE: Language = Cpp()
