"""A checkpoint that transformers has loaded: does it hold the whole model?

transformers draws weights that a checkpoint lacks at random and goes on: the rollout and the trainer then hold another model in
each process, and their difference would be taken for a gap. Imports nothing of transformers: it reads what that returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.errors import R3Error


def require_whole(loading_info: Mapping[str, Any], where: str, error: type[R3Error]) -> None:
    """Raise `error` if a weight was drawn at random.

    Args:
        loading_info: Of `from_pretrained(..., output_loading_info=True)`.
        where: The checkpoint.
    """
    drawn = sorted(map(str, [*loading_info["missing_keys"], *loading_info["mismatched_keys"]]))
    if drawn:
        raise error(
            f"the checkpoint has not all weights of this model: {len(drawn)} are absent or of another shape",
            where=where,
            got=", ".join(drawn[:3]) + (", ..." if len(drawn) > 3 else ""),
            remedy="complete the checkpoint, or mend its config.json",
        )
