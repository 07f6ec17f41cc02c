"""The table of a diagnosis, for a terminal and for a pull request, and in sentences what it stands on."""

from __future__ import annotations

from typing import Literal

from rich.table import Table
from rich.text import Text

from r3.metrics import DIRECTION
from r3.report.documents import (
    DASH,
    LEVELS,
    Diagnoses,
    Document,
    documents,
    interval,
    name_of,
    pair,
    percent,
    plain,
    scientific,
    share,
    shown_forwards,
)

_WEIGHTS = {
    "same": "the trainer's weights are those that sampled (fingerprints agree)",
    "other": "the trainer's weights are NOT those that sampled: the gap contains their difference",
    "unknown": "whether the trainer's weights are those that sampled is not known",
}
COLUMNS = (
    "trainer forward",
    "k3",
    "mean abs diff",
    "F(1.1)",
    "F(1.5)",
    "other expert set",
    "tokens with one",
)
_MORE = ("F(2)", "max ratio", "ESS")


def rows(diagnoses: Diagnoses) -> list[tuple[str, ...]]:
    """A row per pass of each diagnosis, as text; the second replay is the noise floor in `notes`."""
    return [
        _row(document, name)[: len(COLUMNS)] for document in documents(diagnoses) for name in shown_forwards(document)
    ]


def table(diagnoses: Diagnoses) -> Table:
    """For the terminal, in 80 columns; everything else is in the JSON."""
    out = Table(box=None, padding=(0, 1, 0, 0), title=f"Gap between rollout and training, k3 estimates {DIRECTION}")
    out.title_justify = "left"
    for index, column in enumerate(COLUMNS):
        heading = column if index == 0 else column.replace(" ", "\n", 1)
        # Names give way, numbers never: a number that is cut reads like another one.
        justify: Literal["left", "right"] = "left" if index == 0 else "right"
        out.add_column(heading, justify=justify, no_wrap=index > 0, overflow="fold", vertical="bottom")
    for row in rows(diagnoses):
        out.add_row(*map(Text, row))  # not markup: labels are names of directories
    return out


def markdown(diagnoses: Diagnoses) -> str:
    """Verdicts, the table with intervals, findings, and what they stand on: for a pull request."""
    found = documents(diagnoses)
    lines = []
    for document in found:
        verdict = document["verdict"]
        about = f" ({_line(name_of(document))})" if len(found) > 1 else ""
        lines += [f"**{LEVELS[verdict['level']]}{about}.** {_line(verdict['text'])}", ""]
    columns = (*COLUMNS[:5], _MORE[0], *COLUMNS[5:], *_MORE[1:])
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for document in found:
        for name in shown_forwards(document):
            row = list(_row(document, name))
            row[1] += interval(document["forwards"][name]["intervals"].get("k3"))
            row = [*row[:5], row[7], *row[5:7], *row[8:]]
            lines.append("| " + " | ".join(map(_cell, row)) + " |")
    lines.append("")
    for document in found:
        for finding in document["findings"]:
            remedy = f"; remedy: {finding['remedy']}" if finding["remedy"] else ""
            lines.append(f"- **{finding['severity']}** `{finding['id']}`: {_line(finding['text'] + remedy)}")
    return "\n".join([*lines, *(f"- {_line(line)}" for line in notes(found)), ""])


def notes(diagnoses: Diagnoses) -> list[str]:
    """What the table's columns are and its numbers stand on, in sentences."""
    found = documents(diagnoses)
    out = [
        "F(t): share of tokens with max(r, 1/r) > t, r = p_train / p_rollout; other expert set: share of (token, layer) whose "
        "experts differ from the rollout's; tokens with one: share of tokens with at least one such layer",
    ]
    for of in (_sampling, _sides):
        said = [of(document) for document in found]
        if len(set(said)) == 1:
            out += [said[0]] if said[0] else []
        else:  # stores of different rollouts in one report
            out += [f"{name_of(document)}: {text}" for document, text in zip(found, said, strict=True) if text]
    return out + [_summary(document) for document in found]


def _sampling(document: Document) -> str:
    rollout = document["rollout"]
    if rollout.get("temperature") is None:
        return ""
    return (
        f"sampled at temperature {rollout['temperature']:g}, top_p {rollout['top_p']:g}, top_k {rollout['top_k']}; "
        f"the engine's {rollout['logprobs_mode'] or 'log-probs'}"
    )


