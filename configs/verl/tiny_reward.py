"""A reward for the tiny example: the share of the letter e in the response. It teaches nothing; it has a gradient."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:  # noqa: ARG001
    return solution_str.count("e") / max(len(solution_str), 1)
