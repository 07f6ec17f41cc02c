"""The cases of test_megatron_schedules.py, without an import of Megatron: what is trained in which layout, on which samples."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from helpers import random_sample

from r3 import RolloutSample, Routes, RoutingSpec
from r3.testing import random_rows

VOCABULARY = 64
SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2, model_type="megatron")


def samples_of(*lengths: int, seed: int = 5, spec: RoutingSpec = SPEC, missing: float = 0.1) -> list[RolloutSample]:
    """Random tokens with random routes, of which a share is missing."""
    rng = np.random.default_rng(seed)
    out = []
    for number, length in enumerate(lengths):
        rows = Routes.from_rows(random_rows(rng, spec, length - 1), length, spec)
        routes = Routes(rows.ids, rows.recorded & (rng.random(length) >= missing))
        prompt = min(3, length - 1)
        sample = random_sample(
            rng,
            spec,
            length,
            sample_id=f"s{seed}.{number}",
            prompt_length=prompt,
            vocabulary=VOCABULARY,
            routes=routes,
        )
        out.append(sample)
    return out


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


@dataclass(frozen=True)
class Case:
    """A layout and a schedule. `recomputed`: the decoder layers whose routers run again in backward."""

    name: str
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    cp: int = 1
    cut: str = "zigzag"
    packed: bool = False
    even: bool = (
        False  # micro-batches of one size: the all-gather dispatcher wants the same number of rows on each rank
    )
    recomputed: tuple[int, ...] = ()
    whole: bool = True  # samples with all layers; else each chunk reads its own
    settings: dict[str, Any] = field(default_factory=dict)

    def dp(self, world_size: int) -> int:
        return world_size // (self.tp * self.pp * self.cp)


ALL = SPEC.moe_layers
DEALLOCATE = {"deallocate_pipeline_outputs": True}
# With two stages Megatron asks for overlap: two messages between the same two ranks in one batch would be mixed up. Outputs
# are kept, because gloo goes on reading a tensor that is sent and not waited for.
OVERLAP = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
CASES = [
    Case("one"),
    Case("one, packed", packed=True),
    Case("one, full recompute", recomputed=ALL, settings=FULL),
    Case("sequence parallel", tp=2, etp=2),
    Case(
        "sequence and expert parallel, packed, MoE recomputed",
        tp=2,
        ep=2,
        packed=True,
        recomputed=ALL,
        settings=selective("moe"),
    ),
    Case("experts, all-gather", ep=2, even=True, settings={"moe_token_dispatcher_type": "allgather"}),
    Case("experts, all-to-all", ep=2),
    Case("experts, all-to-all, full recompute", ep=2, recomputed=ALL, settings=FULL),
    Case("context parallel", cp=2),
    Case("context parallel, packed", cp=2, packed=True),
    Case("context parallel, full recompute", cp=2, recomputed=ALL, settings=FULL),
    Case("pipeline", pp=2, settings=DEALLOCATE),
    Case("pipeline, outputs kept", pp=2, whole=False),
    Case("pipeline, full recompute", pp=2, recomputed=ALL, settings={**FULL, **DEALLOCATE}),
    Case("pipeline, block recompute", pp=2, recomputed=(2,), settings={**BLOCK, **DEALLOCATE}),
    Case("pipeline, MoE recomputed", pp=2, recomputed=ALL, settings={**selective("moe"), **DEALLOCATE}),
    Case(
        "pipeline, attention and norms recomputed", pp=2, settings={**selective("core_attn", "layernorm"), **DEALLOCATE}
    ),
    Case("interleaved", pp=2, vpp=2, settings=OVERLAP),
    Case("interleaved, one size", pp=2, vpp=2, even=True, settings={**DEALLOCATE, "batch_p2p_comm": False}),
    Case("interleaved, full recompute", pp=2, vpp=2, recomputed=ALL, whole=False, settings={**FULL, **OVERLAP}),
    Case("interleaved, MoE recomputed", pp=2, vpp=2, recomputed=ALL, settings={**selective("moe"), **OVERLAP}),
]
ON_FOUR = [
    Case("pipeline x experts", pp=2, ep=2, recomputed=ALL, settings={**FULL, **DEALLOCATE}),
    Case("pipeline x sequence parallel", pp=2, tp=2, etp=2, recomputed=ALL, settings={**FULL, **DEALLOCATE}),
    Case("interleaved x experts", pp=2, vpp=2, ep=2, recomputed=ALL, settings={**selective("moe"), **OVERLAP}),
    Case("interleaved x sequence parallel", pp=2, vpp=2, tp=2, ep=2, settings=OVERLAP),
    Case("context parallel x sequence parallel", cp=2, tp=2, ep=4, packed=True, recomputed=ALL, settings=FULL),
]

# Micro-batches of different sizes: a dynamic batch. The number divides by data-parallel and pipeline sizes.
MICRO_BATCHES = [samples_of(*lengths, seed=number) for number, lengths in enumerate([(9, 12), (5,), (7, 4, 11), (16,)])]
EVEN = [samples_of(*lengths, seed=10 + i) for i, lengths in enumerate([(9, 12), (5, 16), (7, 11), (16, 4)])]
TEN = [samples_of(*lengths, seed=20 + i) for i, lengths in enumerate([(9, 12), (5,), (7, 4), (8,), (3, 6)] * 2)]
EXCEPTIONS = [
    Case("exception: pipeline, full recompute", pp=2, settings={**FULL, **DEALLOCATE}),
    Case("exception: experts on tensor parallel ranks", ep=2, tp=2, settings=selective("moe")),
]


def run(rank: int, *arguments: Any) -> None:
    """For `spawn`: the parent has no use for Megatron, whose import takes ten seconds."""
    importlib.import_module("megatron_ranks").main(rank, *arguments)
