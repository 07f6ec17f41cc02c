"""fsdp: adapters for miles' FSDP routing replay, for every family that r3 replays.

miles has three adapters, each a copy of one router's forward with its top-k replaced. Here one does for all: the module's own
forward runs, and only the answer of its top-k over the experts is replaced (`r3.topk`). What the class is that makes
the selection was found by trying each family's block (`r3.routers.probe`); `tests/test_miles_hooks.py` finds it
again.

Contract: r3's adapters stand before miles' own three, because they are registered as soon as miles' module has been executed.
A row of -1 (padding, no record) uses the router's own choice, in the forward and in its recompute; miles gives such rows
experts 0..K-1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from r3.errors import ReplayError
from r3.families import FAMILIES
from r3.microbatch import Own
from r3.spec import RoutingSpec, family_of
from r3.topk import Selection, SelectionMode, require_one
from r3.trainers.slime.upstream import Need, find

MODULE = "miles.backends.fsdp_utils.adaptations.routing_replay"
_NEEDS = (
    Need(MODULE, "RoutingReplayAdapter", ("name", "applies_to", "module_cls_name", "install")),
    Need(MODULE, "register_routing_replay_adapter", ("adapter",)),
    Need(MODULE, "resolve_routing_replay_adapter", ("hf_config",)),
    Need("miles.utils.replay_base", "routing_replay_manager"),
    Need("miles.utils.replay_base", "Replay.record", ("self", "top_indices")),
    Need("miles.utils.replay_base", "Replay.pop_forward", ("self",)),
    Need("miles.utils.replay_base", "Replay.pop_backward", ("self",)),
)

# The class whose forward makes the selection, in transformers 5. miles finds layers by `.layers.<number>.`, so not dbrx.
SELECTING = {
    "afmoe": "AfmoeTokenChoiceRouter",
    "cohere2_moe": "Cohere2MoeTopKRouter",
    "deepseek_v2": "DeepseekV2Moe",
    "deepseek_v3": "DeepseekV3MoE",
    "deepseek_v4": "DeepseekV4TopKRouter",
    "dots1": "Dots1MoE",
    "ernie4_5_moe": "Ernie4_5_MoeTopKRouter",
    "exaone_moe": "ExaoneMoeSparseMoEBlock",
    "flex_olmo": "FlexOlmoTopKRouter",
    "gemma4_text": "Gemma4TextRouter",
    "glm4_moe": "Glm4MoeMoE",
    "glm4_moe_lite": "Glm4MoeLiteMoE",
    "glm4v_moe_text": "Glm4vMoeTextMoE",
    "glm_moe_dsa": "GlmMoeDsaMoE",
    "gpt_oss": "GptOssTopKRouter",
    "granitemoe": "GraniteMoeTopKGating",
    "granitemoehybrid": "GraniteMoeHybridTopKGating",
    "granitemoeshared": "GraniteMoeSharedTopKGating",
    "hunyuan_v1_moe": "HunYuanMoEV1Moe",
    "hy_v3": "HYV3TopKRouter",
    "jamba": "JambaSparseMoeBlock",
    "laguna": "LagunaTopKRouter",
    "lfm2_moe": "Lfm2MoeSparseMoeBlock",
    "llama4_text": "Llama4Router",
    "longcat_flash": "LongcatFlashTopkRouter",
    "mellum": "MellumTopKRouter",
    "minimax": "MiniMaxTopKRouter",
    "minimax_m2": "MiniMaxM2TopKRouter",
    "mistral4": "Mistral4MoE",
    "mixtral": "MixtralTopKRouter",
    "nemotron_h": "NemotronHMoE",
    "olmoe": "OlmoeTopKRouter",
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_5_moe_text": "Qwen3_5MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "qwen3_next": "Qwen3NextTopKRouter",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextTopKRouter",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextTopKRouter",
    "solar_open": "SolarOpenMoE",
}


def register_adapters() -> list[str]:
    """Register an adapter for every family of SELECTING; returns the families.

    Raises:
        ConfigError: miles is not as it was read.
    """
    miles = find(_NEEDS, "miles")
    for family, class_name in SELECTING.items():
        adapter = _Adapter(family, miles["routing_replay_manager"])
        miles["register_routing_replay_adapter"](
            miles["RoutingReplayAdapter"](
                name=f"r3:{family}",
                applies_to=adapter.applies_to,
                module_cls_name=class_name,
                install=adapter.install,
            )
        )
    return list(SELECTING)


class _Adapter:
    """One family's: miles asks `applies_to` of the model's config, then calls `install` for each selecting module."""

    def __init__(self, family: str, manager: Any) -> None:
        self.family, self.manager = family, manager
        self.spec: RoutingSpec | None = None

    def applies_to(self, hf_config: Any) -> bool:
        if family_of(hf_config) != self.family or self.family not in FAMILIES:
            return False
        self.spec = RoutingSpec.from_config(hf_config)
        return True

    def install(self, module: nn.Module) -> None:
        """Answer the selection in this module's forwards with what miles replays."""
        assert self.spec is not None  # miles resolves the adapter first
        selection = Selection(self.spec.num_experts, self.spec.top_k)
        active: list[SelectionMode] = []

        def enter(*_: Any) -> None:
            mode = SelectionMode(selection, self._answer)
            mode.__enter__()  # type: ignore[no-untyped-call]
            active.append(mode)

        def leave(_module: nn.Module, _arguments: Any, output: Any) -> None:
            mode = active.pop()
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if output is not None:  # None when the router itself raised: its own error is the one to show
                require_one(mode.answered, selection, f"{self.family}: {type(module).__name__}")

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def _answer(self, own: Own, shape: tuple[int, ...]) -> torch.Tensor:
        stage = self.manager.stage if self.manager.enabled else "fallthrough"
        if stage == "fallthrough":
            return own()
        replay = self.manager.get_current()
        if stage == "record":
            ids = own()
            replay.record(ids.reshape(-1, shape[-1]))
            return ids
        ids = replay.pop_forward() if stage == "replay_forward" else replay.pop_backward()
        if tuple(ids.shape) != (shape[0], shape[-1]):
            raise ReplayError(
                "the rows to replay are not those of this forward",
                where=f"{self.family}, layer {replay.stream_idx}, stage {stage}",
                expected=list(shape),
                got=list(ids.shape),
                remedy="a forward ran that miles did not fill its lists for: an activation checkpoint that is recomputed in "
                "part, or another micro-batch size",
            )
        ids = ids.to(torch.int64)
        missing = (ids < 0).any(dim=-1, keepdim=True)
        return torch.where(missing, own().reshape(ids.shape), ids).reshape(shape)
