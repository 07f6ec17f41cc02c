"""Core attention and norm in plain PyTorch, for a Megatron layer spec where Transformer Engine is not installed.

Megatron's own `DotProductAttention` refuses packed sequences and context parallelism, and its `WrappedTorchNorm` refuses sequence
parallelism: those come with Transformer Engine. `local_block_spec` is Megatron's local spec with these two modules in their
place, so that all layouts in which people train can be run on any machine. Exact and unfused: for tests, examples and the
diagnostic on a CPU, not for speed.

Causal attention by position: a query sees the keys of its own sequence up to its own place. Under context parallelism each rank
holds parts r and 2c-1-r of every sequence (Megatron's and Transformer Engine's cut); keys and values are gathered over the
context-parallel group, and their gradients are summed back.

s local positions, b batch, n heads, g query groups (key-value heads), d head size, c context-parallel size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from r3.errors import ReplayError


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage (and virtual stage), without Transformer Engine.

    Args:
        config: With `normalization="RMSNorm"`.
        vp_stage: The model chunk of an interleaved pipeline.

    Raises:
        ReplayError: a normalization that this module does not have.
    """
    if config.normalization != "RMSNorm":
        raise ReplayError("only RMSNorm is there without Transformer Engine", got=config.normalization)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = CausalAttention
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block


class RMSNorm(torch.nn.RMSNorm):
    """torch's, whose weight says that it is used on a part of the sequence: Megatron then sums its gradient over TP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Attention of each position to the positions of its sequence up to itself.

    Takes Megatron's core-attention arguments: query [s, b, n, d], key and value [s, b, g, d], `attention_mask` bool, broadcast to
    [b, 1, s, s * c] with its columns in the order of the whole sequence, True where attention is not allowed besides what is not
    causal; or, packed (`packed_seq_params`, THD), [s, n, d] and [s, g, d] with `cu_seqlens_q_padded` (or `cu_seqlens_q`) of the
    whole sequences. Returns [s, b, n * d] or [s, n * d].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,  # noqa: ARG002 - keys and values are always gathered
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if (
            attention_type != "self"
            or attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal)
            or dropout
        ):
            raise ReplayError(
                "this core attention is causal self-attention without dropout",
                where=f"decoder layer {layer_number - 1}",
                got=f"{attention_type} attention, {attn_mask_type}, dropout {dropout}",
                remedy="install Transformer Engine for others",
            )
        self.softmax_scale, self.group = softmax_scale, pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if attention_bias is not None:
            raise ReplayError("this core attention takes no bias")
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        size, rank = self.group.size(), self.group.rank()
        places = [
            _places(query.shape[0], size, r, packed_seq_params if packed else None, query.device) for r in range(size)
        ]
        if size > 1:
            key, value = _gather(key, self.group), _gather(value, self.group)
        own, everyone = places[rank], _Places(*(torch.cat(parts) for parts in zip(*places, strict=True)))
        seen = (own.sequence[:, None] == everyone.sequence) & (own.position[:, None] >= everyone.position)
        if attention_mask is not None and not packed:
            itself = own.position[:, None] == everyone.position  # a row that sees nothing has no softmax
            seen = (seen & ~attention_mask[..., everyone.position]) | itself
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=self.softmax_scale, enable_gqa=key.shape[1] != query.shape[1]
        )
        out = out.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] to [s, b, n * d]
        return out.squeeze(1) if packed else out


class _Places(NamedTuple):
    """Of each local position [s]: which sequence, and where in it."""

    sequence: torch.Tensor
    position: torch.Tensor


def _places(num_local: int, size: int, rank: int, packed: PackedSeqParams | None, device: torch.device) -> _Places:
    if packed is None:
        starts = torch.tensor([0, num_local * size], device=device)
    else:
        starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    lengths = (starts[1:] - starts[:-1]).tolist()
    sequence, position = [], []
    for number, length in enumerate(lengths):
        every = torch.arange(length, device=device)
        if size > 1:
            parts = every.reshape(2 * size, -1)
            every = torch.cat([parts[rank], parts[2 * size - 1 - rank]])
        sequence.append(torch.full_like(every, number))
        position.append(every)
    missing = num_local - sum(len(part) for part in position)
    if missing > 0:  # padding at the end that no sequence owns: a sequence of its own
        sequence.append(torch.full((missing,), -1, device=device))
        position.append(torch.arange(missing, device=device) + num_local * size * (rank + 1))
    return _Places(torch.cat(sequence), torch.cat(position))


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered: torch.Tensor = _Gather.apply(tensor, group)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Concatenation over the ranks of a group along dimension 0; the gradient of each part is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
