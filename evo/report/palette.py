"""Colours, for paper and for a dark screen. Text and marks keep the contrast that WCAG 2 asks for at level AA."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DARK", "LIGHT", "SERIES", "STEPS", "figure_css", "variables"]

SERIES = 8
"""Colours for things that have no order; the last one is for the rest of them."""
STEPS = 6
"""Shades for little to much."""

LIGHT: Mapping[str, str] = {
    "paper": "#fdfdfb", "ink": "#1b1f24", "muted": "#555c66", "rule": "#d8dad4", "soft": "#f2f3ee", "grid": "#e4e6e0",
    "accent": "#0b5fa5", "warn": "#9f2d13", "good": "#17694b", "dot": "#7d8794", "band": "#bcd5ea",
    "s0": "#0b5fa5", "s1": "#bd560a", "s2": "#17805d", "s3": "#8b3fa8", "s4": "#a8862b", "s5": "#c23b6b",
    "s6": "#3d6f80", "s7": "#868d96",
    "h0": "#eef3f8", "h1": "#d0e1f0", "h2": "#a9cae5", "h3": "#74acd6", "h4": "#2670a8", "h5": "#0b4f87",
    "t0": "#1b1f24", "t1": "#1b1f24", "t2": "#1b1f24", "t3": "#10181f", "t4": "#ffffff", "t5": "#ffffff",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "paper": "#14171a", "ink": "#e7e8e5", "muted": "#a7adb5", "rule": "#363b41", "soft": "#1c2024", "grid": "#2a2f34",
    "accent": "#78b8f2", "warn": "#ff9d80", "good": "#6fd0a5", "dot": "#77818c", "band": "#23435f",
    "s0": "#66aef0", "s1": "#f0944a", "s2": "#4fc597", "s3": "#c88ae0", "s4": "#d9bb5c", "s5": "#f080a6",
    "s6": "#7db3c6", "s7": "#949ba4",
    "h0": "#1e2932", "h1": "#20394f", "h2": "#235078", "h3": "#2f6ea6", "h4": "#79b6ec", "h5": "#b5d9fb",
    "t0": "#e7e8e5", "t1": "#e7e8e5", "t2": "#f2f5f7", "t3": "#ffffff", "t4": "#0d1318", "t5": "#0d1318",
}  # fmt: skip


def variables(colours: Mapping[str, str]) -> str:
    """Declarations of CSS custom properties."""
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


def figure_css(colours: Mapping[str, str] | None = None) -> str:
    """Style of the figures: in a page by its custom properties, or else with the colours themselves, for programs that
    draw SVG and know no properties."""

    def c(name: str) -> str:
        return f"var(--{name})" if colours is None else colours[name]

    rules = [
        f".fig text{{font-size:12px;fill:{c('ink')};font-family:{_FONTS}}}",
        f".fig .m{{fill:{c('muted')}}}",
        ".fig .sm{font-size:11px}",
        ".fig .b{font-weight:600}",
        ".fig .e{text-anchor:end}",
        ".fig .c{text-anchor:middle}",
        f".fig .grid{{stroke:{c('grid')};stroke-width:1}}",
        f".fig .axis{{stroke:{c('muted')};stroke-width:1}}",
        f".fig .unity{{stroke:{c('muted')};stroke-width:1;stroke-dasharray:4 3}}",
        f".fig .dots{{stroke:{c('dot')};stroke-width:2.6;stroke-linecap:round;fill:none;opacity:.55}}",
        f".fig .rug{{stroke:{c('warn')};stroke-width:1;fill:none;opacity:.5}}",
        f".fig .band{{fill:{c('band')};opacity:.75}}",
        f".fig .line{{stroke:{c('accent')};stroke-width:2;fill:none}}",
        ".fig .spoilt{stroke-dasharray:5 4}",
        f".fig .mark{{fill:{c('accent')};stroke:{c('paper')};stroke-width:1}}",
        f".fig .hollow{{fill:{c('paper')};stroke:{c('accent')};stroke-width:1.75}}",
        f".fig .refused{{fill:{c('paper')};stroke:{c('warn')};stroke-width:1.75}}",
        f".fig .edge{{stroke:{c('dot')};stroke-width:1;fill:none;opacity:.65}}",
        f".fig .main{{stroke:{c('accent')};stroke-width:2.25;fill:none}}",
        f".fig .side{{fill:{c('paper')};stroke:{c('dot')};stroke-width:1.5}}",
        f".fig .bar{{fill:{c('accent')}}}",
        f".fig .bad{{fill:{c('warn')}}}",
        f".fig .pale{{fill:{c('band')}}}",
        f".fig .none{{fill:transparent;stroke:{c('grid')};stroke-width:1}}",
        f".fig .gap{{stroke:{c('paper')};stroke-width:.75}}",
    ]
    rules += [f".fig .s{i}{{fill:{c(f's{i}')}}}" for i in range(SERIES)]
    rules += [f".fig .h{i}{{fill:{c(f'h{i}')}}}.fig .t{i}{{fill:{c(f't{i}')}}}" for i in range(STEPS)]
    return "\n".join(rules)


_FONTS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif"
