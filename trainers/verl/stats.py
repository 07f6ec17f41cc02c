"""stats: what r3 adds to veRL's metrics, from the passes over one mini-batch on all ranks.

veRL averages a metric over ranks and micro-batches, which is wrong for shares of unequal batches. So sums are taken here, reduced
once over all ranks when a mini-batch is done (two small tensors), and the shares made from the totals are the same on every
rank: veRL's mean of equal numbers is that number. veRL drops the metrics of `compute_log_prob`; theirs are kept and go out with
the next update.

Names (veRL puts `actor/` in front):

    r3/...                 the update;   r3/old_log_prob/...   the pass that computes the old log-probs
    coverage               rows replayed, as a share of the rows that hold a token
    rows_replayed, rows_unrecorded, rows_padding, synthetic_samples      counts: rows without a record, padding, and veRL's
                           fill-up samples route live
    agreement              share of compared recorded ids that the trainer's router would have chosen (`r3.agreement`)
    agreement/layer_007, agreement/layer_min       the same by decoder layer, and the lowest
    k3, mean_abs, f_1.1, f_2, max_ratio            the gap of trainer and rollout on trained tokens (`r3.metrics`); with
                           rollout.calculate_log_probs
    read_s                 seconds spent on reading routes, per rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from r3.agreement import Agreement
from r3.metrics import k3_terms
from r3.replay import Coverage
from r3.trainers.verl.samples import sequences

_ROWS, _OTHERS = ("replayed", "unrecorded", "padding"), ("synthetic", "read_s")
_GAPS = ("tokens", "k3", "abs", "f_1.1", "f_2")


class Counters(Protocol):
    """What is read of a replay handle, transformers' or Megatron's."""

    @property
    def coverage(self) -> Coverage: ...

    @property
    def agreement(self) -> Agreement: ...


class PassStats:
    """Counters of the passes over one mini-batch.

    Args:
        replay: The handle whose counters are read.
        layers: Global indices of all MoE layers of the model, also those of other pipeline stages.
    """

    def __init__(self, replay: Counters, layers: Sequence[int]) -> None:
        self._replay, self._layers = replay, tuple(layers)
        self._before = self._counts()
        self.synthetic, self.read_s = 0, 0.0
        self._gaps = np.zeros(len(_GAPS))
        self._largest = 0.0

    def add_gap(self, micro_batch: Any, log_probs: torch.Tensor) -> None:
        """log_probs [B, T_b] jagged: entry t is log p(token t + 1), as veRL's engines return it."""
        rollout = micro_batch.get("rollout_log_probs", None)
        if rollout is None:
            return
        masks, lengths = sequences(micro_batch["response_mask"]), response_lengths(micro_batch)
        for train, other, mask, length in zip(sequences(log_probs), sequences(rollout), masks, lengths, strict=True):
            used = mask[:length].astype(bool)
            end = len(train) - 1
            d = (train[end - length : end].astype(np.float64) - other[:length].astype(np.float64))[used]
            if len(d):
                size = np.abs(d)
                above = [float((size > np.log(tau)).sum()) for tau in (1.1, 2)]
                self._gaps += [len(d), float(k3_terms(d).sum()), float(size.sum()), *above]
                self._largest = max(self._largest, float(size.max()))

    def totals(self, prefix: str, device: torch.device, *, counts_rows: bool = True) -> dict[str, float]:
        """The metrics of all ranks' passes. Every rank must call it: it communicates.

        Args:
            device: Where the process group's backend reduces.
            counts_rows: False on ranks whose rows another rank counts.
        """
        counts = self._counts() - self._before
        if not counts_rows:
            counts[: len(_ROWS)] = 0
        sums = torch.tensor([*counts, self.synthetic, self.read_s, *self._gaps], dtype=torch.float64, device=device)
        largest = torch.tensor([self._largest], dtype=torch.float64, device=device)
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        shares = _shares(self._layers, np.asarray(sums.tolist()), float(largest))
        return {f"{prefix}{name}": value for name, value in shares.items()}

    def _counts(self) -> npt.NDArray[np.float64]:
        """Rows by kind, then agreed and compared ids by layer, so far."""
        rows, agreement = self._replay.coverage, self._replay.agreement
        by_layer = [kept.get(layer, 0) for kept in (agreement.agreed, agreement.compared) for layer in self._layers]
        return np.array([*(getattr(rows, name) for name in _ROWS), *by_layer], np.float64)


def _shares(layers: Sequence[int], sums: npt.NDArray[np.float64], largest: float) -> dict[str, float]:
    rows, agreed, compared, others, values = np.split(
        sums, np.cumsum([len(_ROWS), len(layers), len(layers), len(_OTHERS)])
    )
    counts = {**dict(zip(_ROWS, rows.tolist(), strict=True)), **dict(zip(_OTHERS, others.tolist(), strict=True))}
    gaps = dict(zip(_GAPS, values.tolist(), strict=True))
    tokens = counts["replayed"] + counts["unrecorded"]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    out = {
        "coverage": counts["replayed"] / max(tokens, 1),
        "rows_replayed": counts["replayed"],
        "rows_unrecorded": counts["unrecorded"],
        "rows_padding": counts["padding"],
        "synthetic_samples": counts["synthetic"],
        "read_s": counts["read_s"] / ranks,
    }
    if compared.sum():
        shares = {layer: a / c for layer, a, c in zip(layers, agreed, compared, strict=True) if c}
        out["agreement"] = float(agreed.sum() / compared.sum())
        out["agreement/layer_min"] = float(min(shares.values()))
        out |= {f"agreement/layer_{layer:03d}": float(share) for layer, share in shares.items()}
    if gaps["tokens"]:
        out |= {name: gaps[key] / gaps["tokens"] for name, key in (("k3", "k3"), ("mean_abs", "abs"))}
        out |= {name: gaps[name] / gaps["tokens"] for name in ("f_1.1", "f_2")}
        out["max_ratio"] = float(np.exp(largest))
    return out


def response_lengths(micro_batch: Any) -> list[int]:
    """Response tokens of each sample: jagged responses, or right-padded ones under an attention mask [B, P + R]."""
    mask = micro_batch["response_mask"]
    if mask.is_nested:
        lengths: list[int] = mask.offsets().diff().tolist()
        return lengths
    attention = micro_batch["attention_mask"]
    counts: list[int] = attention[:, -mask.shape[1] :].sum(dim=1).tolist()
    return counts
