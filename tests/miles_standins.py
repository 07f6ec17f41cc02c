"""Stand-ins for the parts of miles that r3's hooks meet, with the names and signatures of the commit in docs/miles.md.

As in slime_standins.py: written from reading the source, not copied. With R3_MILES_SOURCE=/path/to/miles the replay manager,
the filling and the FSDP module are miles' own.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

SOURCE = os.environ.get("R3_MILES_SOURCE", "")


# miles/rollout/base_types.py ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerateFnInput:
    state: Any
    sample: Any
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> Any:
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    samples: Any


# miles/utils/replay_base.py -------------------------------------------------------------------------------------------


class Replay:
    def __init__(self, stream_idx: int | None = None) -> None:
        self.stream_idx = stream_idx
        self.forward_index = self.backward_index = 0
        self.top_indices_list: list[Any] = []

    def record(self, top_indices: Any) -> None:
        self.top_indices_list.append(top_indices.clone())

    def pop_forward(self) -> Any:
        self.forward_index += 1
        return self.top_indices_list[self.forward_index - 1].to("cpu")

    def pop_backward(self) -> Any:
        self.backward_index += 1
        return self.top_indices_list[self.backward_index - 1].to("cpu")


class RoutingReplayManager:
    data_key = "rollout_routed_experts"
    if_sp_region = True
    enable_check_replay_result = False

    def __init__(self) -> None:
        self.replays: list[Any] = []
        self.current: Any = None
        self.enabled, self.stage = False, "fallthrough"
        self.register_replay_list_func: Any = None

    def get_current(self) -> Any:
        return self.current

    def register_to_module(self, module: nn.Module, attr_name: str, stream_idx: int | None = None) -> None:
        if not self.enabled:
            return
        replay = sys.modules["miles.utils.replay_base"].Replay(stream_idx=stream_idx)
        self.replays.append(replay)
        setattr(module, attr_name, replay)
        module.register_forward_pre_hook(lambda *_: setattr(self, "current", replay))


# miles/backends/training_utils/replay_data.py -------------------------------------------------------------------------


def register_replay_list_sequential(replay_list: Any, replay_data: torch.Tensor, **_: Any) -> None:
    for number, replay in enumerate(replay_list):
        replay.record(replay_data[:, number if replay.stream_idx is None else replay.stream_idx])


def fill_replay_data(
    *,
    args: Any,
    models: Any,
    data_iterator: Any,
    num_microbatches: Any,
    rollout_data: dict[str, Any],
    data_key: str,
    replay_list: list[Any],
    register_replay_list_func: Any,
    if_sp_region: bool = True,
    indices_are_token_positions: bool = False,  # noqa: ARG001
) -> None:
    state = sys.modules["miles.backends.training_utils.parallel"].get_parallel_state()
    cut = sys.modules["miles.backends.training_utils.cp_utils"].slice_with_cp

    def pad(rows: torch.Tensor, count: int) -> torch.Tensor:
        return torch.cat([rows, rows.new_full((count, *rows.shape[1:]), -1)])

    for each in data_iterator:
        each.reset()
    for _ in range(sum(num_microbatches)):
        batch = data_iterator[0].get_next([data_key, "tokens", "max_seq_lens"])
        for rows, ids in zip(batch[data_key], batch["tokens"], strict=True):
            assert rows.shape[0] == ids.shape[0] - 1
        whole = [pad(rows, 1) for rows in batch[data_key]]
        if args.qkv_format == "bshd":
            width = batch["max_seq_lens"][0]
            local = torch.cat([cut(rows, pad, "bshd", width) for rows in whole])
        else:
            local = torch.cat([cut(rows, pad, "thd") for rows in whole])
            local = pad(local, -len(local) % (state.tp.size * args.data_pad_size_multiplier))
        if getattr(args, "sequence_parallel", False) and if_sp_region:
            local = local.chunk(state.tp.size)[state.tp.rank]
        register_replay_list_func(replay_list, local, models=models)
    del rollout_data[data_key]
    for each in data_iterator:
        each.reset()


def slice_with_cp(
    tokens: Any, pad_value: Any, qkv_format: str = "thd", max_seq_len: Any = None, parallel_state: Any = None
) -> Any:
    state = parallel_state or sys.modules["miles.backends.training_utils.parallel"].get_parallel_state()
    size, rank = state.cp.size, state.cp.rank
    width = max_seq_len if qkv_format == "bshd" else len(tokens)
    if size == 1:
        return pad_value(tokens, width - len(tokens)) if qkv_format == "bshd" else tokens
    part = -(-width // (2 * size))
    parts = pad_value(tokens, 2 * size * part - len(tokens)).chunk(2 * size)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]])


# miles/backends/fsdp_utils/adaptations/routing_replay.py --------------------------------------------------------------


@dataclass(frozen=True)
class RoutingReplayAdapter:
    name: str
    applies_to: Callable[[Any], bool]
    module_cls_name: str
    install: Callable[[nn.Module], None]


_FSDP = """
import re
_ADAPTERS = []

def register_routing_replay_adapter(adapter):
    _ADAPTERS.append(adapter)

