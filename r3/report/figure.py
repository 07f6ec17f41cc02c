"""A plot as a specification and columns, and the encodings that plots of a diagnosis have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from r3.diagnose import R2
from r3.report.documents import Document, shown_forwards

Columns = dict[str, list[Any]]
LOG_AXIS = alt.Axis(format=".0e", tickCount=5)


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        id: Stable name, e.g. `ratios`; the PNG's file name.
        title, caption: What it shows, and what to look for.
        spec: Vega-Lite without data, config and size of the container.
        columns: Its data: equally long lists.
        height: Pixels.
    """

    id: str
    title: str
    caption: str
    spec: dict[str, Any]
    columns: Columns = field(repr=False)
    height: int = 220

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))

    def rows(self) -> list[dict[str, Any]]:
        names = list(self.columns)
        return [dict(zip(names, values, strict=True)) for values in zip(*self.columns.values(), strict=True)]


def color(document: Document, names: Sequence[str] | None = None) -> alt.Color:
    return alt.Color("forward:N", scale=alt.Scale(domain=shown_forwards(document)), legend=legend(document, names))


def dash(document: Document) -> alt.StrokeDash:
    """R2 repeats the trainer's own choice, so its line lies on that of live routing, which must stay visible under it."""
    domain = shown_forwards(document)
    dashes = [[5, 4] if name == R2 else [1, 0] for name in domain]
    return alt.StrokeDash("forward:N", scale=alt.Scale(domain=domain, range=dashes), legend=legend(document))


def legend(document: Document, names: Sequence[str] | None = None) -> alt.Legend | None:
    domain = shown_forwards(document)
    if len(domain) < 2:
        return None
    return alt.Legend(title=None, orient="top", values=list(names or domain), columns=3)


def tip(field_: str, title: str, format_: str = "") -> alt.Tooltip:
    return alt.Tooltip(field_, title=title, format=format_) if format_ else alt.Tooltip(field_, title=title)


def figure(id_: str, title: str, caption: str, chart: alt.Chart, columns: Columns, height: int = 220) -> Figure:
    spec = chart.to_dict()
    spec.pop("config", None)
    return Figure(id_, title, caption, spec, columns, height)


def columns(*names: str) -> Columns:
    return {name: [] for name in names}


def add(columns: Columns, *values: Any) -> None:
    for column, value in zip(columns.values(), values, strict=True):
        column.append(rounded(value) if isinstance(value, float) else value)


def rounded(value: float) -> float:
    """Five digits: what a plot shows and a page carries."""
    return float(f"{value:.5g}") if math.isfinite(value) else 0.0


def bucket_label(low: float, high: float | None) -> str:
    if high is None:
        return f"{low:g}+"
    if isinstance(low, int) and isinstance(high, int):
        return str(low) if high == low + 1 else f"{low}\u2013{high - 1}"
    return f"{low:g}\u2013{high:g}"
