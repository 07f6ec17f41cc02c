"""The override in a Megatron-core router: what it asks for its top-k, and how that is proved when it is attached.

megatron-core 0.16 and later give their router a seam: if `router.router_replay` is set, the choice of experts is asked from
`router.router_replay.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)` and the rest of the router's
code runs as it is. `Seam` is our object there. It needs neither `moe_enable_routing_replay` nor Megatron's global list of
`RouterReplay` objects. What stood there before (Megatron's own object, veRL's) is kept: it answers when nothing is replayed,
other attributes are looked up in it, and it comes back when r3 is detached.

Older routers have no seam but end in the same `torch.topk(scores, k, dim=1)`: there that call is answered
(`r3.topk`), the first one of a router's forward, because the auxiliary loss makes a second one that stays live.

Contract: gate weights are gathered from `scores` as the router hands them over: dense, before group-limited routing masks
any, so the router keeps its gradient and its formula. `prove` runs the router's own routing code once on dummy logits, without
its weights and without side effects, and refuses by version what does not use the answer.

n rows, E experts, K top-k.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from r3.errors import ReplayError, first_line
from r3.replay import Replay
from r3.spec import RoutingSpec
from r3.topk import Selection, SelectionMode, require_one

DefaultTopk = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Seam:
    """Stands on `router.router_replay` while r3 is attached.

    Args:
        replay: Of the router's model chunk.
        layer: Global decoder-layer index.
        previous: What stood there before; None as a rule.
    """

    def __init__(self, replay: Replay, layer: int, previous: Any = None) -> None:
        self.replay, self.layer, self.previous = replay, layer, previous
        self.position = replay.position_of(layer)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: DefaultTopk | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the router: (values, ids), both [n, K], of scores [n, E]."""
        assert default_compute_topk is not None
        batch = self.replay.rows_for(self.layer, scores.shape[0])
        if batch is None:
            ask = default_compute_topk if self.previous is None else self.previous.get_replay_topk
            more = () if self.previous is None else (default_compute_topk,)
            return ask(scores, topk, num_groups, group_topk, *more)
        own = functools.partial(own_choice, scores.detach(), topk, num_groups, group_topk, default_compute_topk)
        ids = batch.choose(self.position, own, (scores.shape[0], topk))
        return scores.gather(1, ids), ids

    def __getattr__(self, name: str) -> Any:
        # Only for what this class does not have: veRL and others drive their own object by `router.router_replay`.
        previous = self.__dict__.get("previous")
        if previous is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(previous, name)


