"""Attention: its problem says what it means, and its CPU template is right on any processor and for any point."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from evo.errors import KernelError, UsageError
from evo.measure import reference
from evo.measure.gate import Gate, allocate_outputs, argument_values
from evo.measure.harness import TimingHarness
from evo.measure.reference import expected_outputs
from evo.problem.genome import Genome
from evo.problem.kernel import Baseline, Tensors, Workload
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.problem.space import Point, Value
from evo.runtime.tolerance import compare
from evo.targets import compile_source, find_target
from evo.targets.languages.cpp import FLAGS

KERNEL = load_kernel("attention")
TARGET, CUDA = find_target("cpu"), find_target("cuda")
SESSION = TARGET.open()


@pytest.fixture(autouse=True)
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested is the source, and -O3 takes ten times as long; points drawn at random are built as in a search."""
    if "at_random" not in request.node.name:
        monkeypatch.setattr("evo.targets.languages.cpp.FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in FLAGS))


def workload(dtype: str = "float32", **parts: object) -> Workload:
    given: dict[str, object] = {"batch": 2, "heads": 3, "kv_heads": 3, "q_len": 65, "kv_len": 65, "head_dim": 64}
    text = ",".join(f"{name}={str(value).lower()}" for name, value in {**given, "dtype": dtype, **parts}.items())
    return KERNEL.workload("cpu", text)


def draw(problem: Workload, data: str = "normal") -> Tensors:
    return KERNEL.inputs(problem, data, torch.Generator().manual_seed(5))


def in_float64(inputs: Tensors) -> Tensors:
    return {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"heads": 6, "kv_heads": 4}, "heads must be a multiple of kv_heads, got 6 and 4"),
        ({"head_dim": 80}, "head_dim must be one of 32, 64, 96, 128, 256, got 80"),
        ({"layout": "bdhs"}, "layout must be one of bhsd, bshd, packed, got 'bdhs'"),
        ({"scale": -1}, "scale must be 0 or more"),
        ({"precision": "double"}, "precision must be one of float, half, got 'double'"),
        ({"precision": "half"}, "precision=half is for float16 on CUDA, without lse"),
        ({"additive": True}, "there is none"),
        ({"causal": True, "attn_mask": True}, "causal and attn_mask exclude each other"),
        ({"attn_mask": True, "mask_axes": "kq"}, "mask_axes must be some of bhqk in this order, got 'kq'"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(parts: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        workload(**parts)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 7), (7, 3)])
def test_the_reference_is_the_definition(q_len: int, kv_len: int, causal: bool) -> None:
    problem = workload(heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=32, causal=causal, scale=0.7)
    inputs = in_float64(draw(problem))
    q, k, v = (t for t in inputs.values() if t is not None)
    found = KERNEL.reference(inputs, problem)
    for b in range(2):
        for h in range(4):
            for i in range(q_len):
                seen = max(0, min(kv_len, i + kv_len - q_len + 1)) if causal else kv_len
                scores = k[b, h // 2, :seen] @ q[b, h, i] * 0.7
                expected = scores.softmax(0) @ v[b, h // 2, :seen] if seen else torch.zeros(32)
                torch.testing.assert_close(found["o"][b, h, i], expected.double())
                torch.testing.assert_close(found["lse"][b, h, i], scores.logsumexp(0))


@pytest.mark.parametrize("axes", ["bhqk", "qk", "bk", "bh"])
@pytest.mark.parametrize("data", ["normal", "sparse", "lone_key", "least"])
@pytest.mark.parametrize("additive", [False, True])
def test_the_reference_sees_through_a_mask_what_pytorch_sees(additive: bool, data: str, axes: str) -> None:
    problem = workload(heads=4, kv_heads=2, q_len=19, kv_len=70, attn_mask=True, additive=additive, mask_axes=axes)
    inputs = draw(problem, data)
    assert inputs["attn_mask"] is not None
    assert ["bhqk"[axis] for axis, stride in enumerate(inputs["attn_mask"].stride()) if stride] == list(axes)
    inputs = in_float64(inputs)
    expected = KERNEL.reference_baseline.call(inputs, problem)
    torch.testing.assert_close(KERNEL.reference(inputs, problem)["o"], expected)


def test_the_reference_takes_a_problem_in_parts_that_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = workload(q_len=33, kv_len=40, causal=True)
    inputs = in_float64(draw(problem))
    whole = KERNEL.reference(inputs, problem)
    monkeypatch.setitem(KERNEL.reference.__globals__, "_PAIRS_AT_ONCE", 7 * 40)
    parts = KERNEL.reference(inputs, problem)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name])


