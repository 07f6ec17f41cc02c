"""Stand-ins for the parts of slime that r3's hooks meet, with the names, fields and signatures of the commit in docs/slime.md.

slime itself needs Ray actors, SGLang and GPUs. What is here was written from reading its source: the contracts are its own
(count rule len(tokens) - 1, the field list, stages and cursors, padding, the zigzag cut), the code is not. The same tests run
against a checkout:

    R3_SLIME_SOURCE=/path/to/slime pytest tests/test_slime_rollout.py tests/test_slime_trainer.py

then `Sample`, the sample hooks, the validation, `RoutingReplay`, `cp_utils` and `DataIterator` are slime's, imported from there.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import os
import sys
import types
from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

SOURCE = os.environ.get("R3_SLIME_SOURCE", "")


class Mpu:
    """megatron.core.mpu as far as slime's cutting asks it; a test sets the numbers."""

    tp_size = cp_size = 1
    tp_rank = cp_rank = 0
    last_stage = True

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tp_size

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_context_parallel_world_size(self) -> int:
        return self.cp_size

    def get_context_parallel_rank(self) -> int:
        return self.cp_rank

    def is_pipeline_last_stage(self) -> bool:
        return self.last_stage


# slime/utils/types.py -------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Response tokens with their mask and log-probs; of meta_info the rows (a whole array, or from a start) and the end."""
        new = list(tokens or [])
        assert not (new and trainable and log_probs is None)
        before, self.tokens = self.response_length, self.tokens + new
        self.response += text or ""
        self.response_length += len(new)
        self.loss_mask = ([1] * before if self.loss_mask is None else self.loss_mask) + [int(trainable)] * len(new)
        old = self.rollout_log_probs if self.rollout_log_probs is not None else [0.0] * before
        self.rollout_log_probs = old + list(log_probs if log_probs is not None else [0.0] * len(new))
        if meta_info:
            self._rows(args, meta_info)
            if update_terminal_info and "finish_reason" in meta_info:
                if "weight_version" in meta_info:
                    self.weight_versions.append(meta_info["weight_version"])
                ends = {"length": "TRUNCATED", "abort": "ABORTED", "stop": "COMPLETED"}
                self.status = Sample.Status[ends[meta_info["finish_reason"]["type"]]]

    def _rows(self, args: Any, meta_info: dict[str, Any]) -> None:
        if meta_info.get("routed_experts") is None:
            return
        flat = torch.frombuffer(bytearray(base64.b64decode(meta_info["routed_experts"])), dtype=torch.int32)
        start = int(meta_info.get("routed_experts_start_len", 0) or 0)
        shape = (max(0, len(self.tokens) - 1 - start), args.num_layers, args.moe_router_topk)
        if flat.numel() != int(np.prod(shape)):
            raise ValueError("SGLang routed_experts element count does not match sample tokens")
        rows = flat.reshape(shape)
        self.rollout_routed_experts = torch.cat([self.rollout_routed_experts[:start], rows]) if start else rows


