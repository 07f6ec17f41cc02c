"""rows: the recorded experts of one micro-batch on one rank, read from the shards when a router asks for them.

slime's `RoutingReplay` keeps a list of tensors per router. In place of a tensor it takes any object with
`materialize_for_routing_replay(stage)`, and calls that when the router runs; miles keeps tensors and calls `.to(device)`.
`LayerRows` is such an object for both: one layer of one micro-batch. Its ids are read together with those of the other layers
of the same model chunk, this rank's layers and tokens alone, narrow (a byte an id up to 256 experts), and are let go when
every layer has had its turn. A recompute reads them again, from the page cache. So a rank holds the rows of the micro-batches
that are in flight and no more.

Rows that stand for nothing (padding, the last token of a sequence, the tail behind the last token of the loss) get distinct
experts in turn, because this seam has no scores from which a router could choose itself. A row that a token of the loss
depends on and that has no record is refused: `r3_trainer: direct` routes such rows live.

n local rows, L layers of a chunk, K top-k, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from r3 import shard
from r3.errors import ReplayError
from r3.microbatch import to_device
from r3.rollout.slime.samples import needed_rows, spread_experts
from r3.spec import RoutingSpec


@dataclass(frozen=True)
class ShardRows:
    """A sample's shard and where its tokens stand in the concatenation of the micro-batch's samples."""

    key: str
    sample_id: str
    first: int
    num_tokens: int
    recorded: npt.NDArray[np.bool_]
    needed: npt.NDArray[np.bool_]

    @classmethod
    def open(cls, key: str, first: int) -> ShardRows:
        """Reads the head of the shard alone."""
        with shard.open_file(key) as file:
            return cls(
                key, file.metadata["sample_id"], first, file.num_tokens, file.recorded, needed_rows(file.loss_mask)
            )

    @property
    def coverage(self) -> float:
        """Recorded rows as a share of those that an engine can record: all but the last token's."""
        return float(self.recorded[:-1].mean()) if self.num_tokens > 1 else 1.0

    def require_complete(self) -> None:
        """Raise if a row on which a token of the loss depends has no record."""
        missing = np.flatnonzero(self.needed & ~self.recorded)
        if len(missing):
            raise ReplayError(
                f"{len(missing)} rows without a record would have to be replayed",
                where=f"sample {self.sample_id!r}, token {int(missing[0])}",
                expected="a record of every row before the last token of the loss",
                remedy="set r3_trainer: direct, which routes such rows live; or find out why they are missing (r3 inspect)",
            )


class ChunkRows:
    """The rows of one micro-batch for the routers of one model chunk.

    Args:
        shards: The samples of the micro-batch.
        rows: [n] int64, the row of each local position in the concatenation of the samples, -1 for none.
        layers: Global decoder-layer indices of the routers.
        spec: The routing of the model.
        absent: The id of rows that stand for nothing, None for distinct experts in turn.

    Attributes:
        served: How often each layer was asked for.
    """

    def __init__(
        self,
        shards: Sequence[ShardRows],
        rows: npt.NDArray[np.int64],
        layers: Sequence[int],
        spec: RoutingSpec,
        *,
        absent: int | None = None,
    ) -> None:
        self.shards, self.rows, self.layers, self.spec, self.absent = tuple(shards), rows, tuple(layers), spec, absent
        self.served = dict.fromkeys(self.layers, 0)
        self._ids: npt.NDArray[Any] | None = None  # [L, n, K], while some layer has still to be served
        self._waiting: set[int] = set()

    def layer(self, layer: int, device: torch.device) -> torch.Tensor:
        """[n, K] int32 on a device: the ids of one layer."""
        if self._ids is None or layer not in self._waiting:
            self._ids, self._waiting = self._read(), set(self.layers)
        ids = torch.from_numpy(self._ids[self.layers.index(layer)])
        self._waiting.discard(layer)
        self.served[layer] += 1
        if not self._waiting:
            self._ids = None
        if ids.dtype == torch.int32:
            return to_device(ids, device)
        if ids.dtype == torch.int16:  # uint16 by bits: torch has few kernels for it
            return to_device(ids, device).to(torch.int32) & 0xFFFF
        return to_device(ids, device).to(torch.int32)

    def drop(self) -> None:
        self._ids, self._waiting = None, set()

    @property
    def nbytes(self) -> int:
        """Bytes of ids that are held now."""
        return 0 if self._ids is None else self._ids.nbytes

    def _read(self) -> npt.NDArray[Any]:
        spec, where = self.spec, [self.spec.moe_layers.index(layer) for layer in self.layers]
        ids = np.empty((len(where), len(self.rows), spec.top_k), np.int32 if self.absent is not None else spec.dtype)
        held = np.zeros(len(self.rows), np.bool_)
        for each in self.shards:
            positions = np.flatnonzero((self.rows >= each.first) & (self.rows < each.first + each.num_tokens))
            tokens = self.rows[positions] - each.first
            keep = each.recorded[tokens]
            positions, tokens = positions[keep], tokens[keep]
            with shard.open_file(each.key) as file:
                if len(tokens) >= each.num_tokens - 1:  # all of them: then the checksums of the layers can be compared
                    ids[:, positions] = file.routes(where).ids[:, tokens]
                else:
                    for begin, end in _runs(tokens):
                        span = slice(int(tokens[begin]), int(tokens[end - 1]) + 1)
                        ids[:, positions[begin:end]] = file.routes(where, span).ids
            held[positions] = True
        nothing = np.flatnonzero(~held)
        for index, layer in enumerate(self.layers):
            ids[index, nothing] = spread_experts(nothing, layer, spec) if self.absent is None else self.absent
        return ids.view(np.int16) if ids.dtype == np.uint16 else ids


class LayerRows:
    """One layer's rows, as slime's and miles' replay lists take them."""

    def __init__(self, chunk: ChunkRows, layer: int, device: Any) -> None:
        self.chunk, self.layer, self.device = chunk, layer, device

    def materialize_for_routing_replay(self, stage: str) -> torch.Tensor:  # noqa: ARG002
        """[n, K] int32: what slime's `pop_forward` and `pop_backward` return to the router."""
        return self.chunk.layer(self.layer, torch.device(self.device() if callable(self.device) else self.device))

    def to(self, device: Any) -> torch.Tensor:
        """[n, K] int64: what miles' `pop_forward` and `pop_backward` return to the router."""
        return self.chunk.layer(self.layer, torch.device(device)).to(torch.int64)


def _runs(tokens: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Consecutive tokens as [begin, end) of the vector: each is one read."""
    if not len(tokens):
        return []
    cuts = np.flatnonzero(np.diff(tokens) != 1) + 1
    edges = [0, *cuts.tolist(), len(tokens)]
    return list(itertools.pairwise(edges))
