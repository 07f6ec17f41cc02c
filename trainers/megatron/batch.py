"""One rank's micro-batch: tokens, labels, masks, log-probs and positions, padded, packed and cut as Megatron's forward wants.

Padding, packing, the context-parallel cut and the shift from tokens to labels are all done on one vector of rows
(`r3.layout`), so that what stands at a position of `tokens` is the sample's token, its routes' row, and the predecessor of the
label there. A label at the border of two context-parallel ranks is right, because labels are shifted before the cut.

    form = Form(packed=True, multiple=rank.multiple)
    batch = LocalBatch.build(samples, form, rank)

b lines, s positions of a line on this rank; packed (THD) is one line of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from r3.errors import ReplayError
from r3.layout import Layout
from r3.microbatch import to_device
from r3.partial import Replayable
from r3.trainers.megatron.layouts import context_parallel, router_rows, sbhd, thd


class Rank(NamedTuple):
    """Where this process stands in the parallelism that cuts tokens.

    Attributes:
        tensor, tensor_size: Rank and size of tensor parallelism.
        context, context_size: Of context parallelism.
        sequence_parallel: Whether a TP rank's routers see its part of the sequence only.
    """

    tensor: int = 0
    tensor_size: int = 1
    context: int = 0
    context_size: int = 1
    sequence_parallel: bool = False

    @classmethod
    def here(cls, sequence_parallel: bool) -> Rank:
        """This process, from Megatron's `parallel_state`."""
        from megatron.core import parallel_state

        return cls(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
            sequence_parallel,
        )

    @property
    def multiple(self) -> int:
        """What a sequence's length must be a multiple of, so that it can be cut: TP size under SP, times 2 x CP size."""
        cut = self.tensor_size if self.sequence_parallel else 1
        return cut * (2 * self.context_size if self.context_size > 1 else 1)

    def router_rows(self, layout: Layout) -> Layout:
        """The rows of this rank's routers, from the layout of its token tensor."""
        if not self.sequence_parallel:
            return router_rows(layout)
        return router_rows(layout, tp_rank=self.tensor, tp_size=self.tensor_size)