# slime/rollout/sample_hooks.py ----------------------------------------------------------------------------------------


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Every hook on every leaf; of the keywords each hook gets those that it has parameters for."""
    module = sys.modules["slime.rollout.sample_hooks"]
    kwargs.setdefault("rollout_id", module._current_rollout_id)
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, each, **kwargs) for each in value]
    for path in args.rollout_sample_hook_path:
        hook = load_function(path)
        accepted = inspect.signature(hook).parameters
        result = hook(args, value, **{name: given for name, given in kwargs.items() if name in accepted})
        result = await result if inspect.isawaitable(result) else result
        assert result is None or isinstance(result, type(value))
        value = value if result is None else result
    return value


def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


# slime/observability/rollout_data_utils.py ----------------------------------------------------------------------------


def validate_rollout_routed_experts_for_replay(routed_experts: list[torch.Tensor], args: Any) -> None:
    assert routed_experts
    freq = args.moe_layer_freq
    moe = [i for i, f in enumerate(freq) if f] if isinstance(freq, (list, tuple)) else range(args.num_layers)
    for rows in routed_experts:
        if rows.ndim != 3 or tuple(rows.shape[1:]) != (args.num_layers, args.moe_router_topk) or not len(rows):
            raise ValueError("Invalid rollout routed-experts shape for R3")
        if any(not torch.count_nonzero(rows[:, layer]) for layer in moe):
            raise ValueError("R3 routed-experts capture is all zero for MoE layers")


# slime/utils/routing_replay.py ----------------------------------------------------------------------------------------


class RoutingReplay:
    """A router's list of rows a micro-batch, with one cursor for forwards and one for recomputes."""

    all_routing_replays: list[Any] = []  # noqa: RUF012
    lazy_resources: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.forward_index = self.backward_index = 0
        self.top_indices_list: list[Any] = []
        RoutingReplay.all_routing_replays.append(self)

    def record(self, top_indices: Any) -> None:
        self.top_indices_list.append(top_indices)

    def pop_forward(self) -> torch.Tensor:
        self.forward_index += 1
        return self._at(self.forward_index - 1, "forward")

    def pop_backward(self) -> torch.Tensor:
        self.backward_index += 1
        return self._at(self.backward_index - 1, "backward")

    def _at(self, position: int, stage: str) -> torch.Tensor:
        item = self.top_indices_list[position]
        lazy = getattr(item, "materialize_for_routing_replay", None)
        return lazy(stage) if lazy else item.to(torch.int32)

    def clear(self) -> None:
        self.forward_index = self.backward_index = 0
        self.top_indices_list = []

    @staticmethod
    def clear_all() -> None:
        for replay in RoutingReplay.all_routing_replays:
            replay.clear()
        for resource in RoutingReplay.lazy_resources:
            resource.close()
        RoutingReplay.lazy_resources = []

    @staticmethod
    def clear_all_forward() -> None:
        for replay in RoutingReplay.all_routing_replays:
            replay.forward_index = 0

    @staticmethod
    def register_lazy_resource(resource: Any) -> None:
        RoutingReplay.lazy_resources.append(resource)


def get_routing_replay_compute_topk(old_compute_topk: Any) -> Any:
    """What slime's patch of Megatron puts around the router's top-k."""

    def compute_topk(scores: Any, topk: int, num_groups: Any = None, group_topk: Any = None) -> Any:
        on = os.environ.get("ENABLE_ROUTING_REPLAY", "0") == "1"
        stage = os.environ["ROUTING_REPLAY_STAGE"] if on else "fallthrough"
        if stage == "fallthrough":
            return old_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        replay = _current[0]
        ids = replay.pop_forward() if stage == "replay_forward" else replay.pop_backward()
        assert ids.shape == (scores.shape[0], topk)
        return scores.gather(1, ids), ids

    return compute_topk


def register_routing_replay(module: torch.nn.Module) -> None:
    """What slime's patch calls at the end of `TopKRouter.__init__`."""
    if os.environ.get("ENABLE_ROUTING_REPLAY", "0") == "1":
        replay = module.routing_replay = sys.modules["slime.utils.routing_replay"].RoutingReplay()
        module.register_forward_pre_hook(lambda *_: _current.__setitem__(0, replay))


_current: list[Any] = [None]


# slime/backends/megatron_utils/cp_utils.py and data.py ----------------------------------------------------------------


def slice_with_cp(tokens: torch.Tensor, pad_value: Any) -> torch.Tensor:
    """A sequence padded to 2 x CP equal parts, of which this rank has one from the front and its mirror from the back."""
    mpu = sys.modules["slime.backends.megatron_utils.cp_utils"].mpu
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if size == 1:
        return tokens
    pad = -len(tokens) % (2 * size)
    if callable(pad_value):
        tokens = pad_value(tokens, pad)
    else:
        tokens = torch.cat([tokens, torch.full((pad, *tokens.shape[1:]), pad_value, dtype=tokens.dtype)])
    parts = tokens.chunk(2 * size)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]])


