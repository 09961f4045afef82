"""For the server that workers are forked from: see tests/hurried.py. Apart from it, for a command imports no harness."""

from __future__ import annotations

from dataclasses import replace

from evo.measure.harness import _PROTOCOLS

_PROTOCOLS["search", True] = replace(_PROTOCOLS["search", True], limit_s=1.0)
"""On a quiet CPU a race takes less. On a busy one it would take twice its usual limit of 4 s, and be disturbed then too."""
