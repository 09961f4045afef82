"""The owners' packages that judge exports in their formats; a test is skipped, with the reason, where one is missing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from typing import Any

import pytest


def flashinfer_bench() -> Any:
    return _import("flashinfer_bench", "pip install 'evo-kernels[formats]'")


def huggingface_kernels() -> Any:
    spec = importlib.util.find_spec("kernels")
    if spec is not None and spec.origin is None:  # the folder of that name here, which is no package
        pytest.skip("kernels is not installed; pip install 'evo-kernels[formats]'")
    return _import("kernels", "pip install 'evo-kernels[formats]'")


def kernelbench(module: str) -> Any:
    """kernelbench.MODULE. Its helpers import clients of language models, which evaluating does not use: where these are not
    installed, empty modules stand in."""
    if importlib.util.find_spec("kernelbench") is None:
        pytest.skip("KernelBench is not on PYTHONPATH: clone github.com/ScalingIntelligence/KernelBench, and add its src/")
    for client, name in (("openai", "OpenAI"), ("litellm", "completion")):
        if client not in sys.modules and importlib.util.find_spec(client) is None:
            sys.modules[client] = importlib.util.module_from_spec(ModuleSpec(client, None))
            setattr(sys.modules[client], name, None)
    return _import(f"kernelbench.{module}", "pip install python-dotenv requests tqdm")


def _import(name: str, remedy: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports that are not ours
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported ({error}); {remedy}")
