"""The plots of a diagnosis, as Vega-Lite specifications made with Altair.

Why Altair: one specification is the interactive plot of a page (Vega's own bundle, 0.9 MB, goes into the page) and, through
vl-convert, the PNG, with no browser and no display; a specification is text that a test can run. Plotly's bundle alone is 4.5 MB
of a page that must stay under 5 MB, and its PNGs need a Chrome; matplotlib draws PNGs best, but its SVGs are not interactive, and
a light and a dark page would need each of them twice.

A `Figure` keeps its data apart from its specification, as columns: a heat map of 48 layers and 128 experts is 40 KB that way, and
300 KB as rows. Colours come from a theme that is applied when a plot is drawn (`r3.report.themes`), so a page can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from r3.report.documents import Document, pair, shown_forwards
from r3.report.figure import LOG_AXIS, Figure, add, bucket_label, color, columns, dash, figure, rounded, tip


def figures(document: Document) -> list[Figure]:
    """Every plot for which the diagnosis has data, in the order of the page."""
    made = (make(document) for make in _ALL)
    return [one for one in made if one is not None and one.num_rows]


def ratios(document: Document) -> Figure | None:
    """Histogram of d = log p_train - log p_rollout of each pass, as a density, on a logarithmic axis."""
    out = columns("forward", "low", "high", "density", "base", "tokens")
    for name in _two(document):
        histogram = document["forwards"][name]["histogram"]
        if not histogram:
            continue
        total = max(sum(histogram["counts"]), 1)
        for low, high, count in zip(histogram["edges"], histogram["edges"][1:], histogram["counts"], strict=False):
            if count:
                add(out, name, low, high, count / total / (high - low), 0.0, count)
    lowest = min(out["density"], default=1.0) / 2
    out["base"] = [lowest] * len(out["base"])
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_bar(opacity=0.62, binSpacing=0)
        .encode(
            x=alt.X("low:Q", title="log ratio  d = log p(train) \u2212 log p(rollout)"),
            x2="high:Q",
            y=alt.Y("density:Q", title="tokens per unit of d", scale=alt.Scale(type="log"), axis=LOG_AXIS),
            y2="base:Q",
            color=color(document, _two(document)),
            tooltip=[
                tip("forward:N", "pass"),
                tip("low:Q", "d from", ".4f"),
                tip("high:Q", "to", ".4f"),
                tip("tokens:Q", "tokens", ","),
            ],
        )
    )
    return figure(
        "ratios",
        "Ratio distribution",
        "How far apart train and rollout are, token by token. Replay should leave a narrow peak; wide shoulders that stay are "
        "not routing.",
        chart,
        out,
    )


def tail(document: Document) -> Figure | None:
    """F(tau) of each pass."""
    out = columns("forward", "tau", "share")
    for name in shown_forwards(document):
        curve = document["forwards"][name]["exceed_curve"]
        for tau, value in zip(curve.get("tau", ()), curve.get("share", ()), strict=True):
            if value:
                add(out, name, tau, value)
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_line(point=alt.OverlayMarkDef(size=16), interpolate="monotone")
        .encode(
            x=alt.X(
                "tau:Q",
                title="\u03c4",
                scale=alt.Scale(type="log", nice=False),
                axis=alt.Axis(format="~g", tickCount=6),
            ),
            y=alt.Y(
                "share:Q",
                title="share of tokens beyond \u03c4",
                scale=alt.Scale(type="log"),
                axis=LOG_AXIS,
            ),
            color=color(document),
            strokeDash=dash(document),
            tooltip=[
                tip("forward:N", "pass"),
                tip("tau:Q", "\u03c4", ".3g"),
                tip("share:Q", "F(\u03c4)", ".3g"),
            ],
        )
    )
    return figure(
        "tail",
        "Tail: F(\u03c4)",
        "Share of tokens with max(r, 1/r) above \u03c4. The tail is where importance sampling clips and where runs break: replay "
        "should move it by one to two orders of magnitude.",
        chart,
        out,
    )


def by_position(document: Document) -> Figure | None:
    return _bucketed(
        document,
        "by_position",
        "position",
        "Gap by position",
        "position in the response",
        "A gap that grows along the response accumulates: the KV cache of the two sides drifts apart. A jump at one position "
        "points at a prefix cache or a resumed request.",
    )


def by_probability(document: Document) -> Figure | None:
    return _bucketed(
        document,
        "by_probability",
        "probability",
        "Gap by rollout probability",
        "probability that the rollout gave the token",
        "Unlikely tokens carry most of the gap. That is normal; it is also where a clipped ratio loses its gradient.",
    )


def by_live_mismatch(document: Document) -> Figure | None:
    return _bucketed(
        document,
        "by_live_mismatch",
        "mismatch",
        "Gap by differing layers",
        "layers where live routing differs",
        "If the gap is routing, live k3 rises with the number of differing layers and replay is flat. If both are flat, look "
        "elsewhere.",
    )


def by_version(document: Document) -> Figure | None:
    """Only with two versions or more: one bar says nothing that the table does not."""
    first = next(iter(document["forwards"].values()))
    if len(first["by_version"]) < 2:
        return None
    out = columns("forward", "version", "order", "k3", "mean_abs", "tokens")
    for name in shown_forwards(document):
        for row in document["forwards"][name]["by_version"]:
            version = "unknown" if row["version"] < 0 else str(row["version"])
            add(out, name, version, row["version"], row["k3"], row["mean_abs"], row["tokens"])
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_line(point=alt.OverlayMarkDef(size=40))
        .encode(
            x=alt.X(
                "version:O", title="weight version", sort=alt.EncodingSortField("order"), axis=alt.Axis(labelAngle=0)
            ),
            y=alt.Y("mean_abs:Q", title="mean |d|"),
            color=color(document),
            strokeDash=dash(document),
            tooltip=[
                tip("forward:N", "pass"),
                tip("version:O", "version"),
                tip("k3:Q", "k3", ".3g"),
                tip("mean_abs:Q", "mean |d|", ".3g"),
                tip("tokens:Q", "tokens", ","),
            ],
        )
    )
    return figure(
        "versions",
        "Staleness by weight version",
        "Tokens that older weights sampled. A slope is staleness: replay does not remove it, fewer updates per rollout do.",
        chart,
        out,
    )


def by_layer(document: Document) -> Figure | None:
    routes = _live_routes(document)
    if routes is None:
        return None
    names = _layer_names(document, len(routes["share_by_layer"]))
    out = columns("layer", "share", "overlap")
    for layer, value, overlap in zip(names, routes["share_by_layer"], routes["overlap_by_layer"], strict=True):
        add(out, layer, value, overlap)
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_bar()
        .encode(
            x=alt.X("layer:O", title="decoder layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("share:Q", title="tokens with another expert set", axis=alt.Axis(format="%")),
            tooltip=[
                tip("layer:O", "layer"),
                tip("share:Q", "other set", ".3%"),
                tip("overlap:Q", "mean overlap", ".4f"),
            ],
        )
    )
    return figure(
        "layers",
        "Route mismatch by layer",
        "Live routing against the rollout's record. A rise with depth is normal. One layer alone far above its neighbours "
        "deserves a look: experts that nearly tie there, a wrong layer map, or a draft model that overwrote it.",
        chart,
        out,
    )


def layer_by_expert(document: Document) -> Figure | None:
    routes = _live_routes(document)
    if routes is None or not routes["by_expert"]["recorded"] or not routes["by_expert"]["recorded"][0]:
        return None
    tables = routes["by_expert"]
    names = _layer_names(document, len(tables["recorded"]))
    out = columns("layer", "expert", "share", "recorded", "gained")
    for layer, recorded, lost, gained in zip(names, tables["recorded"], tables["lost"], tables["gained"], strict=True):
        for expert, (have, gone, new) in enumerate(zip(recorded, lost, gained, strict=True)):
            add(out, layer, expert, rounded(gone / have) if have else None, have, new)
    tooltip = [
        tip("layer:O", "layer"),
        tip("expert:O", "expert"),
        tip("share:Q", "lost, of its recorded tokens", ".2%"),
        tip("recorded:Q", "recorded", ","),
        tip("gained:Q", "gained", ","),
    ]
    return figure(
        "experts",
        "Layer by expert: who loses tokens",
        "Share of the tokens recorded at an expert that live routing sends elsewhere. Single bright cells are experts with a "
        "close rival; a bright row is a layer to look into; empty cells were never chosen.",
        _heat_map("expert:O", "expert", "lost", tooltip),
        out,
        height=_heat_height(len(names)),
    )


def layer_by_position(document: Document) -> Figure | None:
    routes = _live_routes(document)
    if routes is None or not routes["by_position"]["low"]:
        return None
    table = routes["by_position"]
    names, ends = _layer_names(document, len(table["share"])), [*table["low"][1:], None]
    labels = [bucket_label(low, high) for low, high in zip(table["low"], ends, strict=True)]
    out = columns("layer", "position", "order", "share", "rows")
    for layer, shares in zip(names, table["share"], strict=True):
        for label, low, value, rows in zip(labels, table["low"], shares, table["rows"], strict=True):
            if rows:
                add(out, layer, label, low, rounded(value), rows)
    tooltip = [
        tip("layer:O", "layer"),
        tip("position:O", "positions"),
        tip("share:Q", "other set", ".2%"),
        tip("rows:Q", "tokens", ","),
    ]
    return figure(
        "positions",
        "Layer by position",
        "Share of tokens with another expert set, by layer and position in the sequence (prompt included). It should be even "
        "along the sequence; a bright column starts where rows are shifted or a cache held other ones.",
        _heat_map("position:O", "position in the sequence", "other set", tooltip, sort="order"),
        out,
        height=_heat_height(len(names)),
    )


_ALL: tuple[Callable[[Document], Figure | None], ...] = (
    ratios,
    tail,
    by_live_mismatch,
    by_layer,
    by_position,
    by_probability,
    layer_by_expert,
    layer_by_position,
    by_version,
)


def _bucketed(document: Document, key: str, id_: str, title: str, axis: str, caption: str) -> Figure | None:
    """k3 of each pass by bucket, on a logarithmic axis."""
    out = columns("forward", "bucket", "order", "k3", "mean_abs", "tokens")
    for name in shown_forwards(document):
        for row in document["forwards"][name][key]:
            if row["k3"]:
                label = bucket_label(row["low"], row["high"])
                add(out, name, label, row["low"], row["k3"], row["mean_abs"], row["tokens"])
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_line(point=alt.OverlayMarkDef(size=36))
        .encode(
            x=alt.X(
                "bucket:O",
                title=axis,
                sort=alt.EncodingSortField("order", op="min"),
                axis=alt.Axis(labelAngle=-40, labelOverlap=True),
            ),
            y=alt.Y("k3:Q", title="k3", scale=alt.Scale(type="log"), axis=LOG_AXIS),
            color=color(document),
            strokeDash=dash(document),
            tooltip=[
                tip("forward:N", "pass"),
                tip("bucket:O", axis),
                tip("k3:Q", "k3", ".3g"),
                tip("mean_abs:Q", "mean |d|", ".3g"),
                tip("tokens:Q", "tokens", ","),
            ],
        )
    )
    return figure(id_, title, caption, chart, out)


def _heat_map(x: str, title: str, legend: str, tooltip: Sequence[alt.Tooltip], sort: str = "") -> alt.Chart:
    axis = alt.Axis(labelAngle=0 if not sort else -40, labelOverlap=True, grid=False)
    order = alt.EncodingSortField(sort, op="min") if sort else "ascending"
    chart: alt.Chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_rect()
        .encode(
            x=alt.X(x, title=title, axis=axis, sort=order),
            y=alt.Y("layer:O", title="decoder layer", axis=alt.Axis(labelOverlap=True, grid=False)),
            color=alt.Color(
                "share:Q",
                scale=alt.Scale(type="sqrt", domainMin=0),
                legend=alt.Legend(title=legend, format=".1%", orient="top", gradientLength=160),
            ),
            tooltip=tooltip,
        )
    )
    return chart


def _heat_height(layers: int) -> int:
    return max(150, min(14 * layers, 520))


def _live_routes(document: Document) -> dict[str, Any] | None:
    """Routes of the pass before replay against the record."""
    routes: dict[str, Any] | None = document["forwards"][pair(document)[0]]["routes"]
    return routes


def _layer_names(document: Document, count: int) -> list[int]:
    """Global decoder-layer indices where the diagnosis knows them, else the MoE layers counted from 0."""
    layers = document["run"].get("moe_layers") or []
    return list(layers) if len(layers) == count else list(range(count))


def _two(document: Document) -> list[str]:
    return [name for name in pair(document) if name is not None]
