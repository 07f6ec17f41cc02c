"""Two runs side by side: before and after a change of engine, kernel, dtype or checkpoint.

    save_rows(diagnoses, Path("a.sequences.npz"))            # beside the report's a.json, by `r3 diagnose`
    compare(load_runs(Path("a.json"))[0], load_runs(Path("b.json"))[0])

Where both runs scored samples of the same ids and tokens, differences and ratios are paired over those; otherwise the two
runs are resampled independently. The rows of sums (`r3.metrics.sums`), 216 B per sequence and forward, are all that either
needs. A report whose rows are gone still compares, without intervals of the difference.

S sequences, C columns.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from r3.diagnose.result import COMPARED, Diagnosis, plain
from r3.errors import ConfigError, MetricError
from r3.metrics import Estimate, Float
from r3.metrics.bootstrap import MIN_SEQUENCES, bca, resampled_sums
from r3.metrics.sums import COLUMNS, metrics_of, with_sequence_values
from r3.shard.files import write_atomically

ROWS_SUFFIX = ".sequences.npz"
_ABOUT = ("label", "trainer", "rollout", "run", "verdict")


@dataclass(frozen=True, eq=False)
class Run:
    """One diagnosis of a report.

    Attributes:
        name: File, and label where the report has several.
        about: What it stands on: label, trainer, rollout, run, verdict.
        values: By forward, by metric.
        keys: Of each sequence: sample id and digest of its compared tokens; empty where rows are not at hand.
        rows: By forward [S, C].
    """

    name: str
    about: dict[str, Any]
    values: dict[str, dict[str, float]]
    keys: tuple[str, ...] = ()
    rows: dict[str, Float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunDifference:
    """One metric of one forward in both runs. `difference` is b minus a, `ratio` b / a."""

    forward: str
    metric: str
    a: Estimate
    b: Estimate
    difference: Estimate
    ratio: Estimate

    @property
    def speaks(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        return self.difference.known and not self.difference.low <= 0 <= self.difference.high

    def to_dict(self) -> dict[str, Any]:
        estimates = {name: getattr(self, name).to_dict() for name in ("a", "b", "difference", "ratio")}
        return {"forward": self.forward, "metric": self.metric, **estimates, "speaks": self.speaks}


@dataclass(frozen=True)
class RunComparison:
    """Two runs.

    Attributes:
        a, b: What each stands on.
        rows: Every metric of every forward that both have.
        paired: Whether differences are over the same samples and tokens; `sequences` is how many.
        text: One sentence on k3.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    rows: tuple[RunDifference, ...]
    paired: bool
    sequences: int
    text: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON: NaN and infinities are None."""
        data: dict[str, Any] = plain(
            {
                "format": "r3-comparison",
                "version": 1,
                "a": self.a,
                "b": self.b,
                "paired": self.paired,
                "sequences": self.sequences,
                "text": self.text,
                "rows": [row.to_dict() for row in self.rows],
            }
        )
        return data


def save_rows(diagnoses: Sequence[Diagnosis], path: Path) -> None:
    """Write the rows of sums of each diagnosis, for a later `compare`."""
    arrays: dict[str, Any] = {"columns": np.array(COLUMNS)}
    for i, diagnosis in enumerate(diagnoses):
        arrays[f"{i}/keys"] = np.array(diagnosis.sequence_keys)
        for name, rows in diagnosis.sequence_rows.items():
            arrays[f"{i}/{name}"] = rows
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomically(path, buffer.getvalue())


def run_of(diagnosis: Diagnosis, name: str) -> Run:
    """A diagnosis of this process as a side of a comparison."""
    data = diagnosis.to_dict()
    return Run(
        name,
        {"name": name, **{key: data[key] for key in _ABOUT}},
        _values(data),
        diagnosis.sequence_keys,
        diagnosis.sequence_rows,
    )


def load_runs(path: Path, which: int | None = None) -> list[Run]:
    """The diagnoses of a report's JSON, with their rows where these stand beside it.

    Args:
        which: Only this one, from 0.

    Raises:
        ConfigError: no such file, or it has not so many.
        MetricError: not a report of `r3 diagnose`, or of another version, or beside it lie the rows of another one.
    """
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read this report ({error.strerror or error})", where=str(path)) from None
    except ValueError as error:
        raise MetricError(f"not JSON ({error})", where=str(path)) from None
    if not isinstance(report, dict) or report.get("format") != "r3-diagnosis":
        raise MetricError("not a report of `r3 diagnose`", where=str(path), expected='"format": "r3-diagnosis"')
    if report.get("version") != 2:
        raise MetricError("a report of another version", where=str(path), expected=2, got=report.get("version"))
    diagnoses = report["diagnoses"]
    if which is not None and which >= len(diagnoses):
        raise ConfigError(
            "no such diagnosis in this report", where=str(path), expected=f"0..{len(diagnoses) - 1}", got=which
        )
    rows = _load_rows(path.with_suffix(ROWS_SUFFIX))
    return [
        _run(path, index, data, rows, several=len(diagnoses) > 1)
        for index, data in enumerate(diagnoses)
        if which in (None, index)
    ]


def _run(path: Path, index: int, data: dict[str, Any], rows: dict[str, Any], *, several: bool) -> Run:
    about = " ".join(filter(None, (data["label"], data["trainer"].get("dtype", ""))))
    name = f"{path} ({about})" if several and about else str(path)
    prefix = f"{index}/"
    mine = {key.removeprefix(prefix): array for key, array in rows.items() if key.startswith(prefix)}
    keys = tuple(mine.pop("keys").tolist()) if "keys" in mine else ()
    values = _values(data)
    _require_its_own(values, mine, path)
    return Run(name, {"name": name, **{key: data.get(key) for key in _ABOUT}}, values, keys, mine)


def _require_its_own(values: Mapping[str, Mapping[str, float]], rows: Mapping[str, Float], path: Path) -> None:
    """Rows of an older run may lie beside a report that was copied here: their sums then give other values than it says."""
    for name, table in rows.items():
        says = values.get(name, {}).get("k3", math.nan)
        found = float(metrics_of(with_sequence_values(table).sum(axis=0))["k3"])
        if math.isfinite(says) and not math.isclose(says, found, rel_tol=1e-6, abs_tol=1e-15):
            raise MetricError(
                f"the rows beside this report are those of another report: k3 of {name} is not the same",
                where=str(path.with_suffix(ROWS_SUFFIX)),
                expected=says,
                got=found,
                remedy="copy a report's .json and .sequences.npz together; without rows the comparison has no intervals",
            )


def table(comparison: RunComparison) -> Table:
    """For the terminal, in 80 columns: names of forwards give way, numbers never."""
    out = Table(box=None, padding=(0, 1, 0, 0))
    for index, column in enumerate(("forward", "metric", "A", "B", "B - A\n95 % interval", "B / A\n95 % interval")):
        justify: Literal["left", "right"] = "left" if index < 2 else "right"
        out.add_column(column, justify=justify, no_wrap=index > 0, overflow="fold")
    for row in comparison.rows:
        out.add_row(
            Text(row.forward),  # not markup: a dump's forward has the name that it was given
            row.metric,
            f"{row.a.value:.2e}",
            f"{row.b.value:.2e}",
            _shown(row.difference, ".1e"),
            _shown(row.ratio, ".2f"),
        )
    return out


def _shown(estimate: Estimate, style: str) -> str:
    if not math.isfinite(estimate.value):
        return "-"
    interval = f"\n\\[{estimate.low:{style}}, {estimate.high:{style}}]" if estimate.known else ""
    return f"{estimate.value:{style}}{interval}"


def compare(a: Run, b: Run, *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> RunComparison:
    """Both runs side by side.

    Raises:
        MetricError: no forward in common.
    """
    shared = [name for name in a.values if name in b.values]
    if not shared:
        raise MetricError("the two runs have no forward in common", expected=sorted(a.values), got=sorted(b.values))
    at = {key: i for i, key in enumerate(b.keys)}
    common = [(i, at[key]) for i, key in enumerate(a.keys) if key in at]
    paired = len(common) >= MIN_SEQUENCES
    rows: list[RunDifference] = []
    for name in shared:
        if name not in a.rows or name not in b.rows:
            rows += [_without_rows(name, metric, a.values[name][metric], b.values[name][metric]) for metric in COMPARED]
            continue
        table_a, table_b = a.rows[name], b.rows[name]
        if paired:
            table_a, table_b = table_a[[i for i, _ in common]], table_b[[j for _, j in common]]
        pair = _Pair(table_a, table_b, paired, level, resamples, seed)
        rows += [pair.difference(name, metric) for metric in COMPARED]
    sequences = len(common) if paired else 0
    return RunComparison(a.about, b.about, tuple(rows), paired, sequences, _text(rows, paired, sequences))


class _Pair:
    """Resamples of two tables: of the same sequences together, or of each by itself."""

    def __init__(self, a: Float, b: Float, paired: bool, level: float, resamples: int, seed: int) -> None:
        self.level, self.small = level, min(len(a), len(b)) < MIN_SEQUENCES
        a, b = with_sequence_values(a), with_sequence_values(b)
        total_a, total_b = a.sum(axis=0), b.sum(axis=0)
        self.value = metrics_of(total_a), metrics_of(total_b)
        if self.small:
            return
        seeds = (seed, seed if paired else seed + 1)
        self.resampled = tuple(metrics_of(resampled_sums(t, resamples, s)) for t, s in zip((a, b), seeds, strict=True))
        if paired:
            self.without = metrics_of(total_a - a), metrics_of(total_b - b)
        else:  # each sequence of either run is left out in turn
            self.without = (
                metrics_of(np.concatenate([total_a - a, np.broadcast_to(total_a, b.shape)])),
                metrics_of(np.concatenate([np.broadcast_to(total_b, a.shape), total_b - b])),
            )

    def difference(self, forward: str, metric: str) -> RunDifference:
        return RunDifference(
            forward,
            metric,
            self._estimate(metric, lambda a, _: a),
            self._estimate(metric, lambda _, b: b),
            self._estimate(metric, lambda a, b: b - a),
            self._estimate(metric, lambda a, b: b / a),
        )

    def _estimate(self, metric: str, statistic: Callable[[Float, Float], Float]) -> Estimate:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(self.value[0][metric], self.value[1][metric]))
            if self.small:
                return Estimate(value)
            resampled, without = (statistic(of[0][metric], of[1][metric]) for of in (self.resampled, self.without))
            if metric.startswith("exceed_") and not np.ptp(resampled):
                return Estimate(value)  # as `Bootstrap`: resamples of no token bound nothing
            return Estimate(value, *bca(resampled, value, without, self.level))


def _without_rows(forward: str, metric: str, a: float, b: float) -> RunDifference:
    ratio = b / a if a else math.nan
    return RunDifference(forward, metric, Estimate(a), Estimate(b), Estimate(b - a), Estimate(ratio))


def _text(rows: Sequence[RunDifference], paired: bool, sequences: int) -> str:
    parts = []
    for row in rows:
        if row.metric == "k3":
            change = f"k3 of {row.forward} {row.a.value:.2e} to {row.b.value:.2e}"
            if row.ratio.known:
                change += f" (times {row.ratio.value:.2f}, 95 % interval {row.ratio.low:.2f} to {row.ratio.high:.2f})"
            silent = row.difference.known and not row.speaks
            parts.append(change + (", no difference that the interval shows" if silent else ""))
    if not any(row.difference.known for row in rows):
        basis = (
            f"no intervals, so nothing says whether these are differences: {ROWS_SUFFIX} of a report is not beside it, or it has "
            f"fewer than {MIN_SEQUENCES} sequences"
        )
    elif paired:
        basis = f"paired over {sequences} sequences"
    else:
        basis = "other samples: the two runs are resampled independently"
    return f"{'; '.join(parts)}; {basis}"


def _values(data: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    def number(forward: Mapping[str, Any], metric: str) -> float:
        value = forward["intervals"][metric]["value"]
        return math.nan if value is None else float(value)

    return {
        name: {metric: number(forward, metric) for metric in COMPARED} for name, forward in data["forwards"].items()
    }


def _load_rows(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            if archive["columns"].tolist() != list(COLUMNS):
                return {}  # sums of another version: they cannot be paired, and the JSON still has the values
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise MetricError(f"not rows of a report ({error})", where=str(path)) from None
