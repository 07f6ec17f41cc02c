"""handoff: what a rollout worker tells the trainer about a sample, where a framework carries the batch from one to the other.

A framework's batch has room for tokens and log-probs, and for routes at best as a dense array in which a missing row looks
like expert 0. So the rollout side leaves a note beside each sample: where its shard is (only the key travels, design decision
10), or which rows of the array in the batch are recorded; and the digest of the tokens that the rows belong to, so that a batch
that was reordered, padded or cut on the way is refused and not replayed.

A note is one line of JSON: lists of strings survive every container that frameworks put a batch in.

The other direction is a proof. A trainer whose plug-in did not load trains without replay and says nothing. So a trainer that
replays announces itself in Ray's key-value store, and the rollout side, which is configured by itself, refuses to start without
the announcement.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from r3.errors import ReplayError
from r3.routes import Mask

NOTE = "r3"  # the name under which a note travels


@dataclass(frozen=True)
class Note:
    """What the trainer has to know of one sample.

    Attributes:
        digest: `r3.sample.token_digest` of the tokens, prompt and response, as the rollout left them.
        num_tokens: T.
        recorded: Runs [start, stop) of the rows that have a record.
        shard: Path or URL of the sample's shard; "" if the routes themselves are in the batch.
        weight_versions: Lowest and highest version of the weights that sampled; (-1, -1) unknown.
    """

    digest: str
    num_tokens: int
    recorded: tuple[tuple[int, int], ...] = ()
    shard: str = ""
    weight_versions: tuple[int, int] = (-1, -1)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: Any) -> Note:
        """
        Raises:
            ReplayError: not a note.
        """
        try:
            fields = json.loads(text)
            runs = tuple((int(start), int(stop)) for start, stop in fields["recorded"])
            low, high = fields["weight_versions"]
            return cls(fields["digest"], int(fields["num_tokens"]), runs, fields["shard"], (int(low), int(high)))
        except (ValueError, TypeError, KeyError) as error:
            raise ReplayError(
                f"not a note of the rollout side ({type(error).__name__}: {error})",
                expected="the JSON of r3.handoff.Note",
                got=repr(text)[:200],
                remedy="rollout and trainer must use the same version of r3",
            ) from None

    def mask(self) -> Mask:
        """[T] bool, the rows that have a record."""
        mask = np.zeros(self.num_tokens, np.bool_)
        for start, stop in self.recorded:
            mask[start:stop] = True
        return mask


def announce_trainer(**facts: Any) -> bool:
    """Say in this Ray job's key-value store that this process replays; False where Ray does not run.

    Args:
        facts: What is known of the engine, for messages. JSON values.
    """
    store = _store()
    if store is None:
        return False
    key = f"{_prefix()}{os.getpid()}.{os.urandom(4).hex()}"
    store._internal_kv_put(key.encode(), json.dumps(facts).encode(), overwrite=True, namespace=b"r3")
    return True


def announced_trainers() -> list[dict[str, Any]] | None:
    """What the trainers of this Ray job have announced; None where Ray does not run, so that nothing can be said."""
    store = _store()
    if store is None:
        return None
    keys = store._internal_kv_list(_prefix().encode(), namespace=b"r3")
    values = (store._internal_kv_get(key, namespace=b"r3") for key in keys)
    return [json.loads(value) for value in values if value is not None]


def _store() -> Any:
    ray = sys.modules.get("ray")  # a worker that Ray started has imported it
    if ray is None or not ray.is_initialized():
        return None
    from ray.experimental import internal_kv

    return internal_kv


def _prefix() -> str:
    import ray

    return f"trainer/{ray.get_runtime_context().get_job_id()}/"
