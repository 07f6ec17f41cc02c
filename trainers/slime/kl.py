"""kl: what replay is for, measured on every rollout that is trained: the gap between rollout and trainer log-probs.

slime's `--rollout-data-postprocess-path` function is called on every rank after the log-probs are there, as `(args,
rollout_id, rollout_data)` (its documentation says `(args, samples)`). `kl_report` compares `log_probs` with
`rollout_log_probs` on the tokens of the loss, in float64, with the definitions of `r3.metrics`, and reports

- into slime's own trackers, over all data- and context-parallel ranks: `r3/k1`, `r3/k2`, `r3/k3`, `r3/mean_abs`, `r3/F_1.1`, ...;
- into `<r3_store>/kl/step-000012.rank000.json`: all metrics of this rank's tokens, quantiles included.

k3 estimates KL(rollout || train). Compare a run with the same run without replay, or `r3 diagnose` the shards: a number alone
says little, because the numerics of attention and experts are in it too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from r3.errors import ConfigError
from r3.metrics import DIRECTION, TAUS, Float, GapAccumulator, k3_terms, log_ratio
from r3.rollout.slime.settings import Settings
from r3.routes import Mask
from r3.shard import write_atomically
from r3.shard.files import is_url, local_path
from r3.trainers.slime.upstream import SLIME_KL, find


def kl_report(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Report the gap of one rollout. Collective over the data- and context-parallel ranks of the last pipeline stage.

    Args:
        args: slime's arguments with the `r3_*` settings.
        rollout_id: The rollout.
        rollout_data: slime's training data of this rank: `log_probs`, `rollout_log_probs` [response tokens of this rank] each,
            `loss_masks`, `total_lengths`, `response_lengths`.

    Raises:
        ConfigError: slime was not told to compute the trainer's log-probs.
        MetricError: values that are no log-probs.
    """
    slime, settings = find(SLIME_KL), Settings.from_args(args)
    if is_url(settings.store):
        raise ConfigError(
            "the KL report is written beside the shards, into a directory",
            where="--rollout-data-postprocess-path r3.trainers.slime.kl_report",
            expected="r3_store: a local path",
            got=settings.store,
            remedy="take the KL report out of the command line, and `r3 diagnose` the shards",
        )
    if slime["mpu.get_tensor_model_parallel_rank"]() != 0 or not slime["mpu.is_pipeline_last_stage"]():
        return
    _require_logprobs(rollout_data)
    gap, ratios = GapAccumulator(), []
    for i, mask in enumerate(_local_masks(rollout_data, slime)):
        train, rollout = (_vector(rollout_data[name][i])[mask] for name in ("log_probs", "rollout_log_probs"))
        if len(train):
            ratios.append(log_ratio(train, rollout, f"rollout {rollout_id}, sample {i} of this rank"))
            gap.add(train, rollout, ratios[-1])
    slime["gather_log_data"]("r3", args, rollout_id, _sums(np.concatenate(ratios) if ratios else np.zeros(0)))
    if ratios:
        _write(local_path(settings.store) / "kl", rollout_id, gap)


def no_correction(
    args: Any,  # noqa: ARG001
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],  # noqa: ARG001
    rollout_log_probs: list[torch.Tensor],  # noqa: ARG001
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """slime's importance-sampling function that leaves the loss as it is.

    `--get-mismatch-metrics` makes slime compute the trainer's log-probs before training, but wants such a function, and its own
    two correct the loss.
    """
    return pg_loss, loss_masks, {}


def _require_logprobs(rollout_data: dict[str, Any]) -> None:
    for name, remedy in (
        (
            "log_probs",
            "slime skips the pass that computes them where the training forward can give them: --get-mismatch-metrics with "
            "--custom-tis-function-path r3.trainers.slime.no_correction makes it; or take the KL report out of the command "
            "line and use r3 diagnose",
        ),
        ("rollout_log_probs", "the generate function must give log_probs with the sampled tokens"),
    ):
        if not rollout_data.get(name):
            raise ConfigError(
                f"the KL report has no {name}",
                where="--rollout-data-postprocess-path r3.trainers.slime.kl_report",
                expected="log_probs and rollout_log_probs in the training data",
                got=sorted(rollout_data),
                remedy=remedy,
            )


def _local_masks(rollout_data: dict[str, Any], slime: dict[str, Any]) -> list[Mask]:
    """For each sample which of this rank's response tokens the loss uses; slime cuts log-probs over context-parallel ranks."""
    masks = []
    for mask, total, response in zip(
        rollout_data["loss_masks"], rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True
    ):
        used = _vector(mask) != 0
        if slime["mpu.get_context_parallel_world_size"]() > 1:
            spans = slime["get_logits_and_tokens_offset_with_cp"](total, response)[3]
            prompt = total - response
            used = np.concatenate(
                [used[begin - prompt : end - prompt] for begin, end in spans if end > begin] or [used[:0]]
            )
        masks.append(used)
    return masks


def _sums(d: Float) -> dict[str, tuple[float, float]]:
    """(sum, count) of each metric, which slime adds up over ranks and divides."""
    terms = {"k1": -d, "k2": d * d / 2, "k3": k3_terms(d), "mean_abs": np.abs(d)}
    terms |= {f"F_{tau:g}": (np.abs(d) > np.log(tau)).astype(np.float64) for tau in TAUS}
    return {name: (float(values.sum()), float(len(d))) for name, values in terms.items()}


def _vector(values: Any) -> Float:
    return np.asarray(values.detach().float().cpu() if isinstance(values, torch.Tensor) else values, np.float64).ravel()


def _write(folder: Path, rollout_id: int, gap: GapAccumulator) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    folder.mkdir(parents=True, exist_ok=True)
    report = {"rollout_id": rollout_id, "rank": rank, "direction": DIRECTION, **gap.metrics().to_dict()}
    data = orjson.dumps(report, option=orjson.OPT_INDENT_2)
    write_atomically(folder / f"step-{rollout_id:06d}.rank{rank:03d}.json", [memoryview(data)], fsync=False)
