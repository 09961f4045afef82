"""Bars: how much each parameter had to do with being among the best."""

from __future__ import annotations

from markupsafe import Markup

from evo.report.importance import Importance
from evo.report.svg import Figure, fitted, tag, text
from evo.report.text import counted, percent

__all__ = ["draw_importance"]

_WIDTH, _ROW, _LEFT, _MOST = 500, 24, 150, 12


def draw_importance(importance: Importance) -> Figure | None:
    """None where nothing can be said."""
    shown = [(p, s) for p, s in importance.shares if s >= 0.005][:_MOST]
    if not shown:
        return None
    top, parts = shown[0][1], []
    for i, (parameter, share) in enumerate(shown):
        y = 8 + i * _ROW
        width = max(1.5, (_WIDTH - _LEFT - 54) * share / top)
        parts.append(
            text(_LEFT - 8, y + 13, fitted(parameter.name, _LEFT - 12), f"e{' b' if parameter.structural else ''}")
        )
        tip = f"{parameter.name}: {percent(share, 1)}" + (f"\n{parameter.why}" if parameter.why else "")
        box = {"x": float(_LEFT), "y": float(y), "width": width, "height": float(_ROW - 7)}
        parts.append(tag("rect", **box, class_="bar", data_tip=tip))
        parts.append(text(_LEFT + width + 6, y + 13, percent(share, 0 if share >= 0.095 else 1), "m sm"))
    left = len(importance.shares) - len(shown)
    return Figure(
        name="importance",
        title="Importance of the parameters",
        caption=(
            f"PED-ANOVA: how far the values among the best {percent(importance.quantile)} of"
            f" {counted(importance.number, 'timed candidate')} differ from those of all; shares of the sum. Bold:"
            " structural choices."
            + (" Rough: so few are among the best that chance may have chosen them." if importance.rough else "")
            + (f" {counted(left, 'parameter')} with less {'is' if left == 1 else 'are'} left out." if left else "")
        ),
        alt=", ".join(f"{p.name} {percent(s, 1)}" for p, s in shown) + ".",
        width=_WIDTH,
        height=_ROW * len(shown) + 14,
        body=Markup("").join(parts),
    )
