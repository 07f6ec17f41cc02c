"""Weights of a Hugging Face Qwen3-MoE checkpoint in Megatron-core's `GPTModel`, and back.

Each rank reads the slices that it holds and nothing else: its pipeline stage's layers, its tensor-parallel rows or columns, its
experts. `load` fills every parameter of a chunk or raises; `save` writes a directory that transformers and vLLM load, one file a
rank that holds something of its own, so that no rank ever has more than its own part and its TP group's.

Where Megatron's tensors differ from Hugging Face's (h hidden, n heads, g query groups, d head size, f expert width):

    linear_qkv.weight  [(n + 2 g) d, h]   per query group: the queries of its n/g heads, its key, its value; TP cuts whole groups
    linear_fc1.weight  [2 f, h]           gate_proj rows, then up_proj rows; (expert) TP cuts each of the two
    linear_proj, linear_fc2 .weight       as o_proj and down_proj; TP cuts columns
    word_embeddings, output_layer         TP cuts the vocabulary
    router.weight                         as mlp.gate.weight, whole on every rank

The names of Megatron's local modules and of its Transformer Engine modules are both known; the latter were not run here (they
need a GPU).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open
from safetensors.torch import save_file

from r3.errors import ConfigError


class Source(NamedTuple):
    """Where a Megatron parameter comes from: these Hugging Face tensors, each cut into equal parts along `dim`.

    Attributes:
        names: One tensor, or three (`qkv`), or two (`gated`).
        dim: The dimension that is cut; None for a tensor that is whole on every rank.
        expert: Whether the expert tensor-parallel group cuts it, and expert parallelism places it.
        fuse: "", "qkv" or "gated": how several tensors become one.
    """

    names: tuple[str, ...]
    dim: int | None
    expert: bool = False
    fuse: str = ""


_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."
# Megatron parameter, without the model's or the layer's prefix: source. Transformer Engine's names stand beside the local ones.
_MODEL = {
    "embedding.word_embeddings.weight": Source(("model.embed_tokens.weight",), 0),
    "decoder.final_layernorm.weight": Source(("model.norm.weight",), None),
    "output_layer.weight": Source(("lm_head.weight",), 0),
}
_LAYER = {
    r"input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight": Source(
        ("model.layers.{layer}.input_layernorm.weight",), None
    ),
    r"pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight": Source(
        ("model.layers.{layer}.post_attention_layernorm.weight",), None
    ),
    r"self_attention\.linear_qkv\.weight": Source(
        tuple(_ATTENTION + name for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight")), 0, fuse="qkv"
    ),
    r"self_attention\.linear_proj\.weight": Source((_ATTENTION + "o_proj.weight",), 1),
    r"self_attention\.q_layernorm\.weight": Source((_ATTENTION + "q_norm.weight",), None),
    r"self_attention\.k_layernorm\.weight": Source((_ATTENTION + "k_norm.weight",), None),
    r"mlp\.router\.weight": Source((_MLP + "gate.weight",), None),
    r"mlp\.linear_fc1\.weight": Source((_MLP + "gate_proj.weight", _MLP + "up_proj.weight"), 0, fuse="gated"),
    r"mlp\.linear_fc2\.weight": Source((_MLP + "down_proj.weight",), 1),
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc1\.weight|linear_fc1\.weight(\d+))": Source(
        (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"), 0, expert=True, fuse="gated"
    ),
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc2\.weight|linear_fc2\.weight(\d+))": Source(
        (_EXPERT + "down_proj.weight",), 1, expert=True
    ),
}


class Checkpoint:
    """The tensors of a Hugging Face model directory, read by slices.

    Attributes:
        bytes_read: Of tensor data, so far.

    Raises:
        ConfigError: no safetensors there.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        index = path / "model.safetensors.index.json"
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            files = {}
            for file in sorted(path.glob("*.safetensors")):
                with safe_open(file, "pt") as opened:
                    files |= dict.fromkeys(opened.keys(), file.name)
        if not files:
            raise ConfigError("no weights of a Hugging Face model here", where=str(path), expected="model.safetensors")
        self._files = files
        self._open: dict[str, Any] = {}

    def read(self, name: str, dim: int | None, index: int, count: int) -> torch.Tensor:
        """Part `index` of `count` equal ones of a tensor along `dim`; the whole tensor where `dim` is None.

        Raises:
            ConfigError: no such tensor, or it cannot be cut so.
        """
        if name not in self._files:
            raise ConfigError("this checkpoint lacks a tensor that the model needs", where=f"{self.path}: {name}")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.path / file, "pt")
        tensor = self._open[file].get_slice(name)
        shape = tensor.get_shape()
        if dim is None:
            part: torch.Tensor = tensor[:]
        else:
            if shape[dim] % count:
                raise ConfigError(
                    "a tensor cannot be cut over the tensor-parallel ranks",
                    where=f"{self.path}: {name}",
                    expected=f"dimension {dim} divisible by {count}",
                    got=shape,
                    remedy="choose a tensor-parallel size that divides it",
                )
            width = shape[dim] // count
            cut = slice(index * width, (index + 1) * width)
            part = tensor[cut] if dim == 0 else tensor[:, cut]
        self.bytes_read += part.numel() * part.element_size()
        return part


def parameters(chunk: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter, Source]]:
    """Every parameter of a model chunk with its source, names and expert numbers filled in.

    Raises:
        ConfigError: a parameter that no Qwen3-MoE checkpoint has.
    """
    first_expert = 0
    if chunk.config.num_moe_experts:
        held = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        first_expert = held * parallel_state.get_expert_model_parallel_rank()
    for name, parameter in chunk.named_parameters():
        yield name, parameter, _source(name, chunk, first_expert)