@pytest.mark.parametrize(("q_len", "kv_len"), [(4, 4), (3, 9), (9, 3)])
def test_a_causal_problem_costs_what_its_mask_leaves(q_len: int, kv_len: int) -> None:
    problem = workload(q_len=q_len, kv_len=kv_len, causal=True)
    seen = torch.ones(q_len, kv_len).tril(kv_len - q_len).sum()
    assert KERNEL.cost(problem).flops == 4 * 2 * 3 * 64 * int(seen)


@pytest.mark.parametrize(("kv_heads", "kv_len"), [(3, 65), (1, 65), (3, 7)])
def test_packed_tensors_have_strides_that_are_no_products_of_their_sizes(kv_heads: int, kv_len: int) -> None:
    inputs = draw(workload(layout="packed", kv_heads=kv_heads, kv_len=kv_len))
    for name in "qkv":
        t = inputs[name]
        assert t is not None
        assert t.stride(3) == 1, name
        assert t.stride(2) > t.shape[1] * t.shape[3], name
        assert all(stride % 32 == 0 for stride in t.stride()[:3]), name


@pytest.mark.parametrize(("layout", "axes"), [("bhsd", (0, 1, 2, 3)), ("bshd", (0, 2, 1, 3)), ("packed", (0, 2, 1, 3))])
def test_outputs_lie_in_the_memory_order_of_the_layout(layout: str, axes: tuple[int, ...]) -> None:
    outputs = allocate_outputs(KERNEL, workload(layout=layout, lse=True), torch.device("cpu"))
    assert outputs["o"].permute(axes).is_contiguous()
    assert outputs["lse"].is_contiguous()
    assert outputs["lse"].dtype == torch.float32
    assert set(allocate_outputs(KERNEL, workload(layout=layout), torch.device("cpu"))) == {"o"}


def test_values_alone_tell_little_of_the_result() -> None:
    """A mean of V in place of attention must be far off in every head and dtype."""
    problem = workload(q_len=129, kv_len=129)
    inputs = in_float64(draw(problem))
    o = KERNEL.reference(inputs, problem)["o"]
    assert inputs["v"] is not None
    apart = (o - inputs["v"].mean(2, keepdim=True)).abs().amax(dim=(2, 3))
    assert float(apart.min()) > 20 * KERNEL.tolerance["bfloat16"].atol


def refused(
    point: Point, problem: Workload, folder: Path, arch: str = "native", mistake: tuple[str, str] = ("", "")
) -> list[str]:
    """What the gate says against a point, built for `arch`. mistake: a part of the source, and what stands for it."""
    source = render(KERNEL, "cpu", Genome.of(point), problem, arch)
    assert mistake[0] in source.text
    source = replace(source, text=source.text.replace(*mistake, 1))
    folder.mkdir(parents=True, exist_ok=True)
    loaded = SESSION.load(compile_source(source, arch, folder), KERNEL.entry)
    try:
        checks = gate_for(problem.dtype).run(loaded, point, KERNEL.cases("cpu", problem))
    finally:
        loaded.close()
    return [f"{check.case}: {check.reason}" for check in checks if not (check.passed or "data=" in check.case)]


_gates: dict[str, Gate] = {}


def gate_for(dtype: str) -> Gate:
    return _gates.setdefault(dtype, Gate(KERNEL, "cpu", SESSION, seed=11))


