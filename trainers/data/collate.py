"""PackedBatch: samples one after another in one row, as packed (THD, `cu_seqlens`) attention takes them, and their replay.

    loader = DataLoader(dataset, batch_size=16, collate_fn=PackedCollator(multiple=8))
    for batch in loader:
        with batch.replay(replay):                                    # r3.trainers.transformers.attach(model)
            logits = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        logprobs = batch.logprobs_of(logits)                          # [1, P], where batch.loss_mask

Everything is placed by `Layout.packed`, so a row of the batch and a row of the routes cannot come apart. Values are those of the
token *at* a position, as in RolloutSample: the log-prob at position t is that of token t, predicted at t - 1. A batch for
Megatron, with labels shifted and cut over ranks, is `r3.trainers.megatron.batch.LocalBatch`; one padded line for each sample is
`r3.trainers.hf.ReplayCollator`. Both take `LazySample`s.

P positions, padding included; B samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from r3.errors import ReplayError
from r3.layout import Layout
from r3.microbatch import MicroBatch
from r3.partial import PartialSample
from r3.replay import Replay
from r3.sample import RolloutSample
from r3.trainers.data.lazy import LazySample

Whole = RolloutSample | LazySample


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One packed row.

    Attributes:
        samples: In the order of the row.
        layout: Which token each position holds.
        input_ids: [1, P] int64, `pad_id` in padding.
        position_ids: [1, P] int64, of each token in its sample; padding counts from 0 again, as one more sequence.
        cu_seqlens: [B + 1] int32, where the samples begin and end, padding excluded.
        loss_mask: [1, P] bool, the tokens in the loss. A first token of a sample has no predecessor and is never in it.
        rollout_logprobs: [1, P] float32, of the tokens in the loss under the rollout policy, 0 elsewhere.
        weight_version: [1, P] int32, -1 in padding and where nobody said.
        sample_of: [1, P] int64, the sample of each position; B in padding.
    """

    samples: tuple[Whole, ...]
    layout: Layout
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    weight_version: torch.Tensor
    sample_of: torch.Tensor

    @property
    def max_seqlen(self) -> int:
        return max((sample.num_tokens for sample in self.samples), default=0)

    def replay(self, replay: Replay) -> contextlib.AbstractContextManager[MicroBatch]:
        """Replay these samples in the forward inside the block; see `Replay.micro_batch`."""
        return replay.micro_batch(self.samples, self.layout, self.input_ids)

    def logprobs_of(self, logits: torch.Tensor) -> torch.Tensor:
        """[1, P] float32: log p of the token at each position in the loss, from logits [1, P, vocabulary]; 0 elsewhere.

        Keeps the graph. The logits of tokens in the loss are made float32, and no others.
        """
        wanted = self.loss_mask[0].nonzero()[:, 0]
        picked = logits[0].index_select(0, wanted - 1).float()
        values = picked.log_softmax(-1).gather(-1, self.input_ids[0, wanted, None])[:, 0]
        return torch.zeros_like(self.rollout_logprobs).index_put((torch.zeros_like(wanted), wanted), values)

    def spread(self, values: Sequence[float]) -> torch.Tensor:
        """One value a sample (an advantage), [1, P] float32 at its tokens in the loss, 0 elsewhere."""
        if len(values) != len(self.samples):
            raise ReplayError("one value for each sample", expected=len(self.samples), got=len(values))
        table = torch.tensor([*values, 0.0], dtype=torch.float32, device=self.sample_of.device)
        return table[self.sample_of] * self.loss_mask

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """Its tensors on a device; the samples stay on the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """For a loader with `pin_memory=True`."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Any) -> PackedBatch:
        tensors = {
            f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class PackedCollator:
    """`collate_fn`: some samples into one PackedBatch.

    Attributes:
        multiple: The row's length is rounded up to it.
        total: A fixed length of the row, so that all batches have one shape; as long as needed if None.
        pad_id: Token of the padding.
    """

    multiple: int = 1
    total: int | None = None
    pad_id: int = 0

    def __call__(self, samples: Sequence[Whole]) -> PackedBatch:
        """
        Raises:
            LayoutError: the samples do not fit `total`.
            ReplayError: no samples, one without log-probs (a plain PartialSample), or a token of the loss without a log-prob.
        """
        if not samples:
            raise ReplayError("a batch without samples")
        for sample in samples:
            if isinstance(sample, PartialSample) and not isinstance(sample, LazySample):
                raise ReplayError(
                    "a partial sample has no rollout log-probs",
                    where=f"sample {sample.sample_id!r}",
                    remedy="give what a ShardDataset gives, or whole samples",
                )
        lengths = [sample.num_tokens for sample in samples]
        used = sum(lengths)
        layout = Layout.packed(lengths, -(-used // self.multiple) * self.multiple if self.total is None else self.total)
        starts = np.cumsum([0, *lengths])
        places = np.concatenate([np.arange(n) for n in [*lengths, layout.num_positions - used]])
        in_loss = np.concatenate([sample.loss_mask for sample in samples])
        in_loss[starts[:-1][np.array(lengths) > 0]] = False
        logprobs = np.where(in_loss, np.concatenate([sample.rollout_logprobs for sample in samples]), np.float32(0))
        if np.isnan(logprobs).any():
            sample_number, token = layout.locate_row(int(np.isnan(logprobs).argmax()))
            raise ReplayError(
                "a token of the loss has no rollout log-prob",
                where=f"sample {samples[sample_number].sample_id!r}, token {token}",
                remedy="collect with log-probs, or leave such tokens out of the loss mask",
            )

        def row(values: npt.NDArray[Any], fill: Any) -> torch.Tensor:
            return torch.from_numpy(layout.gather(values, fill=fill))[None]

        return PackedBatch(
            samples=tuple(samples),
            layout=layout,
            input_ids=row(np.concatenate([sample.tokens for sample in samples]).astype(np.int64), self.pad_id),
            position_ids=torch.from_numpy(places.astype(np.int64))[None],
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
            loss_mask=row(in_loss, False),
            rollout_logprobs=row(logprobs.astype(np.float32), 0),
            weight_version=row(np.concatenate([sample.weight_version for sample in samples]), -1),
            sample_of=row(np.repeat(np.arange(len(samples)), lengths), len(samples)),
        )
