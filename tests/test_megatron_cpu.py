"""Megatron-core without a GPU: the stand-ins come, do what they say, and go; and the core attention in plain PyTorch."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from r3.errors import ReplayError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]  # the import of Megatron takes seconds


@pytest.fixture
def cpu() -> Iterator[types.ModuleType]:
    """The module, with the stand-ins of another test (they stay for the process) taken out for the time of this one."""
    from r3.trainers.megatron import cpu as module

    before = module._undo
    if before is not None:
        module.restore()
    yield module
    if before is not None:
        module.without_gpu()


def names_in_use() -> list[Any]:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    cuda = (
        "current_device",
        "synchronize",
        "Stream",
        "Event",
        "stream",
        "current_stream",
        "manual_seed",
        "get_rng_state",
    )
    return [
        *(getattr(torch.cuda, name) for name in cuda),
        random._get_cuda_rng_state,
        random._set_cuda_rng_state,
        moe_utils.maybe_move_tensor_to_cpu,
        token_dispatcher.maybe_move_tensor_to_cpu,
        hasattr(moe_utils, "te_general_gemm"),
    ]


def test_stand_ins_come_and_go(cpu) -> None:
    before = names_in_use()
    with cpu.without_gpu():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2).to("cuda:0").device.type == "cpu"
        assert torch.ones(2).to(torch.device("cuda")).device.type == "cpu"
        assert not torch.tensor([1], device="cuda", pin_memory=True).is_pinned()
        assert torch.cuda.current_device() == torch.device("cpu")
        inside = names_in_use()
        assert all(new is not old for new, old in zip(inside[:-1], before[:-1], strict=True))
        with cpu.without_gpu():  # a second call changes nothing, and takes nothing away
            assert names_in_use() == inside
        assert names_in_use() == inside
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert names_in_use() == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_only_megatron_is_told_that_tensors_are_cudas(cpu) -> None:
    ask: Callable[[torch.Tensor], str] = lambda tensor: tensor.type()  # noqa: E731
    as_megatron = types.FunctionType(ask.__code__, {"__name__": "megatron.core.optimizer.optimizer"})
    with cpu.without_gpu():
        assert ask(torch.zeros(1)) == "torch.FloatTensor"
        assert as_megatron(torch.zeros(1)) == "torch.cuda.FloatTensor"
        assert as_megatron(torch.zeros(1, dtype=torch.bfloat16)) == "torch.cuda.BFloat16Tensor"


def test_the_generator_of_dropout_is_the_cpus(cpu) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with cpu.without_gpu():
        tracker = CudaRNGStatesTracker()
        torch.manual_seed(5)
        outside = torch.get_rng_state()
        tracker.add("model-parallel-rng", 3)
        with tracker.fork():
            first = torch.rand(4)
        with tracker.fork():
            second = torch.rand(4)
        assert torch.equal(torch.get_rng_state(), outside)
    torch.manual_seed(3)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(4), torch.rand(4)]))


def test_another_megatron_is_refused_and_nothing_is_left(cpu, monkeypatch) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    monkeypatch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", lambda tensor, where: (tensor, where))
    before = names_in_use()
    with pytest.raises(
        ReplayError,
        match=r"(?s)maybe_move_tensor_to_cpu: .*parameters tensor, as_numpy, record_stream.*got tensor, where",
    ):
        cpu.without_gpu()
    assert names_in_use() == before


# Core attention ---------------------------------------------------------------------------------------------------------


class GroupOf:
    """One of `size` context-parallel ranks, of which only rank and size are asked where nothing is gathered."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def attention(window: GroupOf | None = None) -> Any:
    import megatron_models
    from megatron.core.transformer.enums import AttnMaskType

    from r3.trainers.megatron.attention import CausalAttention

    group = types.SimpleNamespace(cp=window or GroupOf())
    return CausalAttention(megatron_models.config(), 1, AttnMaskType.causal, "self", pg_collection=group)


def by_hand(query: Any, key: Any, value: Any, sees: Callable[[int, int], bool]) -> torch.Tensor:
    """[s, n, d], [s, g, d]: one query at a time."""
    out = torch.zeros_like(query)
    for at in range(len(query)):
        keys = [other for other in range(len(key)) if sees(at, other)]
        for head in range(query.shape[1]):
            group = head * key.shape[1] // query.shape[1]
            scores = torch.tensor([float(query[at, head] @ key[k, group]) for k in keys]) / query.shape[2] ** 0.5
            out[at, head] = (scores.softmax(0)[:, None] * value[keys, group]).sum(0)
    return out.flatten(1)


def drawn(length: int, lines: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, lines, heads, 8, generator=generator) for heads in (4, 2, 2)]


def test_attention_of_padded_lines() -> None:
    query, key, value = drawn(6, 2)
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, :, :2] = True  # two positions of padding on the left of the first line
    got = attention()(query, key, value, mask)
    for line, begin in enumerate((2, 0)):
        rows = [tensor[begin:, line] for tensor in (query, key, value)]
        assert torch.allclose(got[begin:, line], by_hand(*rows, lambda at, other: other <= at), atol=1e-6)
    assert got.isfinite().all()
    assert not torch.equal(got, attention()(query, key, value, None))


def test_attention_of_packed_sequences() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    query, key, value = (tensor.squeeze(1) for tensor in drawn(9))
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, bounds, bounds, 5, 5)
    got = attention()(query, key, value, None, packed_seq_params=packed)
    assert torch.allclose(
        got, by_hand(query, key, value, lambda at, other: other <= at and (at < 4) == (other < 4)), atol=1e-6
    )


def test_where_the_positions_of_a_context_parallel_rank_are() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from r3.trainers.megatron.attention import _places

    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, bounds, bounds, 8, 8)
    first, second = (_places(6, 2, rank, packed, torch.device("cpu")) for rank in (0, 1))
    assert (first.sequence.tolist(), first.position.tolist()) == ([0, 0, 1, 1, 1, 1], [0, 3, 0, 1, 6, 7])
    assert (second.sequence.tolist(), second.position.tolist()) == ([0, 0, 1, 1, 1, 1], [1, 2, 2, 3, 4, 5])
    assert np.array_equal(_places(4, 2, 1, None, torch.device("cpu")).position, [2, 3, 4, 5])


def test_attention_refuses_what_it_does_not_do() -> None:
    import megatron_models
    from megatron.core.transformer.enums import AttnMaskType

    from r3.trainers.megatron.attention import CausalAttention, local_block_spec

    group = types.SimpleNamespace(cp=GroupOf())
    with pytest.raises(ReplayError, match="causal self-attention without dropout"):
        CausalAttention(megatron_models.config(), 1, AttnMaskType.padding, "self", pg_collection=group)
    with pytest.raises(ReplayError, match="only RMSNorm"):
        local_block_spec(megatron_models.config(normalization="LayerNorm"))