def in_order(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The float32 product of matrices, each sum in the order of its terms."""
    found = torch.zeros(*x.shape[:-1], y.shape[-1])
    for i in range(x.shape[-1]):
        found += x[..., i, None] * y[..., i, None, :]
    return found


def test_honest_sums_are_right_whatever_luck_pytorch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """In few rows PyTorch's largest error is a matter of luck, and that of sums in order may be more than twice as large: on
    which data depends on the CPU."""
    problem = workload(head_dim=128, batch=3, heads=5, kv_heads=5, q_len=3, kv_len=3)
    strictly = []
    for seed in (0, 6, 35, 97, 195, 203):
        inputs = KERNEL.inputs(problem, "normal", torch.Generator().manual_seed(seed))
        q, k, v = (t for t in (inputs["q"], inputs["k"], inputs["v"]) if t is not None)
        output = in_order(torch.softmax(in_order(q, k.mT) / 128**0.5, -1), v)
        (wanted,) = expected_outputs(KERNEL, inputs, problem)
        assert compare(output, wanted)[1] == ""
        with monkeypatch.context() as without:
            without.setattr(reference, "input_roundings", lambda given: 0)
            (strict,) = expected_outputs(KERNEL, inputs, problem)
        strictly.append(compare(output, strict)[1])
    assert sum("exceeds" in said for said in strictly) > len(strictly) / 2


PRODUCTS = [("float32", "fma"), ("float32", "tiles"), ("bfloat16", "fma"), ("bfloat16", "dot"), ("bfloat16", "tiles")]


def point_for(problem: Workload, **chosen: object) -> Point:
    space = KERNEL.space("cpu", problem, SESSION.limits)
    tiled = {"block_q": 64, "tile_rows": 2} if chosen["product"] == "tiles" else {}
    point = space.complete({**space.default, **tiled, **chosen})  # type: ignore[dict-item]
    assert space.violations(point) == []
    return point


MASKS: list[dict[str, object]] = [{}, {"causal": True}, {"attn_mask": True}, {"attn_mask": True, "additive": True}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("dtype", "product"), PRODUCTS)
def test_every_product_passes_the_gate(dtype: str, product: str, mask: dict[str, object], tmp_path: Path) -> None:
    problem = workload(dtype, **mask)
    assert not refused(point_for(problem, product=product), problem, tmp_path)


@contextmanager
def built(point: Point, problem: Workload, folder: Path) -> Iterator[Callable[[Tensors], torch.Tensor]]:
    """What gives a point's result for inputs."""
    source = render(KERNEL, "cpu", Genome.of(point), problem, "native")
    loaded = SESSION.load(compile_source(source, "native", folder), KERNEL.entry)
    launches = KERNEL.sequence("cpu", point, problem, SESSION.limits).launches

    def call(inputs: Tensors) -> torch.Tensor:
        outputs = allocate_outputs(KERNEL, problem, torch.device("cpu"))
        for launch in launches:
            loaded(argument_values(KERNEL, problem, inputs, outputs), launch)
        return outputs["o"]

    try:
        yield call
    finally:
        loaded.close()


def by_math(inputs: Tensors, problem: Workload) -> torch.Tensor:
    q, k, v = (t for t in (inputs["q"], inputs["k"], inputs["v"]) if t is not None)
    with sdpa_kernel(SDPBackend.MATH):
        found: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, inputs["attn_mask"])
    return found


HUGE = [2.0**power for power in (6, 17, 33, 50, 62)]
"""Elements of q and k, whose products are exact. With the last, scores are finite, but not before they are scaled."""


@pytest.mark.parametrize("mask", [{}, {"attn_mask": True, "additive": True}], ids=str)
@pytest.mark.parametrize(("dtype", "product"), PRODUCTS)
def test_huge_scores_are_weighed_as_pytorch_weighs_them(
    dtype: str, product: str, mask: dict[str, object], tmp_path: Path
) -> None:
    """Equal keys weigh the same, whatever their scores; keys that differ are as right as in PyTorch."""
    problem = workload(dtype, kv_len=129, **mask)
    point = point_for(problem, product=product)
    drawn, nothing = draw(problem), torch.zeros(65, 129, dtype=getattr(torch, dtype)).expand(2, 3, 65, 129)
    q, k = (t for t in (drawn["q"], drawn["k"]) if t is not None)
    with built(point, problem, tmp_path) as served:
        for size in (5.5e4, *HUGE):
            equal = {"q": torch.full_like(q, size), "k": torch.full_like(k, size * 0.8)}
            signs = {"q": q.sign() * size, "k": k.sign() * size}
            for own in (equal, {"q": q * 1e5, "k": k * 1e5} if size == 5.5e4 else signs):
                inputs = {**drawn, **own, "attn_mask": nothing if mask else None}
                found, wanted = served(inputs), by_math(inputs, problem)
                assert bool((found.isfinite() | ~wanted.isfinite()).all()), size
                exact = KERNEL.reference(in_float64(inputs), problem)["o"]
                errors = [float((o.double() - exact).abs().max()) for o in (found, wanted)]
                assert errors[0] <= 2 * errors[1] + 8 * torch.finfo(q.dtype).eps, (size, errors)


