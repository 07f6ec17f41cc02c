"""ticket: the key of a shard in the clothes of slime's routes.

slime carries `rollout_routed_experts` through a fixed list of fields: an integer tensor [rows, layers, K] of each sample, all
layers and int32, to every trainer rank (its issue 2384: the host runs out of memory). A key would do, but no field for one
survives. So the key travels *as* that tensor: one row, or as many as its bytes need.

    [rows, L, K] int32, row-major: MAGIC, number of bytes n, n bytes of UTF-8, then -1 up to the end

Contract: passes slime's own validation (three dimensions, its layers and top-k, no layer of zeros), and cannot be taken for
routes: MAGIC is no expert of any model, so slime's replay without r3 stops at its check of the row count, or at the gather.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import WireError

MAGIC = 0x52330001  # "R3", version 1


def encode(key: str, num_layers: int, top_k: int) -> npt.NDArray[np.int32]:
    """[rows, L, K] int32 that carries a key."""
    text = np.frombuffer(key.encode(), np.uint8)
    flat = np.concatenate([np.array([MAGIC, len(text)], np.int32), text.astype(np.int32)])
    rows = -(-len(flat) // (num_layers * top_k))
    out = np.full(rows * num_layers * top_k, -1, np.int32)
    out[: len(flat)] = flat
    return out.reshape(rows, num_layers, top_k)


def decode(carried: Any) -> str | None:
    """The key in an array or tensor; None if it carries routes (or nothing).

    Raises:
        WireError: a ticket that was damaged on its way.
    """
    if carried is None:
        return None
    flat = np.asarray(carried).ravel()
    if len(flat) < 2 or flat[0] != MAGIC:
        return None
    length = int(flat[1])
    if not 0 < length <= len(flat) - 2:
        raise WireError(
            "the key of a shard was cut on its way",
            where="rollout_routed_experts",
            expected=f"{length} bytes",
            got=len(flat) - 2,
            remedy="something between the rollout manager and the trainer rewrites rollout_routed_experts: use r3_routes: full",
        )
    return bytes(flat[2 : 2 + length].astype(np.uint8)).decode()
