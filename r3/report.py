"""report: one diagnosis as a table for people and as JSON for machines.

The table always states direction, tokens, sampling and stack: a KL without its stack cannot be compared with anyone's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from r3.diagnose import LIVE, REPLAY, Diagnosis
from r3.metrics import DIRECTION
from r3.shard.files import write_atomically

REPORT_VERSION = 1
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


def rows(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, ...]]:
    """A live and a replay row per diagnosis, as text; the second replay is the noise floor in `notes`."""
    return [
        (
            f"{_name(diagnosis)} {name}",
            f"{gap.k3:.2e}",
            f"{gap.mean_abs:.2e}",
            _share(gap.exceed["1.1"]),
            _share(gap.exceed["1.5"]),
            _percent(diagnosis.mismatch[name].share),
            _percent(diagnosis.mismatch[name].share_of_tokens),
        )
        for diagnosis in diagnoses
        for name in (LIVE, REPLAY)
        for gap in [diagnosis.gaps[name]]
    ]


def table(diagnoses: Sequence[Diagnosis]) -> Table:
    """For the terminal, in 80 columns; everything else is in the JSON."""
    out = Table(box=None, padding=(0, 1, 0, 0), title=f"Gap between rollout and training, k3 estimates {DIRECTION}")
    out.title_justify = "left"
    for index, column in enumerate(COLUMNS):
        heading = column if index == 0 else column.replace(" ", "\n", 1)
        out.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True, vertical="bottom")
    for row in rows(diagnoses):
        out.add_row(*row)
    return out


def markdown(diagnoses: Sequence[Diagnosis]) -> str:
    """The table and what it stands on, in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(diagnoses)]
    return "\n".join([*lines, "", *(f"- {line}" for line in notes(diagnoses)), ""])


def notes(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """What the table's columns are and its numbers stand on, in sentences."""
    first = diagnoses[0]
    rollout, trainer = first.rollout, first.trainer
    weights = _WEIGHTS[rollout["weights"]]
    out = [
        "F(t): share of tokens with max(r, 1/r) > t, r = p_train / p_rollout; other expert set: share of (token, layer) whose "
        "experts differ from the rollout's; tokens with one: share of tokens with at least one such layer",
        f"sampled at temperature {rollout['temperature']:g}, top_p {rollout['top_p']:g}, top_k {rollout['top_k']}; "
        f"the engine's {rollout['logprobs_mode'] or 'log-probs'}",
        f"rollout: {rollout['engine']} {rollout['engine_version']}; trainer: transformers {trainer['transformers']}, torch "
        f"{trainer['torch']} on {trainer['device']}; {weights}",
    ]
    for diagnosis in diagnoses:
        live, replay = diagnosis.gaps[LIVE], diagnosis.gaps[REPLAY]
        low, high = diagnosis.k3_saved
        out.append(
            f"{_name(diagnosis)}: {live.num_tokens:,} sampled tokens; replay lowers k3 by {_lower(live.k3, replay.k3)} (95 % "
            f"interval of the paired difference {low:.1e} to {high:.1e}) and F(1.1) "
            f"{_times(live.exceed['1.1'], replay.exceed['1.1'])}; "
            f"{diagnosis.verified:,} of {diagnosis.recorded * diagnosis.mismatch[LIVE].num_layers:,} recorded (token, layer) "
            f"seen at the experts as recorded; coverage {diagnosis.coverage:.2%} of rows; "
            f"two replays differ by {diagnosis.noise:.1e} (mean abs diff: the noise floor)"
        )
    return out


def to_json(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    return {"format": "r3-diagnosis", "version": REPORT_VERSION, "diagnoses": [d.to_dict() for d in diagnoses]}


def save(diagnoses: Sequence[Diagnosis], stem: Path) -> tuple[Path, Path]:
    """Write `<stem>.json` and `<stem>.md`; returns both paths."""
    files = stem.with_suffix(".json"), stem.with_suffix(".md")
    stem.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(files[0], (json.dumps(to_json(diagnoses), indent=2) + "\n").encode())
    write_atomically(files[1], markdown(diagnoses).encode())
    return files


def _name(diagnosis: Diagnosis) -> str:
    return " ".join(filter(None, (diagnosis.label, diagnosis.trainer["dtype"])))


def _share(value: float) -> str:
    return "0" if value == 0 else f"{value:.5f}"


def _percent(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:.2f} %"


def _lower(live: float, replay: float) -> str:
    return f"{1 - replay / live:.0%}" if live > 0 else "nothing, it was 0"


def _times(live: float, replay: float) -> str:
    if live == replay:
        return "not at all"
    return f"from {live:.5f} to 0" if replay == 0 else f"{live / replay:.1f} times"