@pytest.mark.parametrize(("cut", "right"), [(0, True), (4, False)])
def test_values_may_be_added_in_order_in_float32_and_in_nothing_less(cut: int, right: bool) -> None:
    """cut: bits that every partial sum of 2,048 equal keys loses."""
    inputs = draw(problem := workload(kv_len=2048, batch=1), "uniform_keys")
    v, total = inputs["v"], torch.zeros(1, 3, 64)
    assert v is not None
    for key in range(2048):
        total = ((total + v[:, :, key]).view(torch.int32) >> cut << cut).view(torch.float32)
    found = (total / 2048).unsqueeze(2).expand(1, 3, 65, 64)
    assert (not compare(found, expected_outputs(KERNEL, inputs, problem, "uniform_keys")[0])[1]) is right


@pytest.mark.parametrize(
    ("additive", "mistake", "case"),
    [
        (False, ("s.begun[block] = true", ""), "normal"),
        (False, ("s.seen[block] >> at / BLOCK_K & 1", "s.seen[block] & 1"), "lone_key"),
        (False, ("at[i * stride]", "at[i]"), "sparse"),
        (False, ("stride == 1 && count >= LANES", "false"), ""),
        (True, ("shows(m) != 0 ? score : splat(-INFINITE)", "score"), "non_finite"),
        (True, ("shows(m) != 0 ?", "(V)m > splat(-3e38f) ?"), "least"),
    ],
    ids=str,
)
def test_a_mistake_with_a_mask_is_refused(additive: bool, mistake: tuple[str, str], case: str, tmp_path: Path) -> None:
    problem = workload(attn_mask=True, additive=additive)
    found = refused(point_for(problem, product="fma", block_k=64), problem, tmp_path, mistake=mistake)
    assert [reason.split()[0] for reason in found] == [case][: len(case)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["x86-64", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize(("dtype", "product"), PRODUCTS)
def test_a_processor_without_the_instructions_gets_the_same_results(
    dtype: str, product: str, arch: str, tmp_path: Path
) -> None:
    if reason := unrunnable(arch):
        pytest.skip(reason)
    problem = workload(dtype, causal=True)
    for exponential in ("native", "integer"):
        point = point_for(problem, product=product, exponential=exponential)
        assert not refused(point, problem, tmp_path / exponential, arch)


def unrunnable(arch: str) -> str:
    try:
        return TARGET.runs(arch)
    except Exception as error:  # a compiler for another machine knows no such name
        return str(error)


@pytest.mark.parametrize("dtype", KERNEL.dtypes["cpu"])
def test_points_drawn_at_random_pass_the_gate(dtype: str, tmp_path: Path) -> None:
    rng = random.Random(4)
    kinds = list(enumerate(MASKS))
    for number, mask in kinds[KERNEL.dtypes["cpu"].index(dtype) % 2 :: 2]:  # a build takes ten seconds
        problem = workload(dtype, head_dim=(32, 64, 96, 128)[number], **mask)
        point = KERNEL.space("cpu", problem, SESSION.limits).sample(rng)
        assert not refused(point, problem, tmp_path / str(number)), (problem.key, point)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", KERNEL.dtypes["cpu"])
def test_the_default_is_legal_for_every_head_size(dtype: str, head_dim: int) -> None:
    problem = workload(dtype, head_dim=head_dim)
    space = KERNEL.space("cpu", problem, SESSION.limits)
    assert space.is_legal(space.complete(space.default))
    assert {w.dim("head_dim") for w in KERNEL.neighbours("cpu", problem)} == {32, 64, 96, 128, 256}


def test_a_baseline_that_does_not_run_is_left_out_with_its_reason() -> None:
    def fails(inputs: Tensors, problem: Workload) -> object:
        raise RuntimeError("No available kernel.\nMore of it.")

    problem = workload(batch=1, heads=1, kv_heads=1, q_len=3, kv_len=3, head_dim=32)
    bench = TimingHarness(KERNEL, "cpu", problem, SESSION, seed=1)
    peer = Baseline(name="peer", role="peer", call=fails)
    assert bench.check_baseline(peer) == "it does not run here (RuntimeError: No available kernel.)"
    assert bench.check_baseline(KERNEL.baseline("math")) == ""
    with pytest.raises(KernelError, match="in fails: baseline 'peer' raises RuntimeError: No available"):
        bench.check_baseline(replace(peer, role="reference"))


ATTENTION_512 = "batch=2,heads=8,kv_heads=8,q_len=512,kv_len=512,head_dim=64,dtype=float16"


def test_what_is_legal_on_ada_is_the_same_kernel_on_hopper() -> None:
    rng, problem = random.Random(1), KERNEL.workload("cuda", ATTENTION_512)
    ada, hopper = (KERNEL.space("cuda", problem, CUDA.limits(arch)) for arch in ("sm_89", "sm_90"))
    added = {"split_kv": 1, "launch": "plain"}
    points = [p for p in (ada.sample(rng) for _ in range(700)) if ada.is_legal(p)]
    assert len(points) > 100
    for point in points:
        completed = hopper.complete({**hopper.default, **added, **point})
        assert {n: v for n, v in completed.items() if n not in added} == point
        assert hopper.is_legal(completed), hopper.violations(completed)


SPLIT = {"split_kv": 2, "warps_m": 4, "block_n": 64, "k_stages": 2, "v_stages": 2}
HALF, ROUNDED = {"scores": "half", "values": "half"}, f"{ATTENTION_512},precision=half"
STAGGERED = {"stagger": "half", "warps_m": 8, "block_n": 64, "k_stages": 2, "v_stages": 3, "min_blocks": 1}
FULL = f"{ATTENTION_512},causal=true,lse=true"
DECODING = {"warps_m": 1, "warps_n": 4, "block_n": 64, "k_stages": 3, "v_stages": 3, "heads_a_tile": 4}
GROUPS = "batch=4,heads=32,kv_heads=8,q_len=1,kv_len=8192,head_dim=128,dtype=float16"


@pytest.mark.parametrize(
    ("arch", "workload", "chosen"),
    [
        ("sm_90", ATTENTION_512, {**SPLIT, "split_kv": 8, "launch": "programmatic"}),
        ("sm_90", FULL, {**SPLIT, "split_kv": 4, "order": "heads", "m_tiles": 2, "mask": "apart"}),
        ("sm_90", FULL, {**SPLIT, "ahead": 1}),
        ("sm_90", ATTENTION_512, {**SPLIT, "k_parts": 2, "v_wait": "late", "l2": "keep"}),
        ("sm_90", FULL, {**SPLIT, "first_copies": "all"}),
        ("sm_90", FULL, {**STAGGERED, "q_store": "registers", "grid": "persistent"}),
        ("sm_89", FULL, {**STAGGERED, "k_stages": 3, "v_stages": 4, "l2": "keep"}),
        ("sm_89", ROUNDED, {"k_stages": 2, "ahead": 1, "overlap": "both", "q_store": "registers", **HALF}),
        ("sm_90", ROUNDED, {**SPLIT, "k_parts": 2, "v_wait": "late", "overlap": "values", **HALF}),
        ("sm_89", f"{GROUPS},causal=true,lse=true", {**DECODING, "k_stages": 2, "v_stages": 2, "mask": "apart"}),
        ("sm_90", GROUPS, {**DECODING, "split_kv": 4, "ahead": 1, "q_store": "registers", "launch": "programmatic"}),
        ("sm_90", GROUPS, {**DECODING, "split_kv": 8, "merge": "beside", "barrier": "column", "layout": "padding"}),
    ],
    ids=str,
)
def test_blocks_that_share_keys_and_warps_out_of_step_compile(arch: str, workload: str, chosen: dict[str, Value]) -> None:
    problem, limits = KERNEL.workload("cuda", workload), CUDA.limits(arch)
    space = KERNEL.space("cuda", problem, limits)
    point = space.complete({**space.default, **chosen})
    assert not space.violations(point)
    assert chosen.items() <= point.items()
    source = render(KERNEL, "cuda", Genome.of(point), problem, arch)
    assert compile_source(source, arch, Path()).spill_bytes <= 48  # that of 255 registers, for code that hardly ever runs
    (launch,) = KERNEL.sequence("cuda", point, problem, limits).launches
    assert launch.cluster == chosen.get("split_kv", 1)
    assert launch.grid[0] % launch.cluster == 0
    assert "heads_a_tile" not in chosen or launch.grid[1:] == (problem.dim("kv_heads"), problem.dim("batch"))


@pytest.mark.parametrize(
    ("chosen", "mask"),
    [
        ({"k_stages": 2, "ahead": 1, "overlap": "both", "q_store": "registers"}, ""),
        ({**SPLIT, "warps_n": 2}, ",additive=true"),
    ],
)
def test_a_mask_may_keep_blocks_from_tiles_of_keys(chosen: dict[str, Value], mask: str) -> None:
    problem, limits = KERNEL.workload("cuda", f"{ATTENTION_512},lse=true,attn_mask=true{mask}"), CUDA.limits("sm_90")
    space = KERNEL.space("cuda", problem, limits)
    visits = [space.complete({**space.default, **chosen, "mask_tiles": which}) for which in ("all", "seen")]
    assert all(space.is_legal(point) for point in visits)
    rendered = [render(KERNEL, "cuda", Genome.of(point), problem, "sm_90") for point in visits]
    assert ["seen_tiles[" in source.text for source in rendered] == [False, True]
    assert all(compile_source(source, "sm_90", Path()).spill_bytes == 0 for source in rendered)
    bytes_of = [KERNEL.sequence("cuda", point, problem, limits).launches[0].smem_bytes for point in visits]
    assert bytes_of[1] - bytes_of[0] == 1024 // 8 + 1024 * 2  # a bit and a number for so many tiles


def test_sums_in_float16_are_legal_and_right_only_where_they_are_asked_for() -> None:
    plain, half = (KERNEL.workload("cuda", f"{ATTENTION_512},precision={p}") for p in ("float", "half"))
    spaces = [KERNEL.space("cuda", problem, CUDA.limits("sm_89")) for problem in (plain, half)]
    assert [HALF.keys() <= space.by_name.keys() for space in spaces] == [False, True]
    near, cases = KERNEL.neighbours("cuda", half), KERNEL.cases("cuda", half)
    assert {w.option("precision") for w in (*near, *(c.workload for c in cases))} == {"half"}
    assert not any(w.option("lse") for w in near)
    assert KERNEL.cost(half).rate == 2 * KERNEL.cost(plain).rate
    inputs = draw(half, "large_logits")
    q, k, v = (t for t in inputs.values() if t is not None)
    scores = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float16)
    for d in range(0, 64, 8):
        scores = (scores.double() + q[..., d : d + 8].double() @ k[..., d : d + 8].double().mT).half()
    rounded = ((scores.double() / 8).softmax(-1) @ v.double()).half()
    (strict,), (wide,) = (expected_outputs(KERNEL, inputs, problem) for problem in (plain, half))
    assert "outside the tolerance" in compare(rounded, strict)[1]
    assert not compare(rounded, wide)[1]
    assert compare(v.mean(2, keepdim=True).expand_as(q), wide)[1]


@pytest.mark.parametrize("causal", ["true", "false"])
def test_only_causal_blocks_take_rows_of_both_ends(causal: str) -> None:
    space = KERNEL.space("cuda", KERNEL.workload("cuda", f"{ATTENTION_512},causal={causal}"), CUDA.limits("sm_89"))
    assert any("ends_need_a_mask" in v for v in space.violations({**space.default, "rows": "ends"})) == (causal == "false")
    apart = space.complete({**space.default, "rows": "ends", "mask": "apart"})
    assert any("ends_have_one_loop" in v for v in space.violations(apart))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
@pytest.mark.parametrize("causal", ["true", "false"])
def test_a_genome_is_also_gated_with_the_other_mask(causal: str, arch: str) -> None:
    problem, limits = KERNEL.workload("cuda", f"{ATTENTION_512},causal={causal}"), CUDA.limits(arch)
    point, near = KERNEL.space("cuda", problem, limits).default, KERNEL.neighbours("cuda", problem)
    assert all(KERNEL.space("cuda", w, limits).is_legal(point) for w in near)
    assert any(w.option("causal") != problem.option("causal") for w in near)