@dataclass(frozen=True)
class Form:
    """How the samples of a micro-batch become a tensor.

    Attributes:
        packed: One after another in one line (THD), or one a line, padded on the right (SBHD).
        multiple: Each sequence's length (packed), or the width of the lines, is rounded up to it; see `Rank.multiple`.
        total_multiple: A packed line's length is rounded up to it as well: 16 or 32 for each rank in FP8.
        width: A fixed width of the whole micro-batch's lines, rounded up to `multiple`, so that all micro-batches have one
            shape, as pipelines want without `variable_seq_lengths`; None for as wide as needed.
        cut: Of context parallelism, `zigzag` or `contiguous`.
    """

    packed: bool = True
    multiple: int = 1
    total_multiple: int = 1
    width: int | None = None
    cut: str = "zigzag"

    def place(self, lengths: Sequence[int], rank: Rank) -> Placed:
        """Where the tokens of these samples stand.

        Raises:
            LayoutError: they do not fit `width`, or cannot be cut.
        """
        bounds = None
        if self.packed:
            width = None if self.width is None else -(-self.width // self.multiple) * self.multiple
            packed = thd(lengths, multiple=self.multiple, total_multiple=width or self.total_multiple)
            whole, bounds = packed.layout, (packed.cu_seqlens, packed.cu_seqlens_padded)
            begins = np.repeat(bounds[1][:-1], np.diff(bounds[1]))
            positions = np.arange(whole.num_positions) - begins
            if width is not None and whole.num_positions > width:
                raise ReplayError(
                    "the samples of a micro-batch do not fit its line",
                    expected=f"at most {width} tokens, padding of each sequence to {self.multiple} included",
                    got=whole.num_positions,
                    remedy="put fewer samples into a micro-batch, or choose a larger width",
                )
        else:
            whole = sbhd(lengths, width=self.width, multiple=self.multiple)
            positions = np.tile(np.arange(whole.num_positions // len(lengths)), len(lengths))
        numbers = Layout(np.arange(whole.num_positions), (whole.num_positions,), whole.lines)
        padded = None if bounds is None else bounds[1]
        mine = context_parallel(numbers, rank.context, rank.context_size, cut=self.cut, cu_seqlens_padded=padded)
        lines = whole.lines or 1
        return Placed(whole.select(mine.rows.reshape(lines, -1)), positions[mine.rows].astype(np.int64), bounds)


class Placed(NamedTuple):
    """Attributes:
    layout: Of this rank's token tensor, after the context-parallel cut.
    positions: [b * s] int64, of each position in its sequence.
    bounds: cu_seqlens and cu_seqlens_padded of the whole packed micro-batch.
    """

    layout: Layout
    positions: npt.NDArray[np.int64]
    bounds: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None


Batch = TypeVar("Batch", bound="LocalBatch")


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """What one rank's forward and loss take, on its device; every tensor is [b, s].

    Attributes:
        samples: As read on this rank, in the order of the layout.
        layout: Where each position comes from.
        tokens: int64, 0 in padding.
        labels: int64, the token after each position's; 0 where there is none.
        loss_mask: float32, 1 where the label is a token that the rollout sampled.
        position_ids: int64, in the sequence.
        rollout_logprobs: float32, of the labels under the rollout policy, 0 outside `loss_mask`; None if not asked for.
        packed_seq_params: Megatron's, for packed micro-batches; the bounds are of whole sequences, as Transformer Engine takes
            them under context parallelism too.
    """

    samples: tuple[Replayable, ...]
    layout: Layout
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    rollout_logprobs: torch.Tensor | None
    packed_seq_params: Any
    _owners: torch.Tensor  # [b, s] int64, the sample of each label in the loss, else the number of samples

    @classmethod
    def build(
        cls: type[Batch],
        samples: Sequence[Replayable],
        placed: Placed,
        device: torch.device,
        rollout_logprobs: Sequence[npt.NDArray[np.float32]] | None = None,
    ) -> Batch:
        """From samples and where they stand.

        Args:
            rollout_logprobs: [T] of each sample, as in RolloutSample; None on ranks that compute no loss.

        Raises:
            ReplayError: a token in the loss has no rollout log-prob.
        """
        layout, lines = placed.layout, placed.layout.lines or 1
        tokens = np.concatenate([s.tokens for s in samples]).astype(np.int64)
        in_loss = np.concatenate([s.loss_mask for s in samples])
        owners = np.repeat(np.arange(len(samples)), layout.lengths)
        following = np.where(np.append(owners[1:] == owners[:-1], False), np.arange(1, len(tokens) + 1), -1)
        label_rows = layout.gather(following, fill=-1)
        used = (label_rows >= 0) & in_loss[label_rows]
        logprobs = None
        if rollout_logprobs is not None:
            every = np.concatenate(rollout_logprobs).astype(np.float32)
            logprobs = np.where(used, every[label_rows], np.float32(0))
            if np.isnan(logprobs).any():
                sample, token = layout.locate_row(int(label_rows[np.isnan(logprobs)][0]))
                raise ReplayError(
                    "a token of the loss has no rollout log-prob",
                    where=f"sample {samples[sample].sample_id!r}, token {token}",
                    remedy="collect with log-probs, or leave such tokens out of the loss mask",
                )

        def tensor(values: npt.NDArray[Any]) -> torch.Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(values.reshape(lines, -1))), device)

        return cls(
            samples=tuple(samples),
            layout=layout,
            tokens=tensor(layout.gather(tokens, fill=0)),
            labels=tensor(np.where(label_rows >= 0, tokens[label_rows], 0)),
            loss_mask=tensor(used.astype(np.float32)),
            position_ids=tensor(placed.positions),
            rollout_logprobs=None if logprobs is None else tensor(logprobs),
            packed_seq_params=None if placed.bounds is None else _packed_seq_params(*placed.bounds, device),
            _owners=tensor(np.where(used, owners[label_rows], len(samples))),
        )

    def spread(self, values: Sequence[float]) -> torch.Tensor:
        """One value a sample (an advantage), [b, s] float32 at the positions whose label is in the loss, 0 elsewhere."""
        if len(values) != len(self.samples):
            raise ReplayError("one value for each sample", expected=len(self.samples), got=len(values))
        table = torch.tensor([*values, 0.0], dtype=torch.float32, device=self._owners.device)
        return table[self._owners]


def _packed_seq_params(plain: npt.NDArray[np.int32], padded: npt.NDArray[np.int32], device: torch.device) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds, bounds_padded = (to_device(torch.from_numpy(array), device) for array in (plain, padded))
    longest = int(np.diff(padded).max(initial=0))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds_padded,
        cu_seqlens_kv_padded=bounds_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
