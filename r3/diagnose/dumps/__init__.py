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
        sample_id: As the dump names it; its number in the file where the dump names none, and `named` is False.
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
    named: bool = True

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
        named: bool = True,
    ) -> DumpedSequence:
        """With every length checked.

        Raises:
            MetricError: vectors of unequal length or of something else than numbers, or none of the trainer's.
        """
        at = f"{where}: sample {sample_id!r}"
        rollout = _numbers("rollout_logprobs", rollout, at)
        if not train:
            raise MetricError(
                "no log-probs of the trainer",
                where=at,
                expected="train_logprobs (slime: log_probs, veRL: old_log_probs)",
            )
        count = len(rollout)
        of = _versions(UNKNOWN_VERSION if versions is None else versions, at)
        vectors: dict[str, npt.NDArray[Any]] = {
            **{f"train_logprobs {name}": _numbers(f"train_logprobs {name}", each, at) for name, each in train.items()},
            "loss_mask": np.ones(count, np.bool_) if mask is None else _mask(mask, at),
            "weight_version": np.broadcast_to(of, (count,)) if versions is None or np.ndim(versions) == 0 else of,
        }
        if tokens is not None:
            vectors["tokens"] = _numbers("tokens", tokens, at).astype(np.int64)
        for name, values in vectors.items():
            if len(values) != count:
                raise MetricError(
                    f"{name} and rollout_logprobs are of unequal length",
                    where=at,
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
            named,
        )


def _numbers(name: str, values: npt.ArrayLike, where: str) -> Float:
    """[n] float64; null is NaN."""
    try:
        return np.asarray(values, np.float64).ravel()
    except (ValueError, TypeError, OverflowError) as error:
        raise MetricError(f"{name} are not all numbers ({error})", where=where, expected="a flat list") from None


def _mask(values: npt.ArrayLike, where: str) -> npt.NDArray[np.bool_]:
    numbers = _numbers("loss_mask", values, where)
    if np.isnan(numbers).any():
        raise MetricError(
            "loss_mask is not known for every token",
            where=f"{where}: token {int(np.isnan(numbers).argmax())}",
            expected="0 or 1",
            remedy="write 0 for tokens that the loss does not use",
        )
    return numbers.astype(np.bool_)


def _versions(values: npt.ArrayLike, where: str) -> npt.NDArray[np.int32]:
    """int32; null is UNKNOWN_VERSION."""
    numbers = _numbers("weight_version", values, where)
    numbers = np.where(np.isnan(numbers), UNKNOWN_VERSION, numbers)
    limits = np.iinfo(np.int32)
    if (wrong := (numbers < limits.min) | (numbers > limits.max)).any():
        raise MetricError(
            "weight_version is out of range",
            where=where,
            expected="a number of 32 bits, as of a training step",
            got=float(numbers[wrong][0]),
        )
    return numbers.astype(np.int32)


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
