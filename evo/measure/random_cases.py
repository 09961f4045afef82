"""Gate cases drawn from a kernel's own statement: what it may be called with, and where nobody has looked."""

import math
import random

from evo.problem.kernel import Case, Kernel, Workload

_ATTEMPTS = 100
"""For each case; constraints between sizes leave few of all draws."""
_OFFSETS = (0, 0, 0, 1, 2, 3, 5)
_MOST_BYTES, _MOST_FLOPS = 1 << 24, 1 << 28
"""Of one case, so that a float64 reference on a CPU takes milliseconds."""


def random_cases(kernel: Kernel, target: str, workload: Workload, seed: int, number: int) -> list[Case]:
    """So many, or fewer where few draws are legal and small. Sizes that are not compiled in are log-uniform up to the
    workload's own or the largest of the kernel's cases; options are those of one of its cases, the distribution is that of
    another."""
    if not number:
        return []
    rng, known = random.Random(seed), kernel.cases(target, workload)
    free = [d for d in kernel.dimensions if d.name not in kernel.compile_time_dims[target]]
    highest = {d.name: max(w.dim(d.name) for w in (workload, *(c.workload for c in known))) for d in free}
    found: list[Case] = []
    for _ in range(_ATTEMPTS * number):
        like, data = rng.choice(known).workload, rng.choice(known).data
        dims = dict(like.dims)
        for d in free:
            if rng.random() < 0.8:
                dims[d.name] = max(d.low, int(math.exp(rng.uniform(0, math.log(highest[d.name] + 1)))))
        made = Workload.of(dims, like.dtype, dict(like.options))
        cost = None if kernel.validate(made) else kernel.cost(made)
        if cost is not None and cost.bytes <= _MOST_BYTES and cost.flops <= _MOST_FLOPS:
            sizes = " ".join(f"{name}={size}" for name, size in dims.items())
            found.append(Case(f"random {len(found) + 1}: {data} {sizes}", made, data, rng.choice(_OFFSETS)))
            if len(found) == number:
                break
    return found
