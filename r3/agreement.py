"""Agreement: do the recorded experts look like this router's own choice? It catches what tokens cannot show.

Tokens prove that a sample stands where the layout says. They say nothing of the rows inside a shard: rows shifted by one, two
layers swapped, another sample's routes. Such routes replay without an error and train a policy that nobody sampled. But
the trainer's router chooses nearly the same experts for its row as the rollout's did, and quite others for any other row. So on
some rows of each sample the router's own top-k is computed as well, and compared.

Measured on a trained model (8 layers, top-2 of 48, bfloat16, 80 samples of 160 tokens from vLLM; share of the recorded
ids that the trainer's router chose itself, on 32 rows of a sample):

    routes                       one layer of a sample    all layers of a sample
    as recorded                  0.95 to 1                0.98 to 1
    rows shifted by one          0.11 to 0.64             0.20 to 0.56
    layers swapped               0 to 0.13                -
    of another prompt            0.05 to 0.41             0.10 to 0.34

The least share allowed by default, 0.65, lies between. Rollouts that are many updates old agree less: lower it for them.

R sampled rows, L bound layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from r3.errors import ReplayError
from r3.layout import Layout
from r3.partial import Replayable

MIN_AGREEMENT = 0.65
ROWS_PER_SAMPLE = 32
WINDOWS = 4  # parts of a sample that are judged by themselves: a row that is lost in the middle shifts only the rest
_LEAST_IDS = 64  # a share of fewer ids says little


@dataclass
class Agreement:
    """Recorded ids that the trainer's router would have chosen itself, on the sampled rows of all micro-batches so far.

    Attributes:
        agreed, compared: Counts of ids by decoder layer.
    """

    agreed: dict[int, int] = field(default_factory=dict)
    compared: dict[int, int] = field(default_factory=dict)

    def add(self, layers: Sequence[int], agreed: npt.NDArray[np.int64], compared: int) -> None:
        """agreed [L]; `compared` ids of each layer."""
        for layer, count in zip(layers, agreed, strict=True):
            self.agreed[layer] = self.agreed.get(layer, 0) + int(count)
            self.compared[layer] = self.compared.get(layer, 0) + compared

    @property
    def share(self) -> float:
        """Over all layers; NaN if nothing was compared."""
        return sum(self.agreed.values()) / total if (total := sum(self.compared.values())) else float("nan")

    def by_layer(self) -> dict[int, float]:
        return {layer: self.agreed[layer] / count for layer, count in self.compared.items() if count}


class AgreementCheck:
    """The comparison of one micro-batch. On a GPU it is queued, and nothing waits before `finish`.

    Args:
        samples, layout: Of the micro-batch.
        recorded: [n] bool, local rows with a record.
        layers: Global indices of the bound layers.
        minimum: The least share of a sample, of a quarter of it, and of one of its layers.

    Attributes:
        rows: [R] int64, the local rows that are compared.
    """

    def __init__(
        self,
        samples: Sequence[Replayable],
        layout: Layout,
        recorded: npt.NDArray[np.bool_],
        layers: Sequence[int],
        minimum: float,
    ) -> None:
        self.samples, self.layout, self.layers, self.minimum = samples, layout, tuple(layers), minimum
        ends = np.cumsum(layout.lengths)
        candidates = np.flatnonzero(recorded)
        owners = np.searchsorted(ends, layout.rows[candidates], side="right")
        chosen = [_evenly(candidates[owners == sample]) for sample in range(len(samples))]
        self.rows = np.concatenate([*chosen, np.zeros(0, np.int64)]).astype(np.int64)
        self.owners = np.repeat(np.arange(len(samples)), [len(rows) for rows in chosen])
        self._open = True
        self._seen: dict[int, torch.Tensor] = {}
        self._top_k = 0
        self._counts: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def see(self, layer: int, recorded: torch.Tensor, own: torch.Tensor) -> None:
        """Both [R, K], of the rows of `rows`. A recompute has nothing new to say, but must run the same operations."""
        agreed = (recorded[:, :, None] == own[:, None, :]).any(-1).sum(-1)
        if self._open:
            self._top_k = own.shape[-1]
            self._seen[layer] = agreed

    def start(self) -> None:
        """Bring the counts to the host, without waiting for a GPU."""
        self._open = False
        if len(self._seen) != len(self.layers):
            return  # nothing to compare on this rank
        counts = torch.stack([self._seen[layer] for layer in self.layers])
        if counts.device.type == "cuda":
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(
                counts, non_blocking=True
            )
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(counts.device))
        else:
            self._counts = counts.cpu()
        self._seen.clear()

    @property
    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def finish(self, total: Agreement) -> None:
        """Add to `total`, and raise if a sample's routes do not look like the model's.

        Raises:
            ReplayError: naming the sample, and the layers or tokens in which it disagrees.
        """
        if self._event is not None:
            self._event.synchronize()
        if self._counts is None:
            return
        counts = self._counts.numpy().astype(np.int64)  # [L, R]
        total.add(self.layers, counts.sum(axis=1), counts.shape[1] * self._top_k)
        for number, sample in enumerate(self.samples):
            mine = np.flatnonzero(self.owners == number)
            if len(mine):
                self._judge(sample, counts[:, mine], self.rows[mine])

    def _judge(self, sample: Replayable, counts: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        """counts [L, R'] and `rows` [R'], of one sample: each layer by itself, and each quarter of the rows."""
        layers = [layer for layer, count in zip(self.layers, counts, strict=True) if self._low(count)]
        windows = [w for w in np.array_split(np.arange(len(rows)), WINDOWS) if self._low(counts[:, w])]
        if layers and len(layers) < len(self.layers):
            wrong = counts[[layer in layers for layer in self.layers]]
            self._refuse(sample, f"decoder layers {layers}", wrong)
        elif layers or windows:
            spoilt = np.concatenate(windows) if windows else np.arange(len(rows))
            first, last = (self.layout.locate_row(int(self.layout.rows[rows[i]]))[1] for i in spoilt[[0, -1]])
            self._refuse(sample, f"tokens {first} to {last}", counts[:, spoilt])

    def _low(self, counts: npt.NDArray[np.int64]) -> bool:
        enough = counts.size * self._top_k >= _LEAST_IDS
        return enough and float(counts.mean()) / self._top_k < self.minimum

    def _refuse(self, sample: Replayable, part: str, counts: npt.NDArray[np.int64]) -> None:
        raise ReplayError(
            "the recorded experts are not those of this model's routers on these tokens",
            where=f"sample {sample.sample_id!r}, {part}",
            expected=f"at least {self.minimum:.0%} of the ids among the router's own choice (usually above 95 %)",
            got=f"{float(counts.mean()) / self._top_k:.0%}",
            remedy="rows shifted against the tokens, layers in another order, another sample's routes, or other weights than "
            "those that sampled. If the weights have moved on that far, attach with a lower min_agreement (0: no check)",
        )


def _evenly(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """At most ROWS_PER_SAMPLE of these, the first and the last among them."""
    if len(rows) <= ROWS_PER_SAMPLE:
        return rows
    return rows[np.linspace(0, len(rows) - 1, ROWS_PER_SAMPLE).round().astype(np.int64)]
