"""Do the owners of other formats accept what evo exports in them?

    python benchmarks/foreign_formats.py [RUN] [--db DB] [--kernel layernorm] [--workload W]... [--budget 20s]
                                         [--format F]... [--kernelbench KernelBench/src] [--out DIR] [--json]

Without a run, one is searched for first. Its winners are exported in each format, and judged by the owner's own code:
  huggingface        kernels: get_local_kernel loads the folder, kernelize puts its layer into a model, whose results are
                     those of before
  flashinfer-bench   Benchmark.run_all evaluates the Solution (on a CPU, which it does not evaluate on: its builder builds
                     it, and the results are those of its reference)
  kernelbench        eval_kernel_against_ref, with its timing (GPUs only)
  t4                 the run's results are valid by the schema's required parts, and as many as were evaluated
Exit code: 0 all accepted, 1 one was not. A format whose owner's package is missing is told of, and is not accepted.

On a GPU machine without a network (scripts/offline_gpu.sh), add to its wheels, where pip would fetch all of CUDA with them:
    pip download --no-deps --dest .wheels --python-version 3.12 --only-binary=:all: --platform manylinux_2_28_x86_64 \\
        --platform manylinux2014_x86_64 flashinfer-bench==0.1.2
and to `pack 3.12`: apache-tvm-ffi docstring-parser safetensors kernels requests python-dotenv. KernelBench is
a checkout: github.com/ScalingIntelligence/KernelBench.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.runs import find_run
from evo.export import find_exporter
from evo.export._winners import export_all_candidates
from evo.lineage.store import Store

WORKLOADS = {
    ("layernorm", "cuda"): ("rows=256,cols=1024,dtype=float16", "rows=32,cols=4096,dtype=float16"),
    ("layernorm", "cpu"): ("rows=256,cols=1024,dtype=float32",),
    ("attention", "cuda"): ("batch=2,heads=8,kv_heads=8,q_len=512,kv_len=512,head_dim=64,dtype=float16",),
    ("attention", "cpu"): ("batch=1,heads=4,kv_heads=4,q_len=256,kv_len=256,head_dim=64,dtype=float32",),
}
FORMATS = ("huggingface", "flashinfer-bench", "kernelbench", "t4")

Verdicts = list[dict[str, Any]]
"""One for each winner: what, accepted, and what the owner says."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--db")
    parser.add_argument("--kernel", default="layernorm")
    parser.add_argument("--target", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workload", action="append")
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--format", action="append", choices=FORMATS)
    parser.add_argument("--kernelbench", type=Path, help="the folder src/ of a checkout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.kernelbench:
        sys.path.insert(0, str(options.kernelbench.resolve()))
    with tempfile.TemporaryDirectory(prefix="foreign-formats-") as scratch:
        out = (options.out or Path(scratch)).resolve()
        for variable, folder in (("FIB_CACHE_PATH", "flashinfer-bench"), ("TORCH_EXTENSIONS_DIR", "extensions")):
            os.environ[variable] = str(Path(scratch) / folder)
        db = options.db or str(Path(scratch) / "lineage.db")
        name = options.run or search(options, db)
        with Store.open(db, write=False) as store:
            winners = [read_candidate(store, i.winner) for i in find_run(store, name).tasks if i.winner]
        found: dict[str, Verdicts] = {}
        for format in options.format or FORMATS:
            try:
                found[format] = judge(format, name, db, winners, out / format)
            except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
                found[format] = [{"what": name, "accepted": False, "says": f"{type(error).__name__}: {error}"}]
            for verdict in found[format] if not options.json else ():
                word = "accepted" if verdict["accepted"] else "REFUSED"
                print(f"{format:17} {word:9} {verdict['what']}: {verdict['says']}")
    if options.json:
        print(json.dumps(found, indent=1))
    return 0 if all(verdict["accepted"] for verdicts in found.values() for verdict in verdicts) else 1


def evo(*words: str) -> None:
    """Runs a command; what it prints goes to stderr."""
    subprocess.run([sys.executable, "-m", "evo", *words], check=True, stdout=sys.stderr)


def search(options: argparse.Namespace, db: str) -> str:
    workloads = options.workload or WORKLOADS[options.kernel, options.target]
    words = [word for workload in workloads for word in ("--workload", workload)]
    evo("search", options.kernel, "--target", options.target, *words, "--budget", options.budget, "--db", db, "--name", "it")
    return "it"


def judge(format: str, run: str, db: str, winners: list[CandidateRecord], out: Path) -> Verdicts:
    if format == "t4":
        with Store.open(db, write=False) as store:
            written = export_all_candidates(store, [run], find_exporter("t4"), out)
            return judge_t4(written, find_run(store, run).evaluations)
    if not winners:
        return [{"what": run, "accepted": False, "says": "the run has no winner"}]
    if format == "kernelbench" and winners[0].target != "cuda":
        return [{"what": run, "accepted": True, "says": "not judged: KernelBench evaluates on GPUs only"}]
    folder = out / f"evo-{winners[0].kernel}"
    evo("export", *(w.id for w in winners), "--format", format, "--out", str(folder), "--db", db)
    judges: dict[str, Callable[[Path, list[CandidateRecord]], Verdicts]] = {
        "huggingface": judge_huggingface,
        "flashinfer-bench": judge_flashinfer_bench,
        "kernelbench": judge_kernelbench,
    }
    return judges[format](folder, winners)


def judge_huggingface(folder: Path, winners: list[CandidateRecord]) -> Verdicts:
    import kernels

    found = []
    loaded = kernels.get_local_kernel(folder)
    loaded.also_serve(slower=True)  # what is asked is whether variants run there, not whether they pay
    for winner in winners:
        layer, model, call, arguments = subject(winner)
        place = winner.target
        mapping = {layer: {place: {kernels.Mode.INFERENCE: kernels.LocalLayerRepository(folder, layer_name=layer)}}}
        with torch.inference_mode():
            before = call(model)
            with kernels.use_kernel_mapping(mapping):
                kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device=place, use_fallback=False)
            near = torch.allclose(call(model), before, atol=1e-2, rtol=1e-2)
            way = loaded.explain(*arguments)
        accepted = near and way.startswith("variant")
        says = f"{way}; the results are {'those' if near else 'NOT those'} of before"
        found.append({"what": winner.workload, "accepted": accepted, "says": says})
    return found


def subject(winner: CandidateRecord) -> tuple[str, Any, Callable[[Any], torch.Tensor], tuple[Any, ...]]:
    """The layer of a workload: its name, a module whose forward it replaces, a call of it, and arguments for `explain`."""
    from torch import nn

    import kernels

    d, o = winner.dims, winner.options
    made: dict[str, Any] = {"device": winner.target, "dtype": getattr(torch, winner.dtype)}
    if winner.kernel == "layernorm":
        norm = kernels.use_kernel_forward_from_hub("LayerNorm")(type("Norm", (nn.LayerNorm,), {}))
        model = norm(d["cols"], o["eps"], elementwise_affine=o["weight"], bias=o["bias"], **made)
        x = torch.randn(d["rows"], d["cols"], **made) * 3 + 1
        return "LayerNorm", model, lambda m: m(x), (x, (d["cols"],), model.weight, model.bias, o["eps"])
    q = torch.randn(d["batch"], d["heads"], d["q_len"], d["head_dim"], **made)
    k, v = (torch.randn(d["batch"], d["kv_heads"], d["kv_len"], d["head_dim"], **made) for _ in range(2))
    scale, shared = o["scale"] or None, d["heads"] != d["kv_heads"]

    class Attention(nn.Module):
        def forward(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]  # noqa: E501
            return nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    layer = "ScaledDotProductAttention"
    model = kernels.use_kernel_forward_from_hub(layer)(Attention)()
    causal = bool(o["causal"])
    return (
        layer,
        model,
        lambda m: m(q, k, v, is_causal=causal, scale=scale, enable_gqa=shared),
        (q, k, v, None, 0.0, causal, scale, shared),
    )


def judge_flashinfer_bench(folder: Path, winners: list[CandidateRecord]) -> Verdicts:
    import flashinfer_bench as fib

    traces = fib.TraceSet.from_path(str(folder))
    if winners[0].target == "cpu":
        return build_flashinfer_bench(traces)
    results = fib.Benchmark(traces, fib.BenchmarkConfig(log_dir=str(folder.parent / "logs"))).run_all(dump_traces=False)
    found = []
    for name, evaluated in results.traces.items():
        for trace in evaluated:
            evaluation = trace.evaluation
            accepted = evaluation.status.value == "PASSED"
            says = evaluation.status.value
            if accepted:
                p = evaluation.performance
                says += f", {p.latency_ms * 1e3:.2f} us, {p.speedup_factor:.2f}x its reference"
            else:
                says += f": {evaluation.log[-800:]}"
            found.append({"what": f"{name} {trace.workload.axes}", "accepted": accepted, "says": says})
    return found or [{"what": str(folder), "accepted": False, "says": "nothing was evaluated"}]


def build_flashinfer_bench(traces: Any) -> Verdicts:
    """The checks on a machine without a GPU."""
    from flashinfer_bench.bench.utils import gen_inputs
    from flashinfer_bench.compile import BuilderRegistry

    registry, found = BuilderRegistry.get_instance(), []
    for name, definition in traces.definitions.items():
        solution, reference = registry.build(definition, traces.solutions[name][0]), registry.build_reference(definition)
        for trace in traces.workloads[name]:
            inputs = gen_inputs(definition, trace.workload, device="cpu")
            with torch.no_grad():
                error = (solution(*inputs).float() - reference(*inputs).float()).abs().max().item()
            says = f"built, largest difference to its reference {error:.2g}; not evaluated: it evaluates on GPUs only"
            found.append({"what": f"{name} {trace.workload.axes}", "accepted": error < 1e-2, "says": says})
    return found


def judge_kernelbench(folder: Path, winners: list[CandidateRecord]) -> Verdicts:
    for client, name in (("openai", "OpenAI"), ("litellm", "completion")):
        # Clients of language models, which its helpers import and its evaluation does not use.
        if client not in sys.modules and importlib.util.find_spec(client) is None:
            sys.modules[client] = importlib.util.module_from_spec(ModuleSpec(client, None))
            setattr(sys.modules[client], name, None)
    from kernelbench.eval import eval_kernel_against_ref

    found = []
    for solution in sorted(folder.glob("*_new.py")):
        problem = solution.with_name(solution.name.replace("_new.py", ".py"))
        dtype = next(d for d in ("bfloat16", "float16", "float32") if d in solution.name)
        result = eval_kernel_against_ref(
            problem.read_text(),
            solution.read_text(),
            num_correct_trials=5,
            num_perf_trials=100,
            measure_performance=True,
            build_dir=os.environ["TORCH_EXTENSIONS_DIR"],
            device=torch.device("cuda:0"),
            precision=getattr(torch, dtype),
        )
        accepted = bool(result and result.compiled and result.correctness)
        says = str(result)
        if accepted:
            says = f"right {result.metadata['correctness_trials']}, {result.runtime} ms, reference {result.ref_runtime} ms"
        found.append({"what": solution.name, "accepted": accepted, "says": says})
    return found


def judge_t4(written: list[Path], evaluated: int) -> Verdicts:
    documents = [json.loads(p.read_text()) for p in written if p.name.endswith(".t4.json")]
    results = [result for document in documents for result in document["results"]]
    required = {"configuration", "times", "invalidity", "correctness"}
    accepted = len(results) == evaluated and all(required <= result.keys() for result in results)
    kinds = {kind: sum(r["invalidity"] == kind for r in results) for kind in sorted({r["invalidity"] for r in results})}
    says = f"{len(results)} results of {evaluated} evaluations: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}"
    return [{"what": f"{len(documents)} documents", "accepted": accepted, "says": says}]


if __name__ == "__main__":
    sys.exit(main())
