"""Fixtures that more than one test module uses: the tiny trained model and one real vLLM server for the whole session."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from r3.rollout.preflight import EngineInfo, preflight
from r3.rollout.server import VllmServer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests on tensors of a few KB: on a busy machine the threads of OpenMP wait for each other a hundred times longer than
    they work. And what is imported by now is left out of garbage collections, which such tests ask for to see rows die."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def verl_environment() -> Iterator[None]:
    """veRL on its CPU platform, for one test module."""
    import verl_parts

    with verl_parts.environment():
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Directory of the tiny mixture-of-experts model and its prompts.jsonl; trained once, then kept in .r3/ (ignored by git).

    R3_TINY_MODEL names a directory to use in its place.
    """
    given = os.environ.get("R3_TINY_MODEL")
    if given:
        return Path(given)
    spec = importlib.util.spec_from_file_location("tiny_moe", ROOT / "scripts" / "tiny_moe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_moe"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    path = module.build(ROOT / ".r3" / "tiny-moe")
    assert isinstance(path, Path)
    return path


@pytest.fixture(scope="session")
def vllm_server(tiny_model: Path) -> Iterator[VllmServer]:
    """One real server with routed experts on; a test must leave it as it found it."""
    with VllmServer(tiny_model, dtype="bfloat16") as server:
        yield server


@pytest.fixture(scope="session")
def engine(vllm_server: VllmServer) -> EngineInfo:
    return asyncio.run(preflight(vllm_server.url))


@pytest.fixture(scope="module")
def models() -> Iterator[ModuleType]:
    """tests/megatron_models.py, whose import takes Megatron with it, in a process group of one."""
    import megatron_models
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from torch import distributed

    megatron_models.one_process()
    yield megatron_models
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # Megatron's own global, of whatever shape the last loss had
    if distributed.is_initialized():
        distributed.destroy_process_group()
    megatron_models.parallel_state.destroy_model_parallel()
