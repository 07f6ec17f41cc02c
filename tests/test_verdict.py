"""What a verdict may say where there is little to stand on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from r3.diagnose import LIVE, REPLAY, Verdict
from r3.diagnose.dumped import diagnose_dumps


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_handful_of_tokens_says_nothing_of_a_shift(tmp_path) -> None:
    """Two points always lie on a line: the correlation of three tokens at a neighbour is 1 or -1."""
    entry = {"rollout_logprobs": [-1.0, -1.001, -1.01], "train_logprobs": [-1.1, -1.0, -1.02]}
    result = diagnose_dumps({"train": [write(tmp_path, [entry])]}, resamples=100)
    assert [finding.id for finding in result.findings if finding.severity == "error"] == []


def test_no_interval_is_told_by_its_reason(tmp_path) -> None:
    def result(gaps: dict[str, float]) -> Verdict:
        lines = [
            {"rollout_logprobs": [-2.0], "train_logprobs": {n: [-2.0 - (i == 3) * d] for n, d in gaps.items()}}
            for i in range(20)
        ]
        return diagnose_dumps({"train": [write(tmp_path, lines)]}, resamples=100).verdict

    assert result({LIVE: 0.0, REPLAY: 0.0}).level == "good"
    assert result({LIVE: 0.0, REPLAY: 0.5}).level == "unknown", "replay opened a gap"
    assert "only few sequences have a gap" in result({LIVE: 0.5, REPLAY: 0.0}).text
