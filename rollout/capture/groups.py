"""Which KV-cache group of a hybrid model tells the slot of a token: full attention, or none.

Hybrid models (Mamba, linear attention, sliding windows) have several groups of layers with block tables of their own. Only in a
full-attention group does a token keep its slot for as long as its request lives; a window's slots are used again by the same
request, and a state has no slots. Routes that are keyed by the wrong group are another token's, without any error later. So
the choice is fail-closed: no group that is full attention for certain, no capture; the groups that were seen are named.

Works on vLLM's `KVCacheConfig` or its groups, on the pair that transformers' `group_layers_by_attn_type` returns, and on any
groups with a predicate of the engine's own. Of several full-attention groups the first is taken, as vLLM takes it; what
matters is that writer and reader take the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from r3.errors import CaptureError

FULL = "full_attention"  # transformers' name in `config.layer_types`


def full_attention_group(groups: Any, is_full: Callable[[Any], bool] | None = None) -> int:
    """The index of the first group whose layers are all full attention.

    Args:
        groups: An object with `kv_cache_groups`; a sequence of objects with `kv_cache_spec`; transformers' pair (layers of each
            group, type of each group); or the list of those types.
        is_full: Says whether a group is full attention; by its spec's class or its type's name if None.

    Raises:
        CaptureError: none is.
    """
    found: Sequence[Any] = getattr(groups, "kv_cache_groups", groups)
    if isinstance(found, tuple) and len(found) == 2 and all(isinstance(part, list) for part in found):
        found = found[1]
    test = _is_full if is_full is None else is_full
    for index, group in enumerate(found):
        if test(group) is True:
            return index
    raise CaptureError(
        "no KV-cache group of this model is full attention: a token has no slot that it keeps",
        expected="a group whose layers are all full attention",
        got=f"groups {[_name(group) for group in found]}",
        remedy="key routes by request and position instead of by slot, without prefix sharing; or give `is_full` if the group's "
        "slots are known to be kept",
    )


def _is_full(group: Any) -> bool:
    if isinstance(group, str):
        return group == FULL
    specs = _specs(group)
    return bool(specs) and all(_is_full_spec(spec) for spec in specs)


def _specs(group: Any) -> list[Any]:
    """The specs of a group: one, or one for each layer where the group's spec wraps them."""
    spec = getattr(group, "kv_cache_spec", None)
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        return list(inner.values())
    return [] if spec is None else [spec]


def _is_full_spec(spec: Any) -> bool:
    # By the names of vLLM's classes, so that no engine is imported. A full-attention spec can still carry a window where
    # vLLM gives a windowed layer the memory of full attention: such a layer keeps all of its slots.
    return any(kind.__name__ == "FullAttentionSpec" for kind in type(spec).__mro__) and not hasattr(spec, "rswa_window")


def _name(group: Any) -> str:
    if isinstance(group, str):
        return group
    return "/".join(sorted({type(spec).__name__ for spec in _specs(group)})) or type(group).__name__
