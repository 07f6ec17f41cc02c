"""A Megatron-core `GPTModel` with the weights of a Hugging Face Qwen3-MoE directory, in the parallelism of this process.

    initialize(tensor=2, pipeline=2, expert=2)          # process group, Megatron's groups, seeds
    chunks = load_model("checkpoints/step-0012")        # this rank's model chunks: one, or one per virtual stage

For the example, the diagnostic and the tests; whoever trains with Megatron has a model already and gives it to `attach`. The
family is Qwen3-MoE alone: another one is refused by name. Where Transformer Engine is installed its layer spec is used (not run
here: it needs a GPU), else Megatron's local one with the modules of `r3.trainers.megatron.attention`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from r3.errors import ConfigError
from r3.spec import RoutingSpec
from r3.trainers.megatron import convert
from r3.trainers.megatron.attention import local_block_spec
from r3.trainers.megatron.cpu import without_gpu

FAMILY = "qwen3_moe"


def initialize(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int | None = None,
    expert: int = 1,
    expert_tensor: int | None = None,
    context: int = 1,
    seed: int = 0,
) -> None:
    """Join the process group that torchrun announces (or be one process alone), and set up Megatron's groups and seeds.

    NCCL and this rank's GPU where there is one; gloo and the stand-ins of `without_gpu` elsewhere. What is there already stays.

    Args:
        tensor, pipeline, virtual_pipeline, expert, expert_tensor, context: Sizes, in Megatron's meaning of each; experts are cut
            as the rest (`tensor`) if `expert_tensor` is None.
        seed: Of the weights and of dropout.

    Raises:
        ConfigError: the number of processes does not fit these sizes, or experts would be trained wrong.
    """
    without_gpu()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "nccl" if gpu else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    size, cut = dist.get_world_size(), tensor if expert_tensor is None else expert_tensor
    if expert == 1 and cut != tensor:
        raise ConfigError(
            "whole experts on tensor-parallel ranks that see different tokens: Megatron-core sums their gradients only if there "
            "is expert parallelism",
            expected=f"expert_tensor={tensor}, or expert above 1",
            got=f"tensor={tensor}, expert_tensor={cut}, expert=1",
        )
    if size % (tensor * pipeline * context) or size % (cut * pipeline * expert):
        raise ConfigError(
            "these parallel sizes do not fit the number of processes",
            expected="processes divisible by tensor x pipeline x context, and by expert tensor x pipeline x expert",
            got=f"{size} processes, {tensor} x {pipeline} x {context} and {cut} x {pipeline} x {expert}",
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor,
            pipeline,
            virtual_pipeline_model_parallel_size=virtual_pipeline,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
        )
    model_parallel_cuda_manual_seed(seed)


def transformer_config(
    path: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> TransformerConfig:
    """Megatron's configuration of a Hugging Face Qwen3-MoE directory, in the parallelism that is initialized.

    Args:
        dtype: Of parameters and activations.
        changes: Other fields, or other values, of `TransformerConfig`.

    Raises:
        ConfigError: another family, or a feature of it that is not converted.
    """
    hf = _hf_config(path)
    spec = RoutingSpec.from_config(hf)
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    if hf.num_key_value_heads % tensor or hf.vocab_size % tensor:
        raise ConfigError(
            "the tensor-parallel size does not divide this model",
            expected=f"a divisor of {hf.num_key_value_heads} key-value heads and of {hf.vocab_size} tokens",
            got=tensor,
        )
    interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    fields: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": hf.head_dim,
        "qk_layernorm": True,
        "ffn_hidden_size": hf.intermediate_size,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": [int(layer in spec.moe_layers) for layer in range(spec.num_layers)],
        "moe_router_topk": spec.top_k,
        # Weights of the chosen experts that add up to 1 are a softmax over their logits.
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": _use_transformer_engine(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        # Of a pipeline of 2, both neighbours are one rank: interleaved and batched, activations and gradients would be
        # mixed up (Megatron-LM's arguments refuse that; its core does not).
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }
    return TransformerConfig(**{**fields, **changes})


def load_model(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> list[GPTModel]:
    """This rank's model chunks, with their weights; on the GPU if there is one. `initialize` first.

    Args:
        path: A Hugging Face Qwen3-MoE directory.
        dtype, changes: As in `transformer_config`.

    Raises:
        ConfigError: another family, a feature that is not converted, or weights that do not fit.
    """
    config = transformer_config(path, dtype=dtype, **changes)
    hf = _hf_config(path)
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks = []
    for stage in [None] if stages is None else range(stages):
        if _use_transformer_engine():
            block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
        else:
            block = local_block_spec(config, vp_stage=stage)
        chunk = GPTModel(
            config,
            block,
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=_rope_theta(hf),
            vp_stage=stage,
        )
        chunks.append(chunk)
    convert.load(chunks, convert.Checkpoint(Path(path)))
    return chunks


def _use_transformer_engine() -> bool:
    return bool(HAVE_TE) and torch.cuda.is_available()


def _hf_config(path: str | os.PathLike[str]) -> Any:
    from transformers import AutoConfig

    if not (Path(path) / "config.json").is_file():
        raise ConfigError("no config.json of a model here", where=str(path), remedy="give a model directory")
    config = AutoConfig.from_pretrained(path)
    family = config.model_type
    if family != FAMILY:
        raise ConfigError(
            f"model family {family!r} is not converted to Megatron here",
            where=str(path),
            expected=FAMILY,
            remedy="build the model with your own Megatron code (Megatron-Bridge, mbridge) and give it to "
            "r3.trainers.megatron.attach",
        )
    other = {
        "attention_bias": config.attention_bias,
        "use_sliding_window": config.use_sliding_window,
        "hidden_act": config.hidden_act != "silu",
    }
    if wrong := [name for name, differs in other.items() if differs]:
        raise ConfigError("this Qwen3-MoE has features that are not converted", where=str(path), got=", ".join(wrong))
    return config


def _rope_theta(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(
            "a scaled rotary embedding is not converted", expected="rope_type default", got=rope["rope_type"]
        )
    return float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)))
