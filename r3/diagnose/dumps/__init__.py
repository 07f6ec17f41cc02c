"""Files of log-probs that a trainer dumped, sequence by sequence, whatever wrote them. Nothing is ever unpickled.

Formats, chosen by the ending of the name:

    .jsonl        a line per sequence: `sample_id`, `rollout_logprobs` [n], `train_logprobs` [n] or an object of several by
                  name; optional `loss_mask` [n], `tokens` [n], `weight_version` (a number or [n])
    .npz          the sequences end to end: `lengths` [S], `rollout_logprobs` [N], `train_logprobs` [N] (of several forwards
                  `train_logprobs.<name>`); optional `loss_mask`, `tokens`, `weight_version` [N], `sample_ids` [S]
    .parquet      what `r3 export` writes, a row per token, with a column `train_logprob` (or `train_logprob.<name>`) added:
                  `sample_id`, `position`, `logprob`; optional `loss_mask`, `token`, `weight_version`
    .pt           slime's --save-debug-train-data; a dict of veRL's padded tensors (`r3.diagnose.dumps.frameworks`)
    .safetensors  veRL's tensors

All vectors are of the response: natural logs, log p(token t | tokens before t), float32 or wider.

n tokens of a response, S sequences, N tokens in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import ConfigError, MetricError
from r3.metrics import Float
from r3.sample import UNKNOWN_VERSION

DEFAULT_NAME = "train"


@dataclass(frozen=True, eq=False)
class DumpedSequence:
    """The response of one sequence, n tokens.

    Attributes:
        sample_id: As the dump names it.
        rollout: [n] the engine's log-probs.
        train: The trainer's, by name [n].
        mask: [n] bool, the tokens that the loss uses.
        versions: [n] int32.
        tokens: [n] ids, or None.
    """

    sample_id: str
    rollout: Float
    train: dict[str, Float]
    mask: npt.NDArray[np.bool_]
    versions: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int64] | None = None

    @classmethod
    def make(
        cls,
        where: str,
        sample_id: str,
        rollout: npt.ArrayLike,
        train: Mapping[str, npt.ArrayLike],
        *,
        mask: npt.ArrayLike | None = None,
        versions: npt.ArrayLike | None = None,
        tokens: npt.ArrayLike | None = None,
    ) -> DumpedSequence:
        """With every length checked.

        Raises:
            MetricError: vectors of unequal length, or none of the trainer's.
        """
        rollout = np.asarray(rollout, np.float64).ravel()
        if not train:
            raise MetricError(
                "no log-probs of the trainer",
                where=f"{where}: sample {sample_id!r}",
                expected="train_logprobs (slime: log_probs, veRL: old_log_probs)",
            )
        count = len(rollout)
        versions = UNKNOWN_VERSION if versions is None else versions
        vectors: dict[str, npt.NDArray[Any]] = {
            **{f"train_logprobs {name}": np.asarray(values, np.float64).ravel() for name, values in train.items()},
            "loss_mask": np.ones(count, np.bool_) if mask is None else np.asarray(mask).ravel() != 0,
            "weight_version": np.broadcast_to(np.asarray(versions, np.int32), (count,))
            if np.ndim(versions) == 0
            else np.asarray(versions, np.int32).ravel(),
        }
        if tokens is not None:
            vectors["tokens"] = np.asarray(tokens, np.int64).ravel()
        for name, values in vectors.items():
            if len(values) != count:
                raise MetricError(
                    f"{name} and rollout_logprobs are of unequal length",
                    where=f"{where}: sample {sample_id!r}",
                    expected=count,
                    got=len(values),
                    remedy="all vectors are of the response; a slice of a context parallel rank must be gathered first",
                )
        return cls(
            sample_id,
            rollout,
            {name: vectors[f"train_logprobs {name}"] for name in train},
            vectors["loss_mask"],
            vectors["weight_version"],
            vectors.get("tokens"),
        )


def read_dump(path: Path) -> Iterator[DumpedSequence]:
    """Every sequence of one file. Its format is chosen by its ending.

    Raises:
        ConfigError: no such file, another ending, or a package that reads it is not installed.
        MetricError: not such a file, or parts of it do not fit each other.
    """
    from r3.diagnose.dumps.frameworks import read_pt, read_safetensors
    from r3.diagnose.dumps.plain import read_jsonl, read_npz, read_parquet

    readers: dict[str, Callable[[Path], Iterator[DumpedSequence]]] = {
        ".jsonl": read_jsonl,
        ".npz": read_npz,
        ".parquet": read_parquet,
        ".pt": read_pt,
        ".safetensors": read_safetensors,
    }
    if path.suffix not in readers:
        raise ConfigError("not a dump of log-probs", where=str(path), expected=f"a name ending in {', '.join(readers)}")
    if not path.is_file():
        raise ConfigError("no such file", where=str(path))
    return readers[path.suffix](path)
