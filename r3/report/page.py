"""The page: one HTML file that works from a disk and asks the network for nothing.

Contract: every text that is not this package's own (ids, labels, tokens, paths, messages with them) is escaped, by Jinja's
automatic escaping in HTML and by its `tojson` inside the script; a Content-Security-Policy in the page forbids every request, so
that what should be impossible is also refused. Vega needs `unsafe-eval` for its expressions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2

import r3
from r3.metrics import DIRECTION
from r3.report import documents as text
from r3.report.charts import figures
from r3.report.context import Tokenizer, worst_tokens
from r3.report.documents import Document
from r3.report.figure import Figure
from r3.report.rendering import bundle
from r3.report.table import notes
from r3.report.themes import THEMES

_CURVES = ("1.1", "1.5", "2", "3", "5", "10")


def page(diagnoses: Sequence[Document], tokenizer: Tokenizer | None) -> str:
    """The page of one or more diagnoses."""
    parts = [_part(number, document, tokenizer) for number, document in enumerate(diagnoses)]
    data = {
        "themes": THEMES,
        "figures": {
            f"{part['id']}-{figure.id}": {"spec": figure.spec, "columns": figure.columns, "height": figure.height}
            for part in parts
            for figure in part["figures"]
        },
    }
    return _template().render(
        parts=parts,
        data=data,
        notes=notes(diagnoses),
        direction=DIRECTION,
        version=r3.__version__,
        curves=_CURVES,
        css=_asset("page.css"),
        js=_asset("page.js"),
        bundle=bundle().replace("</script", "<\\/script"),
        has_text=tokenizer is not None,
    )


def _part(number: int, document: Document, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What the template shows of one diagnosis."""
    base, other = text.pair(document)
    forwards = document["forwards"]
    drawn: list[Figure] = figures(document)
    return {
        "id": f"d{number}",
        "name": text.name_of(document) or "diagnosis",
        "document": document,
        "level": document["verdict"]["level"],
        "level_name": text.LEVELS[document["verdict"]["level"]],
        "headline": _sentences(document["verdict"]["text"]),
        "tiles": _tiles(document, base, other),
        "figures": drawn,
        "tokens": worst_tokens(document, tokenizer),
        "base": base,
        "other": other,
        "top_share": forwards[base]["top_share"],
        "versions": len(forwards[base]["by_version"]),
        "comparisons": [each for each in document["comparisons"] if (each["base"], each["other"]) == (base, other)],
        "facts": _facts(document),
    }


def _sentences(verdict: str) -> tuple[str, str]:
    """The first sentence, which is the verdict, and what qualifies it."""
    first, dot, rest = verdict.partition(". ")
    return first + ("." if dot else ""), rest


def _tiles(document: Document, base: str, other: str | None) -> list[dict[str, str]]:
    """The six numbers at the top: before, and after replay where there was one."""
    before = document["forwards"][base]
    after = document["forwards"][other] if other else None
    routes = before["routes"]

    def tile(name: str, one: str, two: str | None = None, hint: str = "") -> dict[str, str]:
        return {"name": name, "before": one, "after": two or "", "hint": hint}

    out = [
        tile(
            "k3",
            text.scientific(before["k3"]),
            text.scientific(after["k3"]) if after else None,
            f"estimates {DIRECTION}",
        ),
        tile(
            "F(1.5)",
            text.percent(before["exceed"]["1.5"]),
            text.percent(after["exceed"]["1.5"]) if after else None,
            "tokens with max(r, 1/r) > 1.5",
        ),
        tile(
            "largest ratio",
            text.plain(before["max_ratio"]),
            text.plain(after["max_ratio"]) if after else None,
            "of one token, max(r, 1/r)",
        ),
    ]
    if routes is not None:
        out.append(
            tile(
                "other expert set", text.percent(routes["share_of_token_layers"]), hint="share of (token, layer), live"
            )
        )
        out.append(
            tile("replay coverage", text.percent(document["replay_coverage"]), hint="rows that could be replayed")
        )
    out.append(tile("tokens", f"{before['num_tokens']:,}", hint=f"sampled, of {document['sequences']:,} sequences"))
    return out


def _facts(document: Document) -> list[tuple[str, str]]:
    """Everything needed to repeat it, as name and value."""
    run, rollout = document["run"], document["rollout"]
    command = run.get("command") or []
    facts: list[tuple[str, Any]] = [
        ("command", " ".join(command) if isinstance(command, (list, tuple)) else command),
        ("source", run.get("source")),
        ("tokens compared (digest)", run.get("token_digest")),
        ("weights", rollout.get("weights")),
        *((f"rollout {name.replace('_', ' ')}", value) for name, value in rollout.items() if name != "weights"),
        *((f"trainer {name}", value) for name, value in document["trainer"].items()),
        *((f"option {name}", value) for name, value in (run.get("options") or {}).items()),
        *((f"{name} version", value) for name, value in (run.get("versions") or {}).items()),
        ("machine", run.get("machine")),
        *((f"bootstrap {name}", value) for name, value in (run.get("bootstrap") or {}).items()),
        ("rows", f"{document['rows']:,}, recorded {document['recorded_rows']:,}"),
        ("(token, layer) proved at the experts", f"{document['verified_token_layers']:,}"),
        ("two replays differ by (mean |d|)", text.scientific(document["noise_mean_abs"])),
    ]
    return [
        (name, ", ".join(map(str, v)) if isinstance(v, list) else str(v))
        for name, v in facts
        if v not in (None, "", [])
    ]


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    environment.filters.update(
        scientific=text.scientific,
        percent=text.percent,
        plain=text.plain,
        share=text.share,
        interval=text.interval,
        ratio=_ratio,
        probability=_probability,
        metric=_metric,
    )
    return environment.from_string(_asset("page.html"))


def _ratio(train: float | None, rollout: float | None) -> str:
    """p_train / p_rollout of a token."""
    if train is None or rollout is None:
        return text.DASH
    return f"{math.exp(max(min(train - rollout, 700.0), -700.0)):.3g}"


def _probability(logprob: float | None) -> str:
    return text.DASH if logprob is None else f"{math.exp(min(logprob, 0.0)):.3g}"


def _metric(name: str) -> str:
    """As the table calls it."""
    return {"mean_abs": "mean |d|", "sequence_k3_mean": "k3, mean of sequences"}.get(
        name, f"F({name.removeprefix('exceed_')})" if name.startswith("exceed_") else name
    )


def _asset(name: str) -> str:
    return resources.files("r3.report").joinpath(name).read_text(encoding="utf-8")
