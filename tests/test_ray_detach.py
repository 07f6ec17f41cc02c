"""detach: what must be copied is, once, and nothing else; and on a real object store it gives the memory back."""

from __future__ import annotations

import collections
import gc
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import random_sample

from r3 import RolloutSample, Routes
from r3.detach import detach

RNG = np.random.default_rng(0)
MB = 2**20


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


class Logprobs(NamedTuple):
    """As vLLM's LogprobsLists."""

    ids: Any
    logprobs: Any
    counts: Any


@dataclass
class Output:
    routes: Any
    logprobs: Any = None
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made = [*self.made, 1]


@dataclass(frozen=True)
class Frozen:
    __slots__ = ("array", "name")
    array: Any
    name: str


def test_the_same_object_where_nothing_had_to_be_copied() -> None:
    plain = [
        np.zeros(3),
        {"a": (1, "b", None, b"bytes")},
        Logprobs([1], np.ones(2), None),
        Output(np.zeros(1)),
        memoryview(bytearray(3)),
    ]
    assert detach(plain) is plain
    assert detach(plain[0]) is plain[0]


def test_every_container_is_rebuilt_as_its_own_type() -> None:
    array = read_only(np.arange(6).reshape(2, 3))
    held = Output(array, Logprobs(array, np.ones(1), [1]))
    value = {
        "list": [1, array],
        "tuple": (array, 2),
        "named": Logprobs(array, None, None),
        "dataclass": held,
        "frozen": Frozen(array, "x"),
        "ordered": OrderedDict(b=array, a=1),
        "default": defaultdict(list, a=array),
        "counter": collections.Counter("aab"),
        "objects": np.array([None, array], dtype=object),
    }
    out = detach(value)
    assert {name: type(item) for name, item in out.items()} == {name: type(item) for name, item in value.items()}
    new = out["list"][1]
    assert new is not array
    assert new.flags.writeable
    assert np.array_equal(new, array)
    places = [out["tuple"][0], out["named"].ids, out["dataclass"].routes, out["dataclass"].logprobs.ids]
    places += [out["frozen"].array, out["ordered"]["b"], out["default"]["a"], out["objects"][1]]
    assert all(place is new for place in places)  # one array, one copy
    assert list(out["ordered"]) == ["b", "a"]
    assert out["default"].default_factory is list
    assert out["dataclass"].made == [1]  # __post_init__ did not run again
    assert out["counter"] is value["counter"]
    assert held.routes is array  # what came is as it was
    assert value["list"][1] is array


def test_views_memory_and_samples() -> None:
    assert detach(memoryview(b"abc")).readonly is False
    matrix = memoryview(np.arange(6, dtype="<i4").tobytes()).cast("B").cast("i", [2, 3])
    copied = detach(matrix)
    assert (copied.readonly, copied.tolist(), copied.format) == (False, matrix.tolist(), "i")
    broadcast = np.broadcast_to(np.arange(3), (2, 3))
    assert detach(broadcast).flags.c_contiguous
    sample = random_sample(RNG)
    assert detach(sample) is sample
    read_only(sample.routes.ids)
    read_only(sample.tokens)
    free = detach(sample)
    assert isinstance(free, RolloutSample)
    assert isinstance(free.routes, Routes)
    assert free.routes.ids.flags.writeable
    assert free.tokens.flags.writeable
    assert free.routes.recorded is sample.routes.recorded
    assert free.routes.equal(sample.routes)


@pytest.mark.engine
def test_vllm_s_own_outputs() -> None:
    """What vLLM's function copies of its own output: routes with and without log-probs, and log-probs without routes."""
    from vllm.v1.executor.ray_utils import detach_zero_copy_from_model_runner_output
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, RoutedExpertsLists

    ids, values, rows = (read_only(RNG.integers(0, 9, (3, 2)).astype(dtype)) for dtype in ("i4", "f4", "u1"))
    slots = np.arange(3)
    for logprobs in (None, LogprobsLists(ids, values, ids, None)):
        for routes in (None, RoutedExpertsLists(rows, slots)):
            ours, theirs = (
                ModelRunnerOutput(["a"], {"a": 0}, logprobs=logprobs, routed_experts=routes) for _ in range(2)
            )
            free = detach(ours)
            detach_zero_copy_from_model_runner_output(theirs)
            assert (free is ours) == (logprobs is None and routes is None)
            assert isinstance(free, ModelRunnerOutput)
            for got, expected in ((free.logprobs, theirs.logprobs), (free.routed_experts, theirs.routed_experts)):
                assert type(got) is type(expected)
                for one, other in zip(got or (), expected or (), strict=True):
                    assert one is None or np.array_equal(one, other)
                    assert one is None or one.flags.writeable
            assert routes is None or free.routed_experts.slot_mapping is slots


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    import ray

    ray.init(
        "local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=100 * MB,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield ray
    ray.shutdown()


def used(ray: Any) -> int:
    """Bytes in the object store of this node, by Ray's own word."""
    from ray._private.internal_api import node_stats

    gc.collect()
    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return int(stats.store_stats.object_store_bytes_used)


@pytest.mark.engine
def test_on_a_real_object_store_the_memory_comes_back(store: Any) -> None:
    routes = RNG.integers(0, 48, 8 * MB, dtype=np.uint8).reshape(8, -1, 8)
    empty = used(store)

    def through(free: bool) -> tuple[np.ndarray, int]:
        reference = store.put({"routes": routes, "id": "p.0"})
        got = store.get(reference)
        assert not got["routes"].flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            got["routes"][0, 0, 0] = 1
        kept = detach(got) if free else got
        del reference, got
        return kept["routes"], used(store)

    pinned, held = through(False)
    assert held - empty >= 8 * MB  # a view of it is alive: the store cannot free the object
    del pinned
    assert wait(lambda: used(store) == empty)
    mine, _ = through(True)
    assert wait(lambda: used(store) == empty)
    assert np.array_equal(mine, routes)
    mine[0, 0, 0] ^= 1
    assert not np.array_equal(mine, routes)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_torch_tensors_over_foreign_memory(store: Any) -> None:
    import torch

    got = store.get(store.put(RNG.integers(0, 48, MB)))
    tensor, own, empty = torch.from_numpy(got), torch.zeros(4), torch.zeros(0)  # torch warns, and lets it be written
    value = [tensor, own, empty, tensor[5:]]
    free = detach(value)
    assert free[0].data_ptr() != tensor.data_ptr()
    assert torch.equal(free[0], tensor)
    assert free[1] is own
    assert free[2] is empty
    assert torch.equal(free[3], tensor[5:])
    free[0][0] = -1
    assert int(got[0]) != -1


def wait(condition: Any, seconds: float = 10) -> bool:
    import time

    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())
