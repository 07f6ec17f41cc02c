"""BatchLayout: which rows of what a router sees are this rank's tokens, under data and sequence parallelism.

A router's ids [rows, K] are not always this rank's tokens and nothing else:

| layout | the router sees | this rank's tokens are |
|---|---|---|
| `local` | this rank's n tokens | all rows |
| `padded` | n tokens and padding (CUDA-graph sizes, a multiple of TP) | the first n |
| `gathered` | all data-parallel ranks' tokens, one rank after the other, each with its padding | a span in the middle |
| `sharded` | this rank's contiguous shard (sequence parallel) | all rows of all ranks, put together again |

The engine knows which it is, so it says so at the start of a step. Nothing is guessed from a number of rows: two layouts may
have the same. A number of rows that the layout does not say is an error that lists the sizes, never a silent skip.

n rows of this rank, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from r3.errors import CaptureError


@dataclass(frozen=True)
class BatchLayout:
    """One step's rows. Made by `local`, `padded`, `gathered` or `sharded`.

    Attributes:
        kind: One of those names.
        num_rows: This rank's tokens n: the rows of a snapshot.
        sizes: Rows of each part that the router's batch is made of; what messages list.
        seen: Rows that the router sees here.
        start: The first of them that is kept.
        kept: How many are kept here: n, or this rank's shard.
        group: The process group that the shards are gathered over; None is the default group. Of `sharded` alone.
    """

    kind: str
    num_rows: int
    sizes: tuple[int, ...]
    seen: int
    start: int
    kept: int
    group: Any = None

    @classmethod
    def local(cls, num_rows: int) -> BatchLayout:
        return cls("local", num_rows, (num_rows,), num_rows, 0, num_rows)

    @classmethod
    def padded(cls, num_rows: int, padded_rows: int) -> BatchLayout:
        """n tokens, then padding up to `padded_rows`.

        Raises:
            CaptureError: fewer rows than tokens.
        """
        _require_room((num_rows,), (padded_rows,))
        return cls("padded", num_rows, (num_rows, padded_rows - num_rows), padded_rows, 0, num_rows)

    @classmethod
    def gathered(cls, counts: Sequence[int], rank: int, spans: Sequence[int] | None = None) -> BatchLayout:
        """The tokens of all data-parallel ranks, one rank after the other.

        Args:
            counts: Tokens of each rank.
            rank: This rank.
            spans: Rows of each rank with its padding (the maximum for every rank, a multiple of TP, the sum of its
                sequence-parallel shards); `counts` if None.

        Raises:
            CaptureError: spans that do not hold the counts, or a rank that is not one of them.
        """
        spans = counts if spans is None else spans
        _require_room(counts, spans)
        if not 0 <= rank < len(counts):
            raise CaptureError(
                "this rank is not one of the batch's", expected=f"a rank in 0..{len(counts) - 1}", got=rank
            )
        return cls("gathered", counts[rank], tuple(spans), sum(spans), sum(spans[:rank]), counts[rank])

    @classmethod
    def sharded(
        cls, num_rows: int, rank: int, world: int, *, sizes: Sequence[int] | None = None, group: Any = None
    ) -> BatchLayout:
        """This rank's contiguous shard of n tokens; a snapshot gathers all of them, on every rank.

        Args:
            num_rows: Tokens of all shards together, n, without padding at the end.
            rank: This rank in the group.
            world: Ranks in the group.
            sizes: Rows of each rank's shard, padding of the last ones included; ceil(n / world) for each if None.
            group: Process group; the default one if None.

        Raises:
            CaptureError: shards that do not hold n tokens, or a rank that is not one of them.
        """
        sizes = (-(-num_rows // world),) * world if sizes is None else tuple(sizes)
        _require_room((num_rows,), (sum(sizes),))
        if len(sizes) != world or not 0 <= rank < world:
            raise CaptureError(
                "the shards are not those of the group",
                expected=f"{world} sizes and a rank below {world}",
                got=f"sizes {list(sizes)}, rank {rank}",
            )
        return cls("sharded", num_rows, sizes, sizes[rank], 0, sizes[rank], group)

    def select(self, rows: int, layer: int) -> slice:
        """Which of a router's `rows` rows are kept.

        Raises:
            CaptureError: the layout says another number of rows.
        """
        if rows != self.seen:
            raise CaptureError(
                "a router saw another number of rows than the step has: no row of it can be told from another",
                where=f"layer {layer}, layout {self.kind}",
                expected=f"{self.seen} rows ({self.brief()})",
                got=rows,
                remedy="begin_step must get the layout of this very step; a layer that splits or gathers its batch needs the "
                "layout of its router's input",
            )
        return slice(self.start, self.start + self.kept)

    def brief(self) -> str:
        """One line for messages, with every size: `gathered: [4, 6] rows, of which rows 4..8 are the 5 of this rank`."""
        return (
            f"{self.kind}: {list(self.sizes)} rows, of which rows {self.start}..{self.start + self.kept - 1} are kept "
            f"for {self.num_rows} tokens"
        )

    def gather(self, rows: torch.Tensor, sound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All n rows [n, L, K] from the shards of a `sharded` batch: one collective over its group, for all layers.

        Args:
            rows: This rank's shard [kept, L, K], of any integer dtype.
            sound: [] bool on the same device, whether this rank's rows can be used; it travels with them, so that a rank whose
                step went wrong is an error on all of them and none waits for it.

        Returns:
            The rows, and [ranks] uint8, 1 where a rank's rows are sound.
        """
        width = rows.shape[1] * rows.shape[2] * rows.element_size()
        longest = max(self.sizes)
        # Bytes: every backend gathers them; NCCL knows no 16-bit integer. One row more, for the flag.
        sent = torch.zeros((longest + 1, width), dtype=torch.uint8, device=rows.device)
        sent[: self.kept] = rows.contiguous().view(torch.uint8).reshape(self.kept, width)
        sent[longest] = sound.to(torch.uint8)
        parts = [torch.empty_like(sent) for _ in self.sizes]
        torch.distributed.all_gather(parts, sent, group=self.group)
        joined = torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])[: self.num_rows]
        sounds = torch.stack([part[longest, 0] for part in parts])
        return joined.contiguous().view(rows.dtype).reshape(self.num_rows, *rows.shape[1:]), sounds


def _require_room(counts: Sequence[int], spans: Sequence[int]) -> None:
    pairs = list(zip(counts, spans, strict=False))
    if len(counts) != len(spans) or any(not 0 <= count <= span for count, span in pairs):
        raise CaptureError(
            "the rows of a batch do not hold its tokens",
            expected=f"at least {list(counts)} rows",
            got=list(spans),
        )