def get_logits_and_tokens_offset_with_cp(total_length: int, response_length: int) -> tuple[Any, ...]:
    """Fourth: the two spans of response tokens whose log-probs this rank has, counted from the prompt's beginning."""
    mpu = sys.modules["slime.backends.megatron_utils.cp_utils"].mpu
    size, rank, prompt = (
        mpu.get_context_parallel_world_size(),
        mpu.get_context_parallel_rank(),
        total_length - response_length,
    )
    part = -(-total_length // (2 * size))
    chunks = [(part * i, part * (i + 1)) for i in (rank, 2 * size - 1 - rank)]
    logits = [(max(begin, prompt - 1), min(end, total_length - 1)) for begin, end in chunks]
    logits = [span if span[0] < span[1] else (0, 0) for span in logits]
    return part, tuple(chunks), tuple(logits), tuple((a + 1, b + 1) if a < b else (0, 0) for a, b in logits)


def _pad_experts(rows: torch.Tensor, pad: int, num_experts: int) -> torch.Tensor:
    filler = torch.arange(pad * rows.shape[1] * rows.shape[2], dtype=rows.dtype) % num_experts
    return torch.cat([rows, filler.reshape(pad, *rows.shape[1:])])


def prepare_routed_experts_for_routing_replay(
    rollout_routed_experts: Any,
    tokens: Any,
    *,
    num_experts: int,
    data_pad_size_multiplier: int,
    sequence_parallel: bool,
    allgather_cp: bool,
) -> torch.Tensor:
    mpu = sys.modules["slime.backends.megatron_utils.cp_utils"].mpu
    for rows, ids in zip(rollout_routed_experts, tokens, strict=True):
        assert rows.shape[0] == ids.shape[0] - 1, f"{rows.shape}, {ids.shape}"
    padded = [_pad_experts(rows, 1, num_experts) for rows in rollout_routed_experts]
    multiple = mpu.get_tensor_model_parallel_world_size() * data_pad_size_multiplier
    size = mpu.get_context_parallel_world_size()
    if allgather_cp:
        local = torch.cat(padded)
        local = _pad_experts(local, -len(local) % (size * multiple), num_experts)
        local = local.chunk(size)[mpu.get_context_parallel_rank()]
    else:
        local = torch.cat([slice_with_cp(rows, lambda x, pad: _pad_experts(x, pad, num_experts)) for rows in padded])
        local = _pad_experts(local, -len(local) % multiple, num_experts)
    if sequence_parallel:
        local = local.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
    return local


class DataIterator:
    def __init__(self, rollout_data: dict[str, Any], micro_batch_indices: list[list[int]]) -> None:
        self.rollout_data, self.micro_batch_indices, self.offset = rollout_data, micro_batch_indices, 0

    def get_next(self, keys: Any) -> dict[str, Any]:
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        columns = {key: self.rollout_data.get(key) for key in keys}
        return {key: None if column is None else [column[i] for i in indices] for key, column in columns.items()}

    def reset(self) -> DataIterator:
        self.offset = 0
        return self


def get_batch(data_iterator: Any, keys: Any, pad_multiplier: int = 128, allgather_cp: bool = False) -> dict[str, Any]:
    """The token tensor [1, t] of this rank, and the whole sequences beside it."""
    mpu = sys.modules["slime.backends.megatron_utils.cp_utils"].mpu
    batch = data_iterator.get_next(keys)
    tokens, size = batch["tokens"], mpu.get_context_parallel_world_size()
    multiple = mpu.get_tensor_model_parallel_world_size() * pad_multiplier
    if allgather_cp:
        row = torch.cat(tokens)
        row = torch.nn.functional.pad(row, (0, -len(row) % (size * multiple)))
        row = row.chunk(size)[mpu.get_context_parallel_rank()]
    else:
        row = torch.cat([slice_with_cp(each, 0) for each in tokens])
        row = torch.nn.functional.pad(row, (0, -len(row) % multiple))
    return {**batch, "unconcat_tokens": tokens, "tokens": row[None]}


class MegatronTrainRayActor:
    """The part of slime's trainer that fills the replay lists, for a rank whose chunks' layers a test sets up."""

    def __init__(self, args: Any, model: Any) -> None:
        self.args, self.model = args, model

    def fill_routing_replay(self, data_iterator: Any, num_microbatches: Any, rollout_data: dict[str, Any]) -> None:
        """slime's own: all layers of all rows are cut, and each router's layer is recorded by position in the registry."""
        if "rollout_routed_experts" not in rollout_data:
            raise ValueError("rollout_routed_experts is required in rollout_data")
        replays = sys.modules["slime.utils.routing_replay"].RoutingReplay.all_routing_replays
        prepare = sys.modules["slime.backends.megatron_utils.cp_utils"].prepare_routed_experts_for_routing_replay
        for _ in range(sum(num_microbatches)):
            batch = data_iterator[0].get_next(["rollout_routed_experts", "tokens"])
            rows = prepare(
                batch["rollout_routed_experts"],
                batch["tokens"],
                num_experts=self.args.num_experts,
                data_pad_size_multiplier=self.args.data_pad_size_multiplier,
                sequence_parallel=self.args.sequence_parallel,
                allgather_cp=self.args.allgather_cp,
            )
            layers = [
                module.layer_number - 1 for chunk in self.model for module in chunk.modules() if is_router(module)
            ]
            assert len(layers) == len(replays)
            for replay, layer in zip(replays, layers, strict=True):
                replay.top_indices_list.append(rows[:, layer])
        del rollout_data["rollout_routed_experts"]
        data_iterator[0].reset()


_FILL = MegatronTrainRayActor.fill_routing_replay


class TopKRouter(torch.nn.Module):
    """A router of a patched Megatron: registered with slime's replay when it is built."""

    def __init__(self, layer_number: int, replay: Any) -> None:
        super().__init__()
        self.layer_number = layer_number
        if replay is not None:
            self.routing_replay = replay


def is_router(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "TopKRouter"


def chunk_of(layers: list[int], *, mtp: bool = False, patched: bool = True) -> torch.nn.Module:
    """A model chunk whose decoder has routers in these layers (global, from 0), each with its replay object."""
    new = sys.modules["slime.utils.routing_replay"].RoutingReplay
    routers = [TopKRouter(layer + 1, new() if patched else None) for layer in layers]
    chunk = torch.nn.ModuleDict({"decoder": torch.nn.ModuleList(routers)})
    if mtp:
        chunk["mtp"] = torch.nn.ModuleList([TopKRouter(1, new())])
    return chunk


# slime/observability/train_metric_utils.py ----------------------------------------------------------------------------


def gather_log_data(metric_name: str, args: Any, rollout_id: int, log_dict: dict[str, Any]) -> None:  # noqa: ARG001
    logged.append({f"{metric_name}/{key}": value for key, value in log_dict.items()})


logged: list[dict[str, Any]] = []

_MODULES: dict[str, dict[str, Any]] = {
    "slime.utils.types": {"Sample": Sample},
    "slime.utils.misc": {"load_function": load_function},
    "slime.utils.accelerator": {"current_device": lambda: torch.device("cpu")},
    "slime.utils.routing_replay": {
        "RoutingReplay": RoutingReplay,
        "get_routing_replay_compute_topk": get_routing_replay_compute_topk,
        "register_routing_replay": register_routing_replay,
    },
    "slime.rollout.sample_hooks": {
        "_current_rollout_id": None,
        "apply_rollout_sample_hooks": apply_rollout_sample_hooks,
    },
    "slime.observability.rollout_data_utils": {
        "validate_rollout_routed_experts_for_replay": validate_rollout_routed_experts_for_replay
    },
    "slime.observability.train_metric_utils": {"gather_log_data": gather_log_data},
    "slime.backends.megatron_utils.cp_utils": {
        "slice_with_cp": slice_with_cp,
        "get_logits_and_tokens_offset_with_cp": get_logits_and_tokens_offset_with_cp,
        "prepare_routed_experts_for_routing_replay": prepare_routed_experts_for_routing_replay,
    },
    "slime.backends.megatron_utils.data": {"DataIterator": DataIterator, "get_batch": get_batch},
    "slime.backends.megatron_utils.model": {"get_batch": get_batch},
    "slime.backends.megatron_utils.actor": {"MegatronTrainRayActor": MegatronTrainRayActor},
    "slime.rollout.sglang_rollout": {},
}
# Modules of a checkout that import without SGLang and GPUs.
_REAL = (
    "slime.utils.types",
    "slime.utils.misc",
    "slime.utils.routing_replay",
    "slime.rollout.sample_hooks",
    "slime.observability.rollout_data_utils",
    "slime.backends.megatron_utils.cp_utils",
    "slime.backends.megatron_utils.data",
)


def install(patch: pytest.MonkeyPatch, *, source: str = SOURCE) -> Mpu:
    """Put slime into this process; returns the parallel state that its cutting will see."""
    mpu = Mpu()
    real = [name for name in _REAL if source and os.path.exists(os.path.join(source, *name.split(".")) + ".py")]
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        patch.delitem(sys.modules, name)
    packages = {".".join(name.split(".")[:depth]) for name in _MODULES for depth in range(1, name.count(".") + 1)}
    for name in sorted(packages):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(source, *name.split("."))] if source else []
        patch.setitem(sys.modules, name, package)
    for name, attributes in _MODULES.items():
        if name in real:
            continue
        module = types.ModuleType(name)
        vars(module).update(attributes)
        patch.setitem(sys.modules, name, module)
    for name in real:
        patch.setitem(sys.modules, name, importlib.import_module(name))
    patch.setattr(sys.modules["slime.backends.megatron_utils.cp_utils"], "mpu", mpu, raising=False)
    if source:
        patch.setattr(sys.modules["slime.backends.megatron_utils.data"], "mpu", mpu)
    sys.modules["slime.utils.routing_replay"].RoutingReplay.all_routing_replays = []
    sys.modules["slime.utils.routing_replay"].RoutingReplay.lazy_resources = []
    patch.setattr(MegatronTrainRayActor, "fill_routing_replay", _FILL)  # put back at the end, whatever a test installs
    logged.clear()
    return mpu


def arguments(store: Any, **changes: Any) -> Namespace:
    """slime's arguments as far as the hooks read them, of a model of 4 layers (the first dense), top-2 of 8 experts."""
    values: dict[str, Any] = {
        "num_layers": 4,
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_fusion": False,
        "hf_checkpoint": "/models/Qwen3-30B-A3B",
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "partial_rollout": False,
        "use_routing_replay": True,
        "use_rollout_routing_replay": True,
        "rollout_sample_hook_path": ["r3.rollout.slime.write_shard"],
        "custom_megatron_before_log_prob_hook_path": None,
        "custom_megatron_before_train_step_hook_path": None,
        "data_pad_size_multiplier": 4,
        "sequence_parallel": False,
        "allgather_cp": False,
        "r3_store": str(store),
    }
    return Namespace(**{**values, **changes})


class Engine:
    """SGLang as slime asks it: tokens, log-probs, and the rows of the whole sequence as base64 of int32 [N-1, L, K].

    Its routes are a function of token, position and weight version, so that a recomputed row after an update is another row.
    """

    def __init__(self, args: Any, seed: int = 0) -> None:
        self.args, self.rng, self.version = args, np.random.default_rng(seed), 1

    def rows(self, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        args = self.args
        rows = np.zeros((max(len(tokens) - 1, 0), args.num_layers, args.moe_router_topk), np.int32)
        for position, token in enumerate(tokens[:-1]):
            for layer in range(1, args.num_layers):
                draw = np.random.default_rng([token, position, layer, self.version])
                rows[position, layer] = draw.permutation(args.num_experts)[: args.moe_router_topk]
        return rows

    def request(self, tokens: list[int], count: int, finish: str = "stop", **meta: Any) -> dict[str, Any]:
        new = self.rng.integers(0, 100, count).tolist()
        rows = self.rows([*tokens, *new])
        return {
            "tokens": new,
            "log_probs": (-self.rng.random(count)).tolist(),
            "meta_info": {
                "routed_experts": base64.b64encode(rows.tobytes()).decode(),
                "weight_version": str(self.version),
                "finish_reason": {"type": finish},
                "prompt_tokens": len(tokens),
                "cached_tokens": 0,
                **meta,
            },
        }

    def extend(self, sample: Any, count: int, finish: str = "stop", **meta: Any) -> None:
        """One request that goes on with a sample, as slime's generate applies it."""
        answer = self.request(list(sample.tokens), count, finish, **meta)
        sample.append_response_tokens(self.args, trainable=True, text="x" * count, **answer)