def own_choice(
    scores: torch.Tensor,
    topk: int,
    num_groups: int | None,
    group_topk: int | None,
    default_compute_topk: DefaultTopk,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The router's own ids, of all rows or of some ([r, K]).

    Megatron's group-limited top-k is closed over the number of all rows, so for some rows its function is called with
    theirs; `prove` compares the two.
    """
    if rows is None:
        return default_compute_topk(scores, topk, num_groups, group_topk)[1]
    some = scores.index_select(0, rows)
    if not group_topk:
        return default_compute_topk(some, topk, num_groups, group_topk)[1]
    from megatron.core.transformer.moe.moe_utils import group_limited_topk

    sizes = {"num_tokens": some.shape[0], "num_experts": some.shape[1]}
    chosen = group_limited_topk(scores=some, topk=topk, num_groups=num_groups, group_topk=group_topk, **sizes)
    ids: torch.Tensor = chosen[1]
    return ids


def install(router: Any, replay: Replay, layer: int) -> Callable[[], None]:
    """Override a router that `prove` has passed; returns what undoes it."""
    if not has_seam(router):
        return _install_topk(router, replay, layer)
    seam = Seam(replay, layer, router.router_replay)
    router.router_replay = seam

    def undo() -> None:
        if router.router_replay is seam:  # else somebody put an object of theirs over it, and it stays
            router.router_replay = seam.previous

    return undo


def has_seam(router: Any) -> bool:
    """megatron-core 0.16 and later, and older ones under veRL's patch."""
    return hasattr(router, "router_replay")


class FirstSelection(SelectionMode):
    """Answers the first selection of a forward; the second is the auxiliary loss's own, and stays live."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.answered:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _install_topk(router: nn.Module, replay: Replay, layer: int) -> Callable[[], None]:
    position, selection = replay.position_of(layer), Selection(replay.spec.num_experts, replay.spec.top_k)
    active: list[FirstSelection] = []

    def enter(_router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
        batch = replay.rows_for(layer, hidden.numel() // hidden.shape[-1])
        if batch is not None:
            mode = FirstSelection(selection, functools.partial(batch.choose, position))
            mode.__enter__()  # type: ignore[no-untyped-call]
            active.append(mode)

    def leave(_router: nn.Module, _args: Any, output: Any) -> None:
        if active:
            mode = active.pop()
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if output is not None:  # None when the router itself raised: its own error is the one to show
                require_one(mode.answered, selection, f"layer {layer}")

    handles = [
        router.register_forward_pre_hook(enter, with_kwargs=True),
        router.register_forward_hook(leave, always_call=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


# The proof ------------------------------------------------------------------------------------------------------------


_ARGUMENTS = [*inspect.signature(Seam.get_replay_topk).parameters][1:]


class _Probe:
    """Takes the seam's place once, notes how it was called, and answers with ids of its own."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.subset_agrees = True

    def get_replay_topk(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((args, kwargs))
        call = inspect.signature(Seam.get_replay_topk).bind(None, *args, **kwargs).arguments
        scores, topk = call["scores"], call["topk"]
        more = (call.get("num_groups"), call.get("group_topk"), call["default_compute_topk"])
        rows = torch.arange(1, scores.shape[0], 2, device=scores.device)
        every, some = own_choice(scores, topk, *more), own_choice(scores, topk, *more, rows)
        self.subset_agrees = bool(torch.equal(every.index_select(0, rows).sort(1).values, some.sort(1).values))
        return scores.gather(1, self.ids), self.ids


def prove(router: Any, spec: RoutingSpec, layer: int) -> None:
    """Run a router's routing code on dummy logits and see that it uses the ids that it is answered with.

    Raises:
        ReplayError: it does not, or asks for them in a way that is not known.
    """
    where = f"decoder layer {layer}, {type(router).__name__} of megatron-core {version()}"
    expert_bias = getattr(router, "expert_bias", None)
    device = router.weight.device if expert_bias is None else expert_bias.device
    num_rows = max(4, -(-spec.num_experts // spec.top_k))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, 1, spec.num_experts, generator=generator, device="cpu").to(device)
    ids = (torch.arange(num_rows * spec.top_k) % spec.num_experts).reshape(num_rows, spec.top_k).to(device)
    clone = _without_side_effects(router)
    probe = _Probe(ids)
    mode = FirstSelection(Selection(spec.num_experts, spec.top_k), lambda _own, _shape: ids)
    try:
        with torch.no_grad():
            if has_seam(router):
                clone.router_replay = probe
                answer = clone.routing(logits)
            else:
                with mode:
                    answer = clone.routing(logits)
    except Exception as error:  # foreign code fails in its own ways; each is a refusal, with its words
        raise ReplayError(
            f"this router fails on dummy logits, or asks for its experts in a way that r3 does not know "
            f"({type(error).__name__}: {first_line(error)})",
            where=where,
            expected=f"router_replay.get_replay_topk({', '.join(_ARGUMENTS)})" if has_seam(router) else "torch.topk",
            got=_called(probe) if has_seam(router) else "no seam",
            remedy="use a megatron-core of docs/megatron.md, or report this version",
        ) from error
    asked = len(probe.calls) if has_seam(router) else mode.answered
    if asked != 1:
        raise ReplayError(
            "this router does not ask for its experts once",
            where=where,
            expected="1 call of router_replay.get_replay_topk"
            if has_seam(router)
            else f"1 call of topk over [n, {spec.num_experts}] with k={spec.top_k}",
            got=f"{asked} calls",
            remedy="a patch stands between the router and its top-k (a fused kernel, another replay that is active), or this "
            "version routes in another way: see docs/megatron.md",
        )
    if not probe.subset_agrees:
        raise ReplayError(
            "this router's top-k over some rows is not its top-k over all rows",
            where=where,
            remedy="use a megatron-core of docs/megatron.md, or report this version",
        )
    _require_used(router, answer, ids, where)


def _without_side_effects(router: Any) -> Any:
    """A copy that shares the weights and counts nothing: no hooks, no losses, no expert bias."""
    clone = object.__new__(type(router))
    clone.__dict__.update(router.__dict__)
    clone.__dict__["training"] = False
    clone.__dict__["enable_expert_bias"] = False
    clone.__dict__["_apply_expert_bias"] = lambda *_, **__: None
    return clone


def _require_used(router: Any, answer: Any, ids: torch.Tensor, where: str) -> None:
    probs, routing_map = answer
    expected = torch.zeros_like(routing_map, dtype=torch.bool).scatter(1, ids, True)
    drops = getattr(router.config, "moe_expert_capacity_factor", None) is not None
    weights = probs.gather(1, ids)
    used = torch.equal(routing_map.bool(), expected) and bool((weights.isfinite() & (weights != 0)).all())
    if not (used or drops):
        raise ReplayError(
            "this router does not send tokens to the experts that its top-k was answered with",
            where=where,
            expected="a routing map of these ids, and gate weights from the scores of all experts",
            remedy="this router changes its choice after the top-k, or masks scores before it: replay is not possible in it",
        )


def _called(probe: _Probe) -> str:
    if not probe.calls:
        return "no call of it"
    args, kwargs = probe.calls[-1]
    return f"a call with {len(args)} arguments and {', '.join(kwargs) or 'no keywords'}"


def version() -> str:
    import megatron.core

    return str(getattr(megatron.core, "__version__", "of unknown version"))
