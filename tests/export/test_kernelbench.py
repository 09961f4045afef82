"""KernelBench takes what is exported for it: its static checker, its loader and, on a GPU, its evaluator."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from owners import kernelbench

from evo.errors import UsageError
from evo.export import find_exporter
from evo.problem.loading import template_root
from tests.export.exports import request_for

EXPORTER = find_exporter("kernelbench")
LAYERNORM = ("rows=64,cols=1024,dtype=float16", "rows=32,cols=4096,dtype=float32")
ATTENTION = ("batch=1,heads=4,kv_heads=2,q_len=128,kv_len=128,head_dim=64,dtype=float16,causal=true",)

_DRIVER = r"""
#include <stdio.h>
struct attribute { int id, pad; unsigned value[16]; };
struct config { unsigned grid[3], block[3], smem; void* stream; struct attribute* attributes; unsigned count; };
int aoti_torch_get_current_cuda_stream(int device, void** stream) { *stream = (void*)(99L + device); return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)5; return 0; }
int cuCtxPushCurrent_v2(void* context) { return 0; }
int cuCtxPopCurrent_v2(void** context) { return 0; }
int cuGetErrorName(int e, const char** name) { *name = "CUDA_ERROR_OF_THE_TEST"; return 0; }
int cuModuleLoadData(void** module, const char* image) { *module = (void*)image; return image[0] == 'E'; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
    printf("entry %s\n", name);
    *function = (void*)7;
    return fflush(stdout);
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
    printf("set %d to %d\n", attribute, value);
    return fflush(stdout);
}
int cuLaunchKernelEx(const struct config* c, void* function, void** arguments, void** extra) {
    printf("grid %u %u %u threads %u %u %u smem %u stream %p function %p\n", c->grid[0], c->grid[1], c->grid[2], c->block[0],
           c->block[1], c->block[2], c->smem, c->stream, function);
    for (unsigned i = 0; i < c->count; i++) {
        const unsigned* v = c->attributes[i].value;
        printf("attribute %d: %u %u %u\n", c->attributes[i].id, v[0], v[1], v[2]);
    }
    printf("arguments %lld %lld %.2f\n", *(long long*)arguments[0], *(long long*)arguments[1], *(float*)arguments[2]);
    return c->grid[0] > 9;
}
"""
_CALLS = r"""
#include <c10/util/Exception.h>
#include <cstdio>
#include <cstring>

#include "launcher.cpp"

