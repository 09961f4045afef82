"""Which variants are a choice for a problem that no measurement decides: those that were timed near it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from evo.ready import attention
from evo.runtime.choice import Family, Member, members_of
from evo.runtime.dispatch import Dispatch
from evo.runtime.package import Variant, slower

LONG = [
    (1, 8, 512, 64), (2, 8, 512, 64), (4, 16, 1024, 64), (4, 16, 2048, 64), (8, 12, 128, 64), (2, 8, 512, 128),
    (4, 16, 2048, 128), (2, 16, 4096, 128), (1, 32, 8192, 128), (1, 64, 6000, 128), (16, 32, 1500, 64),
]  # fmt: skip
"""Batch, heads, length, size of a head."""
GPUS = {"NVIDIA H100 80GB HBM3": (9, 0), "NVIDIA H200": (9, 0), "NVIDIA L40S": (8, 9), "NVIDIA RTX A6000": (8, 9)}


@pytest.fixture
def dispatch() -> Iterator[Dispatch]:
    yield attention.frontend.DISPATCH
    attention.also_serve(slower=False, measure=True)


def key_of(batch: int, heads: int, q: int, kv: int, head_dim: int, dtype: torch.dtype, causal: bool) -> tuple[Any, ...]:
    return (0, dtype, batch, heads, heads, q, kv, head_dim, int(causal), 0, 0, 0)


def decodes(variant: Variant) -> bool:
    """Made for one query or a few, with the heads that share keys and values in one tile."""
    return int(variant.record["genome"]["heads_a_tile"]) > 1


def is_on(gpu: str, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: GPUS[gpu])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: gpu)
    for v in dispatch.package.variants:
        monkeypatch.setattr(v, "beside", torch.__version__)
    dispatch.clear()


def family_of(dispatch: Dispatch, key: tuple[Any, ...]) -> tuple[Family, dict[str, int]]:
    sizes = dispatch._sizes(key)
    family = dispatch._family(dispatch._common(key), sizes)
    assert isinstance(family, Family)
    return family, sizes


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("slower", [False, True])
def test_no_variant_for_decoding_is_a_choice_for_long_attention(
    gpu: str, slower: bool, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_on(gpu, dispatch, monkeypatch)
    attention.also_serve(slower=slower)
    assert any(map(decodes, dispatch.package.variants))
    for batch, heads, length, head_dim in LONG:
        for causal in (False, True):
            for dtype in (torch.float16, torch.bfloat16):
                family, sizes = family_of(dispatch, key_of(batch, heads, length, length, head_dim, dtype, causal))
                builds = [v for m in family.near(sizes) for v in m.builds]
                assert builds, sizes
                assert not any(map(decodes, builds)), (sizes, [*map(str, builds)])


@pytest.mark.parametrize("gpu", GPUS)
def test_decoding_is_served_by_what_was_made_for_it(
    gpu: str, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_on(gpu, dispatch, monkeypatch)
    for head_dim, dtype in ((128, torch.float16), (128, torch.bfloat16), (64, torch.float16)):
        family, sizes = family_of(dispatch, key_of(8, 32, 1, 4096, head_dim, dtype, causal=False))
        assert decodes(family.near(sizes)[0].builds[0])


def test_what_stands_in_where_pytorch_was_faster_is_raced_where_slower_ones_serve(
    dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1x32x8192x128: what was timed there is in no package, and its figure only says that PyTorch is faster."""
    is_on("NVIDIA H100 80GB HBM3", dispatch, monkeypatch)
    key = key_of(1, 32, 8192, 8192, 128, torch.float16, causal=False)

    def nearest() -> Member:
        family, sizes = family_of(dispatch, key)
        found = family.near(sizes)[0]
        assert found.sizes == sizes
        return found

    assert (nearest().measured, bool(nearest().slower)) == (True, True)
    attention.also_serve(slower=True)
    assert (nearest().measured, nearest().slower) == (False, "")


def members(kept: tuple[Variant, ...], sizes: dict[str, int]) -> list[Member]:
    return members_of([v for v in kept if v.fits(sizes)], 0, sizes, False, True)


def test_nothing_stands_in_where_nothing_near_was_timed_or_what_was_timed_there(
    dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_on("NVIDIA H100 80GB HBM3", dispatch, monkeypatch)
    sizes = dispatch._sizes(key_of(1, 32, 8192, 8192, 128, torch.float16, causal=False))
    decoding = next(v for v in dispatch.package.variants if any(p["workload"]["dims"] == sizes for p in v.points))
    assert decodes(decoding)
    [alone] = (m for m in members((decoding,), sizes) if m.sizes == sizes)
    assert not alone.builds
    with dispatch.only(decoding.index):
        family, _ = family_of(dispatch, key_of(1, 32, 8192, 8192, 128, torch.float16, causal=False))
        assert [m.builds for m in family.members] == [[decoding]], "it is judged at any sizes"
    of_any_batch = dispatch._of_any_batch(members((decoding,), sizes))
    assert [m.builds for m in of_any_batch if m.sizes["q_len"] == 1 and m.sizes["kv_len"] == 4096] == [[decoding]]
    assert all(m.builds for m in of_any_batch)
    [point] = (p for p in decoding.points if p["workload"]["dims"] == sizes)
    assert slower({**decoding.record, **point})
    monkeypatch.setattr(
        decoding, "points", tuple(p if p is not point else {**p, "slowdown": 1.2} for p in decoding.points)
    )
    [timed] = (m for m in members((decoding,), sizes) if m.sizes == sizes)
    assert timed.builds == [decoding]


def test_of_variants_those_far_behind_the_nearest_are_no_choice() -> None:
    def member(rows: int) -> Member:
        return Member((), {"rows": rows, "cols": 96})

    family = Family([member(4), member(64), member(1024), member(65536)])
    for rows, wanted in ((1024, [1024, 64]), (64, [64, 4, 1024]), (300, [1024, 64]), (1 << 24, [65536]), (1, [4, 64])):
        assert [m.sizes["rows"] for m in family.near({"rows": rows, "cols": 96})] == wanted
