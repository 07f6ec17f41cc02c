"""What a route pool costs: bytes, and as a share of the KV cache that it goes with.

A pool has one row for each KV slot, and a row is L * K ids of one or two bytes: a fraction of a percent to 1.4 % of the KV
cache for the models of docs/capture.md. By the shapes alone; nothing is allocated.
"""

from __future__ import annotations

from typing import NamedTuple

from r3.spec import RoutingSpec

TAG_BYTES = 8 + 2  # per slot: an int64 generation, an int16 count of layers written


class PoolMemory(NamedTuple):
    """Memory of a `RoutePool`.

    Attributes:
        bytes: Of the whole pool, row 0 and tags included.
        bytes_per_slot: Of one token: its ids and its tags.
        share: Of the KV cache of the same slots; ids and tags.
    """

    bytes: int
    bytes_per_slot: int
    share: float


def memory(spec: RoutingSpec, slots: int, kv_bytes_per_token: int) -> PoolMemory:
    """The memory of a pool of `slots` KV slots, beside a cache that takes `kv_bytes_per_token` for each."""
    per_slot = spec.bytes_per_token + TAG_BYTES
    return PoolMemory((slots + 1) * per_slot, per_slot, per_slot / kv_bytes_per_token)


def attention_kv_bytes(num_layers: int, kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
    """KV bytes per token of grouped-query attention: a key and a value for each head and layer."""
    return 2 * num_layers * kv_heads * head_dim * itemsize


def latent_kv_bytes(num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, itemsize: int = 2) -> int:
    """KV bytes per token of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent and one rotary key."""
    return num_layers * (kv_lora_rank + qk_rope_head_dim) * itemsize