def _source(name: str, chunk: GPTModel, first_expert: int) -> Source:
    if name in _MODEL:
        tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
        return _MODEL["embedding.word_embeddings.weight" if tied else name]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match:
        layer = chunk.decoder.layers[int(match[1])].layer_number - 1  # global, over all pipeline stages
        for pattern, source in _LAYER.items():
            if found := re.fullmatch(pattern, match[2]):
                local = next((int(group) for group in found.groups() if group is not None), 0)
                names = tuple(n.format(layer=layer, expert=first_expert + local) for n in source.names)
                return source._replace(names=names)
    raise ConfigError(
        "a parameter of this Megatron model has no place in a Qwen3-MoE checkpoint",
        where=name,
        remedy="convert other families with Megatron-Bridge",
    )


def load(chunks: Sequence[GPTModel], checkpoint: Checkpoint) -> None:
    """Fill every parameter of this rank's model chunks; values are cast to the parameters' dtype.

    Raises:
        ConfigError: a tensor is absent, or of another shape than the model's.
    """
    for chunk in chunks:
        for name, parameter, source in parameters(chunk):
            rank, size = _cut(source)
            parts = [checkpoint.read(tensor, source.dim, rank, size) for tensor in source.names]
            value = _fuse(parts, source, chunk.config.kv_channels)
            if value.shape != parameter.shape:
                raise ConfigError(
                    "a tensor of the checkpoint does not fit the model",
                    where=f"{name} from {', '.join(source.names)}",
                    expected=list(parameter.shape),
                    got=list(value.shape),
                )
            with torch.no_grad():
                parameter.copy_(value)


def save(chunks: Sequence[GPTModel], path: Path, like: Path) -> None:
    """Write the model as a Hugging Face directory; called by every rank, complete when it returns.

    Args:
        chunks: This rank's chunks, bare (`megatron.core.utils.unwrap_model`).
        path: The new directory, on a file system that every rank sees. Weights that an earlier save left there, by other
            numbers of ranks, are removed: transformers would load a `model.safetensors` rather than the new files.
        like: The directory that the model was loaded from: its configuration and tokenizer are copied.

    Raises:
        ConfigError: `path` is `like`.
    """
    if path.resolve() == like.resolve():
        raise ConfigError(
            "the directory that a model was loaded from would be overwritten",
            where=str(path),
            remedy="save into another one",
        )
    mine: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for parameter_name, parameter, source in parameters(chunk):
            if parameter_name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                continue  # the last pipeline stage's copy of the tied embedding
            group, writes = _writers(source)
            for name, part in zip(source.names, _split(parameter.detach(), source, chunk), strict=True):
                whole = _gather(part, source.dim, group)
                if writes:
                    mine[name] = whole.contiguous().cpu()
    rank, size = dist.get_rank(), dist.get_world_size()
    file = f"model-{rank + 1:05d}-of-{size:05d}.safetensors"
    if rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        for old in (*path.glob("model.safetensors*"), *path.glob("model-*-of-*.safetensors")):
            old.unlink()
        for kept in like.iterdir():
            if (
                kept.is_file()
                and kept.suffix in (".json", ".jinja", ".txt", ".model")
                and "safetensors" not in kept.name
            ):
                shutil.copy(kept, path / kept.name)
    dist.barrier()
    if mine:
        save_file(mine, path / file, metadata={"format": "pt"})
    held: list[Any] = [None] * size
    dist.all_gather_object(
        held, {name: (file, tensor.numel() * tensor.element_size()) for name, tensor in mine.items()}
    )
    if rank == 0:
        found = {name: entry for part in held for name, entry in part.items()}
        index = {
            "metadata": {"total_size": sum(size for _, size in found.values())},
            "weight_map": {name: file for name, (file, _) in sorted(found.items())},
        }
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    dist.barrier()


def _cut(source: Source) -> tuple[int, int]:
    """(part of this rank, number of parts) of a tensor that is cut."""
    if source.dim is None:
        return 0, 1
    if source.expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _writers(source: Source) -> tuple[dist.ProcessGroup | None, bool]:
    """The group that holds the parts of a tensor, None if every rank has it whole; and whether this rank writes it."""
    if source.expert:
        replicas = parallel_state.get_expert_data_parallel_rank()
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        replicas = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        group = parallel_state.get_tensor_model_parallel_group()
    return (None if source.dim is None else group), replicas == 0 and group.rank() == 0


def _gather(part: torch.Tensor, dim: int | None, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is None or dim is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def _fuse(parts: list[torch.Tensor], source: Source, head_size: int) -> torch.Tensor:
    if source.fuse == "qkv":
        hidden = parts[0].shape[1]
        groups = parts[1].shape[0] // head_size
        return torch.cat([part.reshape(groups, -1, hidden) for part in parts], dim=1).reshape(-1, hidden)
    return torch.cat(parts) if source.fuse == "gated" else parts[0]


def _split(value: torch.Tensor, source: Source, chunk: GPTModel) -> list[torch.Tensor]:
    """The inverse of `_fuse`."""
    if source.fuse == "qkv":
        head_size, hidden = chunk.config.kv_channels, value.shape[1]
        queries = chunk.config.num_attention_heads // chunk.config.num_query_groups
        by_group = value.reshape(-1, (queries + 2) * head_size, hidden)
        sizes = [queries * head_size, head_size, head_size]
        return [part.reshape(-1, hidden) for part in torch.split(by_group, sizes, dim=1)]
    return list(value.chunk(2)) if source.fuse == "gated" else [value]