def _sides(document: Document) -> str:
    rollout = document["rollout"]
    engine = f"{rollout.get('engine', '')} {rollout.get('engine_version', '')}".strip() or "not stated"
    trainer = _stack(document["trainer"])
    return f"rollout: {engine}; trainer: {trainer}; {_WEIGHTS[rollout.get('weights', 'unknown')]}"


def _stack(trainer: dict[str, str]) -> str:
    """`transformers 5.10.4, torch 2.13.0 on cpu`, whatever the scorer says of itself."""
    framework = trainer.get("framework", "not stated")
    parts = [f"{framework} {trainer[framework]}" if framework in trainer else framework]
    parts += [f"torch {trainer['torch']}"] if trainer.get("torch") else []
    return ", ".join(parts) + (f" on {trainer['device']}" if trainer.get("device") else "")


def _row(document: Document, name: str) -> tuple[str, ...]:
    forward = document["forwards"][name]
    routes, exceed = forward["routes"], forward["exceed"]
    dtype = forward["trainer"].get("dtype", "")
    return (
        " ".join(filter(None, (document["label"], "" if dtype in name.split() else dtype, name))),
        scientific(forward["k3"]),
        scientific(forward["mean_abs"]),
        share(exceed["1.1"]),
        share(exceed["1.5"]),
        DASH if routes is None else percent(routes["share_of_token_layers"]),
        DASH if routes is None else percent(routes["share_of_tokens"]),
        share(exceed["2"]),
        DASH if forward["max_ratio"] is None else f"{forward['max_ratio']:.3g}",
        DASH if forward["ess"] is None else f"{forward['ess']:.4f}",
    )


def _summary(document: Document) -> str:
    """One diagnosis in a sentence."""
    base, other = pair(document)
    live = document["forwards"][base]
    text = f"{name_of(document) or base}: {live['num_tokens']:,} sampled tokens of {document['sequences']:,} sequences"
    if other is not None:
        replay = document["forwards"][other]
        low, high = document["k3_saved_by_replay_95ci"]
        between = "" if low is None else f" (95 % interval of the paired difference {low:.1e} to {high:.1e})"
        text += (
            f"; replay lowers k3 by {_lower(live['k3'], replay['k3'])}{between} and F(1.1) "
            f"{_times(live['exceed']['1.1'], replay['exceed']['1.1'])}"
        )
    layers = len((live["routes"] or {}).get("share_by_layer", ()))
    if layers:
        text += (
            f"; {document['verified_token_layers']:,} of {document['recorded_rows'] * layers:,} recorded (token, layer) "
            f"seen at the experts as recorded; coverage {document['coverage']:.2%} of rows"
        )
    effect = document["route_effect"].get(other or "")
    if effect and effect["value"] is not None:
        text += f"; route effect {_estimate(document['route_effect'][base])} {base}, {_estimate(effect)} with {other}"
    if document["floor"] is not None and document["floor"]["text"] not in _lowered(document["verdict"]["text"]):
        text += f"; float floor: {document['floor']['text']}"
    noise = document["noise_mean_abs"]
    if noise is not None:
        text += f"; two replays differ by {noise:.1e} (mean abs diff: the noise floor)"
    return text


def _estimate(estimate: dict[str, float | None]) -> str:
    """`1.17 [1.02, 1.38]`."""
    known = estimate["low"] is not None and estimate["high"] is not None
    return plain(estimate["value"]) + (f" [{plain(estimate['low'])}, {plain(estimate['high'])}]" if known else "")


def _lowered(verdict: str) -> str:
    """A verdict's sentences as a clause would have them."""
    return ". ".join(sentence[:1].lower() + sentence[1:] for sentence in verdict.split(". "))


def _lower(live: float | None, replay: float | None) -> str:
    if live is None or replay is None:
        return "an unknown amount"
    return f"{1 - replay / live:.0%}" if live > 0 else "nothing, it was 0"


def _times(live: float, replay: float) -> str:
    if live == replay:
        return "not at all"
    return f"from {live:.5f} to 0" if replay == 0 else f"{live / replay:.1f} times"


def _cell(text: str) -> str:
    """Text that stays text in a cell of a table."""
    return _line(text).replace("|", "&#124;")


def _line(text: str) -> str:
    """Text that stays text in Markdown: labels and ids come from elsewhere."""
    for character, instead in (("&", "&amp;"), ("<", "&lt;"), ("`", "&#96;"), ("](", "]&#40;")):
        text = text.replace(character, instead)
    return " ".join(text.split())
