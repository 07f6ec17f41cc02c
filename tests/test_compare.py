"""Two runs side by side: paired where they scored the same samples, honest where they did not."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from policies import Engine, Trainer
from rich.console import Console
from typer.testing import CliRunner

from r3 import cli, report
from r3.diagnose import Diagnosis, diagnose
from r3.diagnose.compare import ROWS_SUFFIX, compare, load_runs, run_of, save_rows, table
from r3.diagnose.dumped import diagnose_dumps
from r3.errors import ConfigError, MetricError


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Diagnosis]:
    """The same rollout under a trainer and under one whose routers flip half as often; and another rollout."""
    path = tmp_path_factory.mktemp("runs")
    store = Engine().store(path / "a", count=24)
    other = Engine().store(path / "b", count=30, num_tokens=44)
    return {
        "before": diagnose(store, Trainer(flips=0.04), resamples=300),
        "after": diagnose(store, Trainer(flips=0.02), resamples=300),
        "other": diagnose(other, Trainer(flips=0.04), resamples=300),
    }


def saved(result: Diagnosis, path: Path) -> Path:
    report.save([result], path, page=False)
    save_rows([result], path.with_suffix(ROWS_SUFFIX))
    return path.with_suffix(".json")


def shown(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(renderable)
    return out.getvalue()


def test_the_same_samples_are_paired(runs) -> None:
    got = compare(run_of(runs["before"], "before"), run_of(runs["after"], "after"))
    assert got.paired
    assert got.sequences == 24
    k3 = next(row for row in got.rows if (row.forward, row.metric) == ("live", "k3"))
    assert k3.a.value == pytest.approx(runs["before"].gaps["live"].k3)
    assert k3.difference.value == pytest.approx(runs["after"].gaps["live"].k3 - runs["before"].gaps["live"].k3)
    assert k3.speaks
    assert k3.ratio.high < 1
    assert "paired over 24 sequences" in got.text
    same = compare(run_of(runs["before"], "a"), run_of(runs["before"], "b"))
    assert not any(row.speaks for row in same.rows)
    assert all(row.difference.low == row.difference.high == 0 for row in same.rows if row.difference.known)
    assert table(got).row_count == len(got.rows)


def test_other_samples_are_resampled_independently(runs) -> None:
    got = compare(run_of(runs["before"], "before"), run_of(runs["other"], "other"))
    assert not got.paired
    assert "the two runs are resampled independently" in got.text
    k3 = next(row for row in got.rows if (row.forward, row.metric) == ("live", "k3"))
    assert k3.difference.known
    assert k3.difference.high - k3.difference.low > max(k3.a.high - k3.a.low, k3.b.high - k3.b.low) * 0.9
    assert not k3.speaks, "the same policies: nothing to find"


def test_files_say_the_same_as_results(tmp_path, runs) -> None:
    a, b = saved(runs["before"], tmp_path / "a"), saved(runs["after"], tmp_path / "b")
    direct = compare(run_of(runs["before"], "x"), run_of(runs["after"], "y"))
    [one], [two] = load_runs(a), load_runs(b)
    data = json.loads(json.dumps(compare(one, two).to_dict(), allow_nan=False))
    assert data["rows"] == direct.to_dict()["rows"]
    assert (data["format"], data["version"], data["paired"]) == ("r3-comparison", 1, True)
    a.with_suffix("").with_suffix(ROWS_SUFFIX).unlink()
    [bare] = load_runs(a)
    got = compare(bare, two)
    assert not got.paired
    assert got.rows[0].difference.value == pytest.approx(direct.rows[0].difference.value)
    assert not got.rows[0].difference.known


def test_what_cannot_be_compared_is_refused(tmp_path, runs) -> None:
    with pytest.raises(ConfigError, match="cannot read this report"):
        load_runs(tmp_path / "gone.json")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(MetricError, match="not a report of `r3 diagnose`"):
        load_runs(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"format": "r3-diagnosis", "version": 1}')
    with pytest.raises(MetricError, match="another version"):
        load_runs(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="no such diagnosis"):
        load_runs(saved(runs["before"], tmp_path / "a"), 1)
    nothing = run_of(Diagnosis({}, {}), "nothing")
    with pytest.raises(MetricError, match="no forward in common"):
        compare(run_of(runs["before"], "a"), nothing)


def test_the_command_prints_the_comparison(tmp_path, runs) -> None:
    a, b = saved(runs["before"], tmp_path / "a"), saved(runs["after"], tmp_path / "b")
    done = CliRunner().invoke(cli.app, ["compare", str(a), str(b)])
    assert done.exit_code == 0, done.output
    assert "paired over 24 sequences" in done.output
    as_json = CliRunner().invoke(cli.app, ["compare", str(a), str(b), "--json"])
    assert json.loads(as_json.output)["comparisons"][0]["paired"] is True
    mixed = CliRunner().invoke(cli.app, ["compare", str(a), str(tmp_path)])
    assert "cannot be compared" in str(mixed.exception)
    shards = CliRunner().invoke(cli.app, ["compare", str(tmp_path), str(tmp_path)])
    assert "need the trainer's model" in str(shards.exception)


def test_other_rollouts_without_names_or_tokens_are_not_paired(tmp_path) -> None:
    rng = np.random.default_rng(0)

    def dumped() -> Diagnosis:
        rollout = [(-0.5 - rng.exponential(1, 20)).tolist() for _ in range(12)]
        lines = [json.dumps({"rollout_logprobs": r, "train_logprobs": [x - 0.01 for x in r]}) for r in rollout]
        (tmp_path / "d.jsonl").write_text("\n".join(lines))
        return diagnose_dumps({"train": [tmp_path / "d.jsonl"]}, resamples=100)

    a, b = dumped(), dumped()
    assert compare(run_of(a, "a"), run_of(a, "a")).paired
    assert not compare(run_of(a, "a"), run_of(b, "b")).paired


def test_without_rows_nothing_is_said_of_the_difference(tmp_path, runs) -> None:
    a, b = (saved(runs[name], tmp_path / name) for name in ("before", "after"))
    a.with_suffix(ROWS_SUFFIX).unlink()
    [one], [two] = load_runs(a), load_runs(b)
    text = compare(one, two).text
    assert "no intervals, so nothing says whether these are differences" in text
    assert "no difference" not in text
    assert "resampled" not in text


def test_rows_of_another_report_are_refused(tmp_path, runs) -> None:
    a, b = (saved(runs[name], tmp_path / name) for name in ("before", "after"))
    shutil.copy(b, a)  # without its rows: those of the older report stay
    with pytest.raises(MetricError, match="rows beside this report are those of another report"):
        load_runs(a)


def test_a_share_that_no_token_makes_has_no_interval(runs) -> None:
    got = compare(run_of(runs["before"], "a"), run_of(runs["after"], "b"))
    empty = [row for row in got.rows if row.metric.startswith("exceed_") and row.a.value == row.b.value == 0]
    assert empty
    assert not any(row.a.known or row.difference.known for row in empty)


def test_the_table_keeps_its_numbers_at_80_columns(runs) -> None:
    named = run_of(runs["before"], "a")
    named.values["[red]live"], named.rows["[red]live"] = named.values["live"], named.rows["live"]
    text = shown(table(compare(named, named)))
    assert "\u2026" not in text
    assert "[red]live" in text.replace("\n", "")
    assert f"{runs['before'].gaps['live'].k3:.2e}" in text
    assert "[1.00, 1.00]" in text
