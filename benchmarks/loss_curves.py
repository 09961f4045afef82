"""Are two loss curves equal? As equal as PyTorch's own are, when the same training is rounded in another way.

The runs of the sample start from equal weights and see equal data. Each computes the same in PyTorch, with one thing put
differently: another back end of attention, or LayerNorm from elementary operations. All are equally right, and by how
much they differ is what rounding does to this training. A curve is one of theirs if, at every step, it lies within the
interval in which one more such run is to be expected (Student's prediction interval, mean +- t s sqrt(1 + 1/n)). It is as
wide as the number of steps demands, so that of curves that do belong there one in a hundred is refused at some step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from gpt import Model, Shape, Training, batches
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

REFUSED = 0.01
"""Share of the curves of the sample itself that is refused by chance."""
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
_EPSILON = torch.finfo(torch.float32).eps

Curve = list[float]


def train(shape: Shape, steps: int, seed: int, within: AbstractContextManager[Any]) -> Curve:
    """The losses, from the same start and on the same data for the same seed."""
    data = batches(shape, steps, seed + 1)
    training = Training(Model(shape, seed), shape)
    with within:
        losses = [training.step(tokens) for tokens in data]
    found: Curve = torch.stack(losses).tolist()
    return found


@contextmanager
def _norm(function: Callable[..., Tensor]) -> Iterator[None]:
    before, functional.layer_norm = functional.layer_norm, function
    try:
        yield
    finally:
        functional.layer_norm = before


def _in_two_passes(wide: torch.dtype) -> Callable[..., Tensor]:
    def layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        centred = x.to(wide) - x.to(wide).mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (centred * deviation * weight.to(wide) + bias.to(wide)).to(x.dtype)

    return layer_norm


def _from_moments(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    return ((wide - mean) * (variance + eps).rsqrt() * weight.float() + bias.float()).to(x.dtype)


NORMS = {
    "LayerNorm in two passes, float32": _in_two_passes(torch.float32),
    "LayerNorm in two passes, float64": _in_two_passes(torch.float64),
    "LayerNorm from two moments, float32": _from_moments,
}


def sample(shape: Shape, steps: int, seed: int) -> tuple[dict[str, Curve], dict[str, str]]:
    """The curves, and what cannot run here, with the reason."""
    curves: dict[str, Curve] = {}
    left_out: dict[str, str] = {}
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        f"attention {name}": lambda name=name: sdpa_kernel(getattr(SDPBackend, name)) for name in BACKENDS
    }
    ways |= {name: lambda norm=norm: _norm(norm) for name, norm in NORMS.items()}
    for name, within in ways.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of back ends, why they cannot run
                curves[name] = train(shape, steps, seed, within())
        except RuntimeError as error:
            left_out[name] = str(error).splitlines()[0].partition(". ")[0]
    return curves, left_out


@dataclass(frozen=True)
class Verdict:
    """`worst`: the largest share of what is allowed that a step takes; above 1 it is outside. `step`: where that is."""

    worst: float
    step: int
    outside: int
    allowed_there: float

    @property
    def equal(self) -> bool:
        return self.outside == 0


def judge(curve: Curve, curves: Sequence[Curve], judged: int) -> Verdict:
    """`judged`: how many curves are, all of which are to be accepted together."""
    shares, allowed = [], []
    wide = quantile(1 - REFUSED / (len(curve) * judged), len(curves) - 1) * math.sqrt(1 + 1 / len(curves))
    for own, theirs in zip(curve, zip(*curves, strict=True), strict=True):
        centre = fmean(theirs)
        # What a loss is rounded to is open in every run, also where the few of the sample agree.
        allowed.append(wide * max(stdev(theirs), _EPSILON * abs(centre)))
        shares.append(abs(own - centre) / allowed[-1] if math.isfinite(own) else math.inf)
    step = max(range(len(shares)), key=shares.__getitem__)
    return Verdict(shares[step], step, sum(share > 1 for share in shares), allowed[step])


def quantile(probability: float, freedom: int) -> float:
    """The t that a Student variable stays below in size with this probability."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < probability else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| <= t), a finite sum. Source: Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(freedom // 2):
        total += term
        term *= math.cos(angle) ** 2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    share = math.sin(angle) * total
    return 2 / math.pi * (angle + share) if odd else share
