"""Watch the experts that Megatron's *dispatcher* sends each token to, behind the seam and independent of it.

That is how the diagnostic proves that what was replayed is what was recorded: nothing here looks at a router or at the
override. The routing map is read where the MoE layer hands it to its token dispatcher.

n rows of this rank's routers, K top-k, E experts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from r3.errors import ReplayError
from r3.trainers.megatron.routers import decoder_of
from r3.trainers.megatron.seam import version


@contextlib.contextmanager
def observe(chunks: nn.Module | Sequence[nn.Module]) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the ids that each MoE layer's dispatcher receives: {layer: [n, K] ascending}, overwritten by each forward.

    Args:
        chunks: This rank's model chunks, wrapped or bare.

    Raises:
        ReplayError: a dispatcher of another interface.
    """
    seen: dict[int, torch.Tensor] = {}
    undo = contextlib.ExitStack()
    with undo:
        for chunk in [chunks] if isinstance(chunks, nn.Module) else chunks:
            for layer in getattr(decoder_of(chunk)[1], "layers", None) or ():
                dispatcher = getattr(layer.mlp, "token_dispatcher", None)
                if dispatcher is not None:
                    _watch(dispatcher, layer.layer_number - 1, layer.config.moe_router_topk, seen, undo)
        yield seen


def _watch(dispatcher: Any, layer: int, top_k: int, seen: dict[int, torch.Tensor], undo: contextlib.ExitStack) -> None:
    original: Callable[..., Any] | None = getattr(dispatcher, "dispatch_preprocess", None)
    names = [] if original is None else list(inspect.signature(original).parameters)
    if original is None or "routing_map" not in names:
        raise ReplayError(
            "cannot see which experts are used: this dispatcher has another interface",
            where=f"megatron-core {version()}, {type(dispatcher).__name__}, layer {layer}",
            expected="dispatch_preprocess(hidden_states, routing_map, probs)",
            got=", ".join(names) or "no such method",
        )
    place = names.index("routing_map")

    def watched(*args: Any, **kwargs: Any) -> Any:
        routing_map: torch.Tensor = args[place] if len(args) > place else kwargs["routing_map"]
        chosen = routing_map.detach().nonzero()
        if len(chosen) != routing_map.shape[0] * top_k or bool((routing_map.sum(-1) != top_k).any()):
            raise ReplayError(
                "a token goes to another number of experts than the router's top-k",
                where=f"layer {layer}",
                expected=f"{top_k} experts for each of {routing_map.shape[0]} rows",
                got=f"{len(chosen)} in all",
                remedy="token dropping, or routes with an expert twice",
            )
        seen[layer] = chosen[:, 1].reshape(-1, top_k)
        return original(*args, **kwargs)

    dispatcher.dispatch_preprocess = watched
    undo.callback(dispatcher.__dict__.pop, "dispatch_preprocess", None)