def resolve_routing_replay_adapter(hf_config):
    return next((adapter for adapter in _ADAPTERS if adapter.applies_to(hf_config)), None)

def install(model, hf_config):
    adapter = resolve_routing_replay_adapter(hf_config)
    if adapter is None:
        raise ValueError("no routing-replay adapter")
    found = [
        (int(re.search(r"\\\\.layers\\\\.(\\\\d+)\\\\.", name + ".").group(1)), module)
        for name, module in model.named_modules()
        if type(module).__name__ == adapter.module_cls_name
    ]
    for layer, module in sorted(found, key=lambda pair: pair[0]):
        adapter.install(module)
        routing_replay_manager.register_to_module(module, "routing_replay", stream_idx=layer)
    return len(found)

def fill(args, model, data_iterator, num_microbatches, rollout_data):
    fill_replay_data(
        args=args, models=model, data_iterator=data_iterator, num_microbatches=num_microbatches, rollout_data=rollout_data,
        data_key=routing_replay_manager.data_key, replay_list=routing_replay_manager.replays,
        register_replay_list_func=routing_replay_manager.register_replay_list_func,
    )
"""


@contextmanager
def stage(manager: Any, name: str) -> Iterator[None]:
    before, manager.stage = manager.stage, name
    yield
    manager.stage = before


def parallel_state(**changes: int) -> SimpleNamespace:
    """`tp_size`, `tp_rank`, `cp_size`, `cp_rank`; one rank if nothing is said."""
    get = {**{f"{g}_{v}": d for g in ("tp", "cp") for v, d in (("size", 1), ("rank", 0))}, **changes}
    return SimpleNamespace(**{g: SimpleNamespace(size=get[f"{g}_size"], rank=get[f"{g}_rank"]) for g in ("tp", "cp")})


class _FromText(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the FSDP module as Python would import it from a file, so that r3's import hook is the one of a real run."""

    NAME = "miles.backends.fsdp_utils.adaptations.routing_replay"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self.NAME else None

    def create_module(self, spec: Any) -> None: ...

    def exec_module(self, module: types.ModuleType) -> None:
        base, data = sys.modules["miles.utils.replay_base"], sys.modules["miles.backends.training_utils.replay_data"]
        vars(module).update(
            routing_replay_manager=base.routing_replay_manager,
            fill_replay_data=data.fill_replay_data,
            RoutingReplayAdapter=RoutingReplayAdapter,
        )
        exec(_FSDP.replace("\\\\", "\\"), vars(module))


def install(patch: pytest.MonkeyPatch, *, source: str = SOURCE, **parallel: int) -> Any:
    """Put miles into this process; returns its routing replay manager, enabled."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
        patch.delitem(sys.modules, name)
    contents: dict[str, dict[str, Any]] = {
        "miles.rollout.base_types": {"GenerateFnInput": GenerateFnInput, "GenerateFnOutput": GenerateFnOutput},
        "miles.rollout.generate_hub.single_turn": {},
        "miles.utils.replay_base": {"Replay": Replay, "routing_replay_manager": RoutingReplayManager()},
        "miles.backends.training_utils.parallel": {"get_parallel_state": lambda: parallel_state(**parallel)},
        "miles.backends.training_utils.cp_utils": {"slice_with_cp": slice_with_cp},
        "miles.backends.training_utils.replay_data": {"fill_replay_data": fill_replay_data},
        "miles.backends.megatron_utils.actor": {"fill_replay_data": fill_replay_data},
    }
    names = [*contents, _FromText.NAME]
    for name in sorted({".".join(n.split(".")[:depth]) for n in names for depth in range(1, n.count(".") + 1)}):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(source, *name.split("."))] if source else []
        patch.setitem(sys.modules, name, package)
    real = ("miles.utils.replay_base", "miles.backends.training_utils.replay_data") if source else ()
    for name, attributes in contents.items():
        if name not in real:
            module = types.ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)
    for name in real:
        patch.setitem(sys.modules, name, importlib.import_module(name))
    if source:
        base, data = sys.modules["miles.utils.replay_base"], sys.modules["miles.backends.training_utils.replay_data"]
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(
            sys.modules["miles.utils.replay_base"].Replay, "record", Replay.record
        )  # theirs pins memory: a GPU
        sys.modules["miles.backends.megatron_utils.actor"].fill_replay_data = data.fill_replay_data  # type: ignore[attr-defined]
        base.routing_replay_manager.replays = []
    else:
        patch.setattr(sys, "meta_path", [*sys.meta_path, _FromText()])
    manager = sys.modules["miles.utils.replay_base"].routing_replay_manager
    manager.enabled = True
    manager.register_replay_list_func = register_replay_list_sequential
    return manager


def layers_of(model: nn.Module, class_name: str) -> list[tuple[int, nn.Module]]:
    """miles' own search: modules of a class, by the number in their path."""
    out = []
    for name, module in model.named_modules():
        match = re.search(r"\.layers\.(\d+)\.", f"{name}.")
        if type(module).__name__ == class_name and match:
            out.append((int(match[1]), module))
    return out
