"""Colours of plots, light and dark: Vega configurations. Passes are told apart by the Okabe-Ito palette, which colour-blind
readers can tell too; its light members are darkened on white and its dark ones lightened on black."""

from __future__ import annotations

from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def _config(
    text: str, muted: str, grid: str, passes: list[str], heat: list[str], background: str | None
) -> dict[str, Any]:
    return {
        "background": background,
        "font": FONT,
        "view": {"stroke": grid},
        "axis": {
            "labelColor": muted,
            "titleColor": text,
            "gridColor": grid,
            "domainColor": grid,
            "tickColor": grid,
            "labelFontSize": 11,
            "titleFontSize": 11.5,
            "titleFontWeight": "normal",
        },
        "legend": {"labelColor": text, "titleColor": text, "labelFontSize": 11.5, "titleFontSize": 11.5},
        "title": {"color": text, "subtitleColor": muted},
        "line": {"strokeWidth": 2},
        "bar": {"color": passes[0]},
        "range": {"category": passes, "heatmap": heat, "ramp": heat},
    }


_LIGHT_PASSES = ["#c2410c", "#0069ad", "#8f3d7f", "#b58900", "#008f6b", "#555b66"]
_DARK_PASSES = ["#ff8a4c", "#5cb8ff", "#dd8fc9", "#e6c229", "#2fc79d", "#aab2bf"]
_LIGHT_HEAT = ["#f1f4f9", "#c9dcf0", "#8fbde0", "#4a90c4", "#1f5f9e", "#0b3266"]
_DARK_HEAT = ["#1b2230", "#20426b", "#2a6ca8", "#3f9bd6", "#86cbef", "#e2f5ff"]

THEMES: dict[str, dict[str, Any]] = {
    "light": _config("#1b2230", "#5a6372", "#dfe3ea", _LIGHT_PASSES, _LIGHT_HEAT, None),
    "dark": _config("#e6eaf2", "#9aa4b5", "#323b4b", _DARK_PASSES, _DARK_HEAT, None),
}
PNG: dict[str, Any] = {**THEMES["light"], "background": "white"}
