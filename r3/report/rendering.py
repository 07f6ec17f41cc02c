"""A plot as PNG: vl-convert runs Vega in the JavaScript engine that it brings, so that no browser or display is needed."""

from __future__ import annotations

import functools

import altair as alt
import vl_convert

from r3.report.figure import Figure
from r3.report.themes import PNG

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])  # the release that Altair writes


def png(figure: Figure, *, scale: float = 2.0, width: int = 640) -> bytes:
    """On white, with its title."""
    spec = {
        **figure.spec,
        "title": figure.title,
        "width": width,
        "height": figure.height,
        "data": {"values": figure.rows()},
        "padding": 12,
    }
    return bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=scale, config=PNG))


@functools.cache
def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which defines `window.vegaEmbed`."""
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    return script
