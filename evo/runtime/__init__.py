"""Dispatches and launches kernels that were exported or shipped: PyTorch and the standard library are all it needs.

`evo export` copies this folder into every package it writes, so imports in it are relative. The engine uses single files of
it. A kernel's function is stated (statement.py), and its frontend made of that (function.py). One that cannot be stated is
written by hand, frontend.py, against these names:

    DISPATCH = Dispatch(PACKAGE, module)      the variants of a package; module: the frontend itself
    found = DISPATCH[device, dtype, *sizes]   device: index of the GPU, -1 for the CPU; dtype: torch's; sizes: in the order
                                              of the kernel's dimensions. As cheap as a dict
    found is a str                            why no variant serves this problem: leave it to PyTorch
    found(*values) -> bool                    otherwise a Call. values: the entry point's arguments in order, addresses as
                                              int (0: left out), numbers. True: enqueued on the GPU's current stream (CPU:
                                              done). False: nothing ran: leave it to PyTorch
    found.sizes, found.variant, found.how     the sizes of the key; the variant and how it was chosen, for people
    Table                                     the type of DISPATCH, and of what stands in for it in a trial
    NATIVE = Native(DISPATCH, name, fake, use)  the launcher in C++, frontend.cpp, once it is built
    Patch                                     puts functions in the place of PyTorch's, and takes them away again
    PACKAGE.unasked = frozenset(names)        options, each an output, that a variant may have on where a call has them off:
                                              the frontend throws away what found.variant gives more
    addresses(*tensors) -> tuple | str        where they lie, 0 for None; or why they must be left to PyTorch; RECORDING:
                                              because gradients are recorded
    Recorded.apply(...), derive(...)          such a call nevertheless; PyTorch's derivative of a function
    NONE, PAY, ALL                            which of them are served: none, those that cost a training step no time, all
    workspace(found, tensor) -> list          memory for the Call's workspace arguments, on the device of the tensor

What a frontend passes must be memory of that device and dtype, laid out as the kernel expects. Beside its public names
(__all__), a frontend defines, for `python -m PACKAGE check` and `bench`, and to try code that was compiled on this machine:

    SUBJECT, ORIGINAL                         the function of this package, and PyTorch's that it stands in for; both take
                                              all arguments by position
    served(table, *args)                      the result of what `table` has for a call; None: left to PyTorch. A result
                                              is a tensor, or a tuple of tensors and None
    explain(*args)                            the way a call takes: starts with "variant" or "PyTorch"
    exact(*args)                              the result in float64; integers and bool as they must be
    ties(*args)                               if a result holds positions: by its place among the results, the elements and
                                              their axis, of which any equal one will do (`Argument.ties`)
    comparable(*args)                         if not ORIGINAL's: the result whose error ours may be twice
    cases(sizes, dtype, device, seed)         yields (name, args): random and edge-case calls around a variant's sizes
    timed(sizes, dtype, device, seed)         args of a call of exactly these sizes
    served_sizes(sizes)                       if sizes restrict each other: these, changed into such as are served
    DATA_DECIDE                               if any: names of sizes with which a problem is raced wherever it was measured
    NATIVE, build()                           where there is a frontend.cpp

What several frontends share lies in templates/_shared/: `from ._shared.NAME import ...` and `#include "_shared/NAME.h"`
find it there, and in a package, into which it is copied with the frontend (evo/export/module.py).
"""

from importlib import import_module
from typing import Any

_PROVIDERS = {
    "ALL": "native",
    "Call": "trial",
    "Dispatch": "dispatch",
    "NONE": "native",
    "Native": "native",
    "PAY": "native",
    "Package": "package",
    "Patch": "frontend",
    "RECORDING": "frontend",
    "Recorded": "frontend",
    "Table": "trial",
    "addresses": "frontend",
    "derive": "frontend",
    "frontend_of": "function",
    "main": "commands",
    "workspace": "frontend",
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: the engine uses parts of this without PyTorch."""
    if name not in _PROVIDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f".{_PROVIDERS[name]}", __name__), name)
    return found
