"""A tiny GPTModel of Megatron-core in any parallel layout, always with the same weights, and samples for it.

A parameter's whole value is drawn by its *global* name (decoder layer, expert) and each rank takes its part, so losses and
gradients of any layout can be compared with those of one process.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_cases import SPEC, VOCABULARY, samples_of
from torch import nn

from r3 import RoutingSpec
from r3.trainers.megatron import layouts
from r3.trainers.megatron.attention import local_block_spec
from r3.trainers.megatron.cpu import without_gpu


def config(**changes: Any) -> TransformerConfig:
    values: dict[str, Any] = {
        "num_layers": SPEC.num_layers,
        "moe_layer_freq": [int(layer in SPEC.moe_layers) for layer in range(SPEC.num_layers)],
        "num_moe_experts": SPEC.num_experts,
        "moe_router_topk": SPEC.top_k,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 16,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_tensor_parallel_size": 1,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "bias_activation_fusion": False,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**values, **changes})


def build(settings: TransformerConfig, vp_stage: int | None = None) -> GPTModel:
    """This rank's model, or its chunk `vp_stage`."""
    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    model = GPTModel(
        settings,
        local_block_spec(settings, vp_stage),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        **stage,
    )
    with torch.no_grad():
        for name, parameter, cut in global_parameters(model):
            parameter.copy_(cut(whole_value(name, parameter, settings)))
    return model.train()


def global_parameters(model: GPTModel) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """(name in the whole model, this rank's parameter, the function that cuts its part out of the whole value)."""
    dense = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    expert = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    for local, parameter in model.named_parameters():
        parts = local.split(".")
        if parts[0] == "decoder" and parts[1] == "layers":
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            here = len(model.decoder.layers[int(local.split(".")[2])].mlp.experts.local_experts)
            parts[at] = str(ep_rank * here + int(parts[at]))
        rank, size = expert if "local_experts" in parts else dense
        dim = parameter.partition_dim if getattr(parameter, "partition_dim", -1) >= 0 else None
        gated = "linear_fc1" in parts

        def cut(
            whole: torch.Tensor, dim: int | None = dim, gated: bool = gated, rank: int = rank, size: int = size
        ) -> torch.Tensor:
            if dim is None or size == 1:
                return whole
            if gated:  # each rank holds its part of the gate, then its part of the linear half
                return torch.cat([half.chunk(size, dim)[rank] for half in whole.chunk(2, dim)], dim)
            return whole.chunk(size, dim)[rank]

        yield ".".join(parts), parameter, cut


def whole_value(name: str, part: nn.Parameter, settings: TransformerConfig) -> torch.Tensor:
    shape = list(part.shape)
    if getattr(part, "partition_dim", -1) >= 0:
        expert = "local_experts" in name
        shape[part.partition_dim] *= (
            settings.expert_tensor_parallel_size if expert else settings.tensor_model_parallel_size
        )
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator)
    return 1 + 0.1 * drawn if "norm" in name else drawn * (0.5 if "router" in name else 0.2)


def one_process() -> None:
    """Megatron's groups for this process alone, on the CPU."""
    without_gpu()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def routers_of(model: Any) -> dict[int, Any]:
    """By decoder-layer index."""
    layers = model.decoder.layers
    return {layer.layer_number - 1: layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")}


class Micro:
    """A right-padded micro-batch of random samples."""

    def __init__(self, *lengths: int, spec: RoutingSpec = SPEC, seed: int = 5, missing: float = 0.1) -> None:
        self.samples = samples_of(*lengths, seed=seed, spec=spec, missing=missing)
        self.layout = layouts.sbhd(lengths)
        tokens = np.concatenate([sample.tokens for sample in self.samples]).astype(np.int64)
        self.tokens = torch.from_numpy(self.layout.gather(tokens, fill=0)).reshape(len(lengths), -1)
        self.positions = torch.arange(self.tokens.shape[1])[None].expand_as(self.tokens)

    def forward(self, model: Any, replay: Any = None, chunk: Any = None) -> torch.Tensor:
        """Logits [b, s, vocabulary]; replayed if there is a handle."""
        if replay is None:
            return model(self.tokens, self.positions, None)
        with replay.micro_batch(model if chunk is None else chunk, self.samples, self.layout, self.tokens):
            return model(self.tokens, self.positions, None)

    def recorded(self, layer: int, spec: RoutingSpec = SPEC) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [n, K], which rows are recorded [n]) of the router's rows: the sequence first. Written out, not by a layout."""
        lines, width = self.tokens.shape
        ids = torch.zeros(width, lines, spec.top_k, dtype=torch.int64)
        known = torch.zeros(width, lines, dtype=torch.bool)
        for line, sample in enumerate(self.samples):
            routes = sample.routes.ids[spec.moe_layers.index(layer)].astype(np.int64)
            ids[: sample.num_tokens, line] = torch.from_numpy(routes)
            known[: sample.num_tokens, line] = torch.from_numpy(sample.routes.recorded)
        return ids.flatten(0, 1), known.flatten()


@contextlib.contextmanager
def watch(model: Any) -> Iterator[dict[int, list[Any]]]:
    """What each router got and gave in each forward: {layer: [(hidden [s, b, h], probs [n, E], routing map [n, E])]}."""
    seen: dict[int, list[Any]] = {}

    def note(layer: int) -> Any:
        return lambda _router, args, output: seen.setdefault(layer, []).append((args[0].detach(), *output))

    handles = [router.register_forward_hook(note(layer)) for layer, router in routers_of(model).items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
