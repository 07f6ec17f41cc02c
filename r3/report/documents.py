"""A diagnosis as the plain data that every output is made from, and how its numbers are written."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from r3.diagnose import AGAIN, LIVE, REPLAY, Diagnosis
from r3.errors import MetricError

REPORT_VERSION = 2
Document: TypeAlias = dict[str, Any]  # of Diagnosis.to_dict: NaN and infinities are None
Diagnoses: TypeAlias = Sequence[Diagnosis | Document]

DASH = "\u2013"
LEVELS = {"good": "Good", "warning": "Needs care", "bad": "Bad", "unknown": "Open"}  # of a verdict


def documents(diagnoses: Diagnoses) -> list[Document]:
    """Results and their dicts alike, as dicts."""
    return [each.to_dict() if isinstance(each, Diagnosis) else each for each in diagnoses]


def to_json(diagnoses: Diagnoses) -> dict[str, Any]:
    return {"format": "r3-diagnosis", "version": REPORT_VERSION, "diagnoses": documents(diagnoses)}


def load(path: Path) -> list[Document]:
    """The diagnoses of a JSON file that `save` wrote.

    Raises:
        MetricError: it is something else, or of another version.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise MetricError(f"cannot read this diagnosis ({error})", where=str(path)) from None
    if not isinstance(data, dict) or data.get("format") != "r3-diagnosis" or data.get("version") != REPORT_VERSION:
        raise MetricError(
            "not a diagnosis that this version of r3 reads",
            where=str(path),
            expected=f"format r3-diagnosis, version {REPORT_VERSION}",
            got=f"format {data.get('format')}, version {data.get('version')}"
            if isinstance(data, dict)
            else "no object",
            remedy="make it again with `r3 diagnose`",
        )
    found: list[Document] = data["diagnoses"]
    return found


def name_of(document: Document) -> str:
    """Label and dtype: what tells this diagnosis from others of a report."""
    return " ".join(filter(None, (document["label"], document["trainer"].get("dtype", ""))))


def shown_forwards(document: Document) -> list[str]:
    """Names of the passes in plots and tables: a second replay is the noise floor, not a row of its own."""
    return [name for name in document["forwards"] if name != AGAIN]


def pair(document: Document) -> tuple[str, str | None]:
    """(the pass before, the pass with replay): the first pass and no other where there is no such pair."""
    names = list(document["forwards"])
    return (LIVE, REPLAY) if LIVE in names and REPLAY in names else (names[0], None)


def scientific(value: float | None) -> str:
    return DASH if value is None or math.isnan(value) else "0" if value == 0 else f"{value:.2e}"


def share(value: float | None) -> str:
    """A small share as a decimal, in which rows are compared."""
    return DASH if value is None or math.isnan(value) else "0" if value == 0 else f"{value:.5f}"


def percent(value: float | None) -> str:
    return DASH if value is None or math.isnan(value) else "0" if value == 0 else f"{100 * value:.2f} %"


def plain(value: float | None, digits: int = 3) -> str:
    return DASH if value is None or math.isnan(value) else f"{value:.{digits}g}"


def interval(estimate: dict[str, float | None] | None) -> str:
    """` [3.1e-04, 3.6e-04]`; "" where there is none."""
    if not estimate or estimate["low"] is None or estimate["high"] is None:
        return ""
    return f" [{estimate['low']:.1e}, {estimate['high']:.1e}]"