int main() {
    dlopen("libtorch_cuda.so", RTLD_NOW);
    std::string words(24, 0);
    const long long sizes[] = {12345678901, -3};
    const float number = 0.25f;
    memcpy(&words[0], sizes, 16), memcpy(&words[16], &number, 4);
    launch_entry({7, 5, 0, 8, 2, 1, 64, 4, 1, 65536, 16, 1}, words);
    try {
        launch_entry({7, 5, 0, 10, 1, 1, 32, 1, 1, 0, 1, 0}, words);
    } catch (const c10::Error& error) {
        puts(error.what_without_backtrace());
    }
}
"""
_LOADING = """
import pathlib, sys
from torch.utils import cpp_extension
cpp_extension.load_inline = lambda **how: None
loaded = {}
exec(pathlib.Path(sys.argv[1]).read_text(), loaded)
loaded["PLAN"] = loaded["LaunchPlan"](threads=32, smem_bytes=65536, cluster=16)
print(loaded["load_entry"](), flush=True)
loaded["CUBIN"] = b"E"
loaded["load_entry"]()
"""


@pytest.fixture(scope="module", params=["layernorm", "attention"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / request.param
    texts = LAYERNORM if request.param == "layernorm" else ATTENTION
    EXPORTER.export(request_for("cuda", "sm_90", out, *texts, kernel=request.param))
    return out


def test_there_is_a_problem_and_a_solution_for_each_winner(folder: Path) -> None:
    names = sorted(p.name for p in folder.glob("*.py"))
    assert len(names) == (4 if folder.name == "layernorm" else 2)
    for name in names:
        compile((folder / name).read_text(), name, "exec")
    problems = [n.removesuffix(".py") for n in names if not n.endswith("_new.py")]
    assert [n for n in names if n.endswith("_new.py")] == [f"{n}_new.py" for n in problems]


def test_its_static_checker_finds_no_hack(folder: Path) -> None:
    checker = kernelbench("kernel_static_checker")
    for path in folder.glob("*_new.py"):
        precision = "fp32" if "float32" in path.name else "fp16"
        assert checker.validate_kernel_static(path.read_text(), "cuda", precision) == (True, [], []), path.name


def test_its_loader_reads_the_problem(folder: Path) -> None:
    load = kernelbench("eval").load_original_model_and_inputs
    for path in folder.glob("*.py"):
        if not path.name.endswith("_new.py"):
            model, initial, inputs = load(path.read_text(), {})
            tensors = inputs()
            with torch.no_grad():
                assert model(*initial())(*tensors).shape == tensors[0].shape


@pytest.mark.slow
def test_its_loader_builds_the_solution_which_refuses_a_cpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder.name != "layernorm":
        pytest.skip("one build, of half a minute, is enough: the launcher is the same")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # put back afterwards: the loader sets it
    text = (folder / "layernorm_float16_64x1024_new.py").read_text()
    loaded: dict[str, Any] = {}
    model = kernelbench("eval").load_custom_model(text, loaded, str(tmp_path))(1024)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {"weight": (1024,), "bias": (1024,)}
    with torch.no_grad(), pytest.raises(RuntimeError, match="float16 on cpu"):
        model.to(torch.float16)(torch.randn(4, 1024, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="compiled for cols=1024, got 512"):
        loaded["prepare"](torch.device("cpu"), {"rows": 4, "cols": 512})
    assert loaded["PLAN"].grid({"rows": 33, "cols": 1024}, 132)[1:] == (1, 1)


def test_code_is_loaded_and_launched_as_the_driver_wants_it(folder: Path, tmp_path: Path) -> None:
    """On a machine without a GPU a library that tells what it was called with stands in for the driver."""
    solution = next(folder.glob("*_new.py"))
    found = re.search(r"^LAUNCHER = r'''\n(.*?)^'''$", solution.read_text(), re.DOTALL | re.MULTILINE)
    for name, text in {"driver.c": _DRIVER, "launcher.cpp": found[1], "calls.cpp": _CALLS}.items():
        (tmp_path / name).write_text(text)
    torch_folder = Path(torch.__file__).parent
    libraries = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10", "-ldl"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"], cwd=tmp_path, check=True)
    (tmp_path / "libtorch_cuda.so").symlink_to("libcuda.so.1")
    subprocess.run(["g++", "-std=c++17", "calls.cpp", "-o", "calls", *libraries], cwd=tmp_path, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{tmp_path}{os.pathsep}{torch_folder / 'lib'}"}

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)

    loading = run(sys.executable, "-c", _LOADING, solution)
    entry = "layernorm" if folder.name == "layernorm" else "attention"
    assert loading.stdout.splitlines() == [f"entry {entry}", "set 8 to 65536", "set 14 to 1", "(7, 5)"], loading.stderr
    assert "the kernel does not load: cuModuleLoadData of the CUDA driver gives error 1" in loading.stderr
    launching = run(tmp_path / "calls")
    assert launching.returncode == 0, launching.stderr
    assert launching.stdout.splitlines() == [
        "grid 8 2 1 threads 64 4 1 smem 65536 stream 0x63 function 0x7",
        "attribute 4: 16 1 1",
        "attribute 6: 1 0 0",
        "arguments 12345678901 -3 0.25",
        "grid 10 1 1 threads 32 1 1 smem 0 stream 0x63 function 0x7",
        "arguments 12345678901 -3 0.25",
        "the launch failed: CUDA_ERROR_OF_THE_TEST (1)",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["layernorm", "attention"])
def test_its_evaluator_accepts_the_solution(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = kernelbench("eval").eval_kernel_against_ref
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    major, minor = torch.cuda.get_device_capability()
    texts = LAYERNORM if kernel == "layernorm" else ATTENTION
    EXPORTER.export(request_for("cuda", f"sm_{major}{minor}", tmp_path / "out", *texts, kernel=kernel))
    for path in sorted((tmp_path / "out").glob("*_new.py")):
        result = evaluate(
            (tmp_path / "out" / path.name.replace("_new.py", ".py")).read_text(),
            path.read_text(),
            num_correct_trials=3,
            build_dir=str(tmp_path / "built"),
            device=torch.device("cuda:0"),
            precision=torch.float32 if "float32" in path.name else torch.float16,
        )
        assert (result.compiled, result.correctness) == (True, True), result.metadata


def test_a_winner_of_several_launches_has_no_place_in_its_form(tmp_path: Path) -> None:
    folder = tmp_path / "layernorm"
    shutil.copytree(template_root() / "layernorm", folder)
    with (folder / "kernel.py").open("a") as file:
        file.write("\nfrom dataclasses import replace as _changed\n_one = KERNEL.plan\n")
        file.write("KERNEL = _changed(KERNEL, plan=lambda target, point, workload: 2 * (_one(target, point, workload),))\n")
    request = request_for("cuda", "sm_90", tmp_path / "out", *LAYERNORM[:1], kernel=str(folder))
    with pytest.raises(UsageError, match="test/0 is 2 launches of layernorm over workspace or with structures, and"):
        EXPORTER.export(request)
    assert not (tmp_path / "out").exists()
