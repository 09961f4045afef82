"""What instructions this CPU has. The exporter records it; the module compares before it runs anything."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

__all__ = ["features", "machine", "model"]

_RELEVANT = re.compile(
    r"(sse|ssse|avx|amx|fma|bmi|sve|sme)\w*"
    r"|pni|f16c|abm|lzcnt|tbm|xop|popcnt|movbe|v?aes|v?pclmulqdq|gfni|sha\w*|sm[34]|adx|lahf_lm|cx16|cldemote|serialize"
    r"|rdrand|rdseed|clwb|clflushopt|movdiri|movdir64b|prefetchi|apx\w*"
    r"|fp|fphp|asimd\w*|atomics|crc32|pmull|lrcpc|dcpop|jscvt|fcma|flagm\w*|frint|i8mm|bf16|dgh|rng|bti|mte\w*|mops|lse\w*"
)
"""Instruction sets that a compiler may use, as Linux spells them; not what tells of the kernel or of a hypervisor."""


def machine() -> str:
    """linux-x86_64."""
    return f"{platform.system()}-{platform.machine()}".lower()


@cache
def model() -> str:
    """What Linux calls this CPU, as `evo.targets.cpu` records it."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model|Processor)\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


@cache
def features() -> frozenset[str]:
    """Instruction sets of this CPU; empty where /proc/cpuinfo does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    # A process may move between cores: what counts is what all of them have.
    cores = [set(flags.split()) for flags in re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)]
    common = set.intersection(*cores) if cores else set()
    return frozenset(f for f in common if _RELEVANT.fullmatch(f))
