"""The native launcher, built once on this machine by PyTorch's own extension builder, and loaded from then on.

It needs a C++ compiler, ninja and Python's headers when it is built, and no CUDA toolkit. What was built is kept for each
version of PyTorch and Python. A package for which there is none launches from Python instead.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.machinery
import importlib.util
import json
import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .cpu import compiler, machine, run, temporary_folder
from .dispatch import Dispatch
from .package import CACHE_VARIABLE, Unavailable, cache_folder, digest

_SOURCE = "frontend.cpp"
_HEADERS = ("call.h", "choice.h", "driver.h", "function.h", "native.h")
_RUNTIME = Path(__file__).resolve().parent
_FLAGS = ("-O1", "-fvisibility=hidden")  # calls are as fast as at -O2; a build takes 3/4 of the time
_MODULE = "evo_native"
_BUILD = "import json, sys; from torch.utils.cpp_extension import load; load(**json.loads(sys.argv[1]))"
"""In a process of its own: the builder takes half a second to import, and loads what it builds."""

NONE, PAY, ALL = 0, 1, 2
"""Calls that record gradients that a frontend serves; PAY: where that costs a training step no time."""


class Native:
    """The native launcher of one package.

    operator: its name among torch.ops. fake: what the operator gives for tensors without data. use(call): told the
    function to call, once there is one: the arguments by position; None: leave it to PyTorch. backward: of the package
    within this one that computes gradients. source: its code, where that does not lie in the package as frontend.cpp.
    original: the function of Python that it stands in for, if that is no operator of PyTorch's.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        operator: str,
        fake: Callable[..., Any],
        use: Callable[[Native], None],
        backward: Dispatch | None = None,
        *,
        source: str | None = None,
        original: Callable[..., Any] | None = None,
    ) -> None:
        self.call: Callable[..., Any] | None = None
        self.explain: Callable[..., str] | None = None
        self.operator: Any = None
        self.reason = ""
        """Why there is none; empty if there is one."""
        self._dispatch, self._package, self._name, self._fake, self._use = dispatch, dispatch.package, operator, fake, use
        self._backward, self._source, self._original = backward, source, original
        self._extension: Any = None
        try:
            library = self._library(create=False)
            if library.is_file():
                self._load(library)
            else:
                self.reason = f"it is not built; build it with: python -m {self._package.name} build"
        except Unavailable as reason:
            self.reason = str(reason)

    def build(self) -> Path:
        """Builds it, unless that was done before, and has this process use it from here on: half a minute. Returns the
        library. Raises RuntimeError, with what is missing here; a GPU is not, so that it can be built for elsewhere."""
        try:
            library = self._library(create=True)
            if not library.is_file():
                _build(library, self._source or self._package.path(_SOURCE), self._package.folders)
            if self.call is None:
                self._load(library)
        except Unavailable as reason:
            self.reason = str(reason)
            raise RuntimeError(f"the native launcher cannot be built: {reason}; calls are launched from Python") from None
        return library

    def serve_gradients(self, which: int) -> None:
        """Which calls that record gradients are served: NONE, those that PAY, or ALL."""
        if self._extension is not None:
            self._extension.serve_gradients(which)

    def _library(self, create: bool) -> Path:
        """Where the library for this machine lies, or will. Raises Unavailable."""
        if not machine().startswith("linux-"):
            raise Unavailable("it runs on Linux only")
        folder = cache_folder(create)
        if folder is None:
            raise Unavailable(
                "the folder to keep it in must be this user's and writable by nobody else (chmod go-w); name one in"
                f" {CACHE_VARIABLE}"
            )
        if self._source is not None:
            source = self._source.encode()
        elif self._package.path(_SOURCE).is_file():
            source = self._package.read(_SOURCE)
        else:
            raise Unavailable("this package has none")
        included = sorted(h for h in self._package.headers(source) if not h.startswith("runtime/"))
        texts = [source, *(self._package.read(h) for h in included)]
        texts += [(_RUNTIME / h).read_bytes() for h in _HEADERS]
        abi = getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)
        made_for = (torch.__version__, torch.version.git_version, str(abi), sysconfig.get_config_var("SOABI"), machine())
        return folder / f"{self._name}-{digest(*texts, *map(str, made_for), *_FLAGS)[:20]}.so"

    def _load(self, library: Path) -> None:
        """Raises Unavailable."""
        name = f"{library.stem}.{_MODULE}"  # pybind11 keeps one module for each name
        loader = importlib.machinery.ExtensionFileLoader(name, str(library))
        space = "evo_" + self._package.name.replace(".", "_")
        try:
            spec = importlib.util.spec_from_loader(name, loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            self._extension = module.Operator(space, *_table(self._dispatch))
            if self._original is not None:
                self._extension.use_original(self._original)
            if self._backward is not None:
                self._extension.use_backward(*_table(self._backward))
                self._backward.natives.append(self._extension)
        except (ImportError, OSError, RuntimeError) as error:
            raise Unavailable(f"{library} does not load ({str(error).partition(chr(10))[0]})") from error
        torch.library.register_fake(f"{space}::{self._name}", self._fake)
        self.operator = getattr(getattr(torch.ops, space), self._name).default
        self._dispatch.natives.append(self._extension)
        self.call, self.explain, self.reason = self._extension.call, self._extension.explain, ""
        self._use(self)


def _table(dispatch: Dispatch) -> tuple[Any, ...]:
    """What a Table of native.h is made of."""
    package = dispatch.package
    fixed = zip(package.dimensions, package.fixed["cpu"], package.fixed["cuda"], strict=True)
    dimensions = [(d["low"], d["high"], *on_both) for d, *on_both in fixed]  # Dimension of choice.h
    return dispatch.family, dispatch.retire, dimensions


def _build(library: Path, source: str | Path, folders: Iterable[Path]) -> None:
    """source: the code, or a file of it. folders: of local headers, beside the run time's. Raises Unavailable."""
    with temporary_folder(library.parent) as folder, library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with its process, however that ends
        if library.is_file():  # another process has built it meanwhile
            return
        if isinstance(source, str):
            (written := folder / "function.cpp").write_text(source, encoding="utf-8")
            source = written
        request = {
            "name": _MODULE,
            "sources": [str(source)],
            "extra_include_paths": [str(_RUNTIME.parent), *map(str, folders)],  # #include "runtime/native.h"
            "extra_cflags": list(_FLAGS),
            "build_directory": str(folder),
            "with_cuda": False,
        }
        run([sys.executable, "-W", "ignore", "-c", _BUILD, json.dumps(request)], cwd=folder, env=_environment())
        (folder / f"{_MODULE}.so").replace(library)


def _environment() -> dict[str, str]:
    """Environment of the builder, with a compiler named, and ninja on the path. Raises Unavailable."""
    command, _ = compiler()
    places = [str(Path(sys.executable).parent)]  # of a virtual environment that was not activated
    with suppress(ImportError, AttributeError):
        places.append(importlib.import_module("ninja").BIN_DIR)
    return {**os.environ, "PATH": os.pathsep.join([*places, os.environ.get("PATH", "")]), "CXX": shlex.join(command)}
