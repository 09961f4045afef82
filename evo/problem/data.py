"""The distributions that a kernel's inputs are drawn from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from evo.errors import KernelError

if TYPE_CHECKING:
    import torch

DATA = ("normal", "large_mean", "constant", "outlier", "first_outlier", "huge", "tiny", "ramp", "non_finite")
"""Distributions of `draw` that any kernel should be right for."""

KINDS_OF_NON_FINITE = 3
"""NaN, Inf and -Inf, of which fewer rows than these do not have all."""


def draw(data: str, rows: int, cols: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """[rows, cols] for a kernel that works on rows, of the distribution named: one for each way in which such kernels break.
    `dtype` is what the values are to be rounded to; they are float64 for that, else float32."""
    import torch

    half, device = dtype == torch.float16, generator.device
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=wide, generator=generator, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=wide, generator=generator, device=device)

    def spot() -> tuple[torch.Tensor, torch.Tensor]:
        column = torch.randint(0, cols, (rows,), generator=generator, device=device)
        return torch.arange(rows, device=device), column

    def end_or_spot() -> tuple[torch.Tensor, torch.Tensor]:
        row, column = spot()
        turn = (row + torch.randint(0, 3, (), generator=generator, device=device)) % 3
        column[turn == 0], column[turn == 1] = cols - 1, 0
        return row, column

    x = normal(rows, cols)
    if data == "normal":  # every row its own mean and scale: no fixed statistics fit
        x = x * torch.exp(2 * uniform(rows, 1) - 1) + 4 * normal(rows, 1)
    elif data == "large_mean":
        x = x + 1000
    elif data == "tight":  # standard deviation of a hundredth at mean 1000
        x = x * 0.01 + 1000
    elif data == "constant":
        x = normal(rows, 1).expand(rows, cols) * 3
    elif data == "outlier":  # in turn: one; a second of the other sign; one beside it; one as far from it as can be
        row, column = spot()
        x[row, column] = 300.0
        x[row[1::4], spot()[1][1::4]] = -300.0
        x[row[2::4], (column[2::4] ^ 1).clamp(max=cols - 1)] = 300.0
        x[row[3::4], (column[3::4] + cols // 2) % cols] = 300.0
    elif data == "first_outlier":
        x[:, 0] = 1000.0
    elif data == "huge":  # as large as the squares of a whole row allow: their sum is a tenth of what float32 holds
        x = (2 * uniform(rows, cols) - 1) * (65000.0 if half else (2e37 / cols) ** 0.5)
    elif data == "tiny":
        x = x * 1e-4
    elif data == "denormal" and dtype.is_floating_point:  # of the dtype: flushing them to zero loses the row
        x = x * (torch.finfo(dtype).smallest_normal / 4)
    elif data == "needle":  # nearly all of a row's variance in one element: the last, the first or any
        # Equal elements beside it would all be rounded the same way, and the errors of an honest sum add up.
        row, column = end_or_spot()
        x = x / 16 + (4 * uniform(rows, 1) - 2)
        x[row, column] += 48 + 32 * uniform(rows)
    elif data == "permuted":  # the elements of one row, in another order in each
        order = uniform(rows, cols).argsort(dim=1)
        x = (x[:1] * 2 + torch.linspace(-3, 5, cols, device=device)).expand(rows, cols).gather(1, order)
    elif data == "ramp":  # sorted values: order matters to running sums
        x = torch.linspace(-3, 5, cols, device=device).expand(rows, cols) + normal(rows, 1)
    elif data == "non_finite":
        # In turn: a row with NaN, with Inf, with -Inf, of -Inf alone, and a clean one. Of fewer rows than kinds, the columns
        # say which has its turn, so that three neighbouring sizes have all.
        row, column = end_or_spot()
        first = cols % KINDS_OF_NON_FINITE if rows < KINDS_OF_NON_FINITE else 0
        for turn, value in enumerate((float("nan"), float("inf"), -float("inf"))):
            from_row = (turn - first) % KINDS_OF_NON_FINITE
            x[row[from_row::5], column[from_row::5]] = value
        x[3::5] = -float("inf")
    elif data == "repeated":  # in turn: a row of a few numbers, of these and Inf, of these and NaN, of zeros of both signs
        few = torch.tensor((-0.0, 0.0, 1.0, 2.0, -2.0, math.inf, -math.inf, math.nan), dtype=wide, device=device)
        start = torch.randint(0, 4, (), generator=generator, device=device)
        kinds = torch.tensor((5, 7, 8, 2), device=device)[(torch.arange(rows, device=device) + start) % 4].unsqueeze(1)
        x = few[(uniform(rows, cols) * kinds).long() % kinds]
    else:
        raise KernelError(f"no distribution is named {data!r}; a kernel with data of its own needs its own `inputs`")
    return x
