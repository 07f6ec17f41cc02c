"""ShardDataset and ShardIterableDataset: who gets what, in which order, and exactly once over a resume."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SPEC, random_sample
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from r3 import ShardStore
from r3.errors import ConfigError, R3Warning, SampleError, ShardError, StoreError
from r3.partial import PartialSample
from r3.trainers.data import (
    Follow,
    LazySample,
    ShardDataset,
    ShardIterableDataset,
    Snapshot,
    Versions,
    merge_states,
    snapshot_in,
    states_in,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
GROUPS, SIZE = 12, 4
WORKERS = [0, pytest.param(2, marks=pytest.mark.engine)]  # processes that a loader starts take 0.3 s and more


def add(store: ShardStore, group: str, size: int = SIZE, **overrides: Any) -> None:
    rng = np.random.default_rng(len(group))
    for number in range(size):
        name = f"{group}.{number}"
        store.add(random_sample(rng, num_tokens=9 + number, sample_id=name, group_id=group, **overrides), fsync=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    """Read only; 12 groups of 4 samples."""
    store = ShardStore(tmp_path_factory.mktemp("store"))
    for group in range(GROUPS):
        add(store, f"p{group}")
    return store


@pytest.fixture
def own(tmp_path: Path) -> ShardStore:
    """One that a test may change: 6 groups of 4."""
    store = ShardStore(tmp_path / "own", create=True)
    for group in range(6):
        add(store, f"p{group}")
    return store


def ids(samples: Iterable[LazySample]) -> list[str]:
    return [sample.sample_id for sample in samples]


def batches(dataset: Any, workers: int = 0, batch_size: int = SIZE, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=list, **options)


def require_raises(loader: Any, kind: type[Exception], match: str) -> None:
    """Of a loader whose workers raise: in a process that just ends, for torch waits for such workers for 5 s."""
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(kind, match=match):
                flat(loader)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def flat(loader: Iterable[list[LazySample]]) -> list[str]:
    return [sample.sample_id for batch in loader for sample in batch]


# Shares ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ShardDataset, ShardIterableDataset])
@pytest.mark.parametrize("workers", WORKERS)
def test_every_sample_once_over_ranks_and_workers(kind: Any, workers: int, store: ShardStore) -> None:
    shares = []
    for rank in range(2):
        loader = batches(kind(store, rank=rank, world_size=2, group_size=SIZE), workers)
        got = list(loader)
        assert all(len(batch) == SIZE and len({sample.group_id for sample in batch}) == 1 for batch in got)
        shares.append(flat(got))
    assert sorted(shares[0] + shares[1]) == store.sample_ids()
    assert len(shares[0]) == len(shares[1])


@pytest.mark.engine
def test_the_order_of_the_map_style_is_the_same_with_any_number_of_workers(store: ShardStore) -> None:
    dataset = ShardDataset(store, seed=3)
    order = ids(dataset[i] for i in range(len(dataset)))
    assert flat(batches(dataset, 2, 5)) == order
    assert ids([dataset[-1]]) == order[-1:]
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    dataset.set_epoch(1)
    again = ids(dataset[i] for i in range(len(dataset)))
    assert again != order
    assert sorted(again) == sorted(order)
    assert ids(ShardDataset(store, shuffle=False)) == store.sample_ids()


@pytest.mark.engine
def test_an_epoch_reaches_workers_that_live_on(store: ShardStore) -> None:
    dataset = ShardIterableDataset(store)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=list, persistent_workers=True)
    first = flat(loader)
    dataset.set_epoch(1)
    second = flat(loader)
    alone = ShardIterableDataset(store)
    alone.set_epoch(1)
    assert second == ids(alone) != first


@pytest.mark.parametrize("kind", [ShardDataset, ShardIterableDataset])
def test_what_does_not_divide(kind: Any, store: ShardStore) -> None:
    snapshot = Snapshot.take(store, group_size=SIZE)
    with pytest.raises(ConfigError, match="cannot be dealt evenly"):
        kind(snapshot, rank=0, world_size=5)
    for uneven, units in (("drop", 2), ("pad", 3)):
        ranks = [kind(snapshot, rank=rank, world_size=5, uneven=uneven) for rank in range(5)]
        got = [
            ids(dataset[i] for i in range(len(dataset))) if kind is ShardDataset else ids(dataset) for dataset in ranks
        ]
        assert [len(share) for share in got] == [units * SIZE] * 5
        times = Counter(itertools.chain(*got))
        assert (ranks[0].deal.padded, len(ranks[0].deal.dropped)) == ((3, 0) if uneven == "pad" else (0, 2))
        assert sum(times.values()) - len(times) == ranks[0].deal.padded * SIZE
        assert len(store) - len(times) == len(ranks[0].deal.dropped) * SIZE


@pytest.mark.parametrize(
    "place", [{"rank": 0}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}]
)
def test_not_a_rank(place: dict[str, int], store: ShardStore) -> None:
    with pytest.raises(ConfigError, match="not a data-parallel rank"):
        ShardDataset(store, **place)


def test_settings_of_a_snapshot_are_given_to_it(store: ShardStore) -> None:
    snapshot = Snapshot.take(store, group_size=SIZE)
    assert len(ShardDataset(snapshot)) == len(store)
    with pytest.raises(ConfigError, match="where the snapshot is taken"):
        ShardDataset(snapshot, group_size=SIZE)
    with pytest.raises(ConfigError, match="unknown value of routes"):
        ShardDataset(snapshot, routes="eager")


def test_versions_are_filtered_and_counted(own: ShardStore) -> None:
    add(own, "new", weight_version=9)
    dataset = ShardIterableDataset(own, versions=Versions.within(9, 2), group_size=SIZE)
    assert {sample.weight_versions for sample in dataset} == {(9, 9)}
    assert dataset.snapshot is not None
    assert dataset.snapshot.report.left_out == {"too old": 24}


# What a sample is -----------------------------------------------------------------------------------------------------


def test_a_sample_is_that_of_its_shard_and_its_routes_are_read_late(store: ShardStore) -> None:
    [sample] = [one for one in ShardDataset(store) if one.sample_id == "p3.2"]
    whole = store.open("p3.2")
    assert not sample.routes_read
    assert len(pickle.dumps(sample)) < 2000
    for name in ("sample_id", "group_id", "spec", "prompt_length", "num_tokens", "provenance"):
        assert getattr(sample, name) == getattr(whole, name)
    for name in ("tokens", "loss_mask", "weight_version", "rollout_logprobs"):
        assert np.array_equal(getattr(sample, name), getattr(whole, name), equal_nan=name == "rollout_logprobs")
    assert np.array_equal(sample.recorded, whole.routes.recorded)
    assert sample.routes.equal(whole.routes)
    assert sample.routes_read
    assert sample.routes is sample.routes
    assert pickle.loads(pickle.dumps(sample)).routes_read
    sample.release()
    assert not sample.routes_read
    assert sample.whole().routes.equal(whole.routes)


def test_a_sample_reads_its_layers_and_tokens_alone(own: ShardStore) -> None:
    """What is damaged in another layer is not seen; in its own it is, by name, when the routes are read."""
    whole = own.open("p0.0")
    damage(own, "p0.0", whole.routes.ids[2].tobytes())
    key = str(own.path_of("p0.0"))
    first = LazySample.of_shard(key, layers=(1, 2))
    assert first.routes.equal(whole.routes.layers([0, 1]))
    part = first.part(layers=(2,), tokens=slice(2, 5))
    assert (part.layers, part.routes_read) == ((2,), False)
    assert part.held is not None
    assert part.held.nonzero()[0].tolist() == [2, 3, 4]
    assert np.array_equal(part.routes.ids[0, 2:5], whole.routes.ids[1, 2:5])
    assert not part.routes.ids[0, 5:].any()
    assert isinstance(part, PartialSample)
    last = first.part(layers=(3,))
    with pytest.raises(ShardError, match="damaged") as error:
        _ = last.routes
    assert "p0.0" in str(error.value.where)
    with pytest.raises(SampleError, match="no routes of such layers"):
        first.part(layers=(0,))
    assert LazySample.read(own, "p0.0", (1,)).routes.equal(whole.routes.layers([0]))
    assert not isinstance(LazySample.of(whole, (1,)), LazySample)


def damage(store: ShardStore, sample_id: str, content: bytes) -> None:
    path = store.path_of(sample_id)
    raw = bytearray(path.read_bytes())
    raw[raw.index(content)] ^= 1
    path.write_bytes(raw)


def test_other_routes_of_the_same_tokens_are_of_another_shard(own: ShardStore) -> None:
    """As after an update of the weights, sampled greedily."""
    rollout: dict[str, Any] = {"prompt_tokens": np.arange(4), "response_tokens": np.arange(8), "sample_id": "p0.0"}
    rollout["response_logprobs"] = -np.ones(8)
    own.replace(random_sample(np.random.default_rng(1), **rollout))
    sample = LazySample.read(own, "p0.0")
    own.replace(random_sample(np.random.default_rng(2), **rollout))
    for read in (lambda: sample.routes, sample.whole, sample.open, lambda: sample.part(layers=(2,)).routes):
        with pytest.raises(ShardError, match="replaced since its tokens were read"):
            read()


def test_a_shard_that_is_replaced_or_deleted_meanwhile(own: ShardStore) -> None:
    first, second = (LazySample.read(own, name) for name in ("p0.0", "p0.1"))
    own.path_of("p0.0").unlink()
    with pytest.raises(ShardError, match="no such shard"):
        _ = first.routes
    own.path_of("p0.1").unlink()
    own.add(random_sample(np.random.default_rng(99), num_tokens=10, sample_id="p0.1"), fsync=False)
    with pytest.raises(ShardError, match="replaced since its tokens were read"):
        _ = second.routes


@pytest.mark.engine
def test_routes_that_are_read_in_the_worker(store: ShardStore) -> None:
    [batch, *_] = batches(ShardIterableDataset(store, routes="read", layers=(2, 3)), 1)
    assert all(sample.routes_read and sample.layers == (2, 3) for sample in batch)
    assert batch[0].routes.equal(store.open(batch[0].sample_id).routes.layers([1, 2]))


def test_prefetched_samples(store: ShardStore) -> None:
    ahead = ShardIterableDataset(store, prefetch_bytes=10_000, group_size=SIZE)
    samples = list(ahead)
    assert ids(samples) == ids(ShardIterableDataset(store, group_size=SIZE))
    assert all(sample.routes_read for sample in samples)
    next(iter(ahead)).routes.check(SPEC)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("r3-prefetch")]


def test_a_store_in_memory() -> None:
    store = ShardStore("memory://data-test/run", create=True)
    add(store.step(3, create=True), "m")
    dataset = ShardIterableDataset(store, prefetch_bytes=10_000)
    samples = list(dataset)
    assert sorted(ids(samples)) == ["m.0", "m.1", "m.2", "m.3"]
    assert (
        samples[0].key == f"memory://data-test/run/step-000003/{samples[0].sample_id}.safetensors"
        or "://" in samples[0].key
    )
    assert samples[0].routes.equal(store.step(3).open(samples[0].sample_id).routes)
    assert pickle.loads(pickle.dumps(dataset)).num_samples == 4


# Resume ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, pytest.param(10_000, marks=pytest.mark.engine)])
def test_a_stream_goes_on_after_any_sample(ahead: int, store: ShardStore) -> None:
    snapshot = Snapshot.take(store, group_size=SIZE)

    def make() -> ShardIterableDataset:
        return ShardIterableDataset(snapshot, rank=1, world_size=3, prefetch_bytes=ahead)

    order = ids(make())
    for count in range(0, len(order) + 1, 3):
        dataset = make()
        assert ids(itertools.islice(dataset, count)) == order[:count]
        state = pickle.loads(pickle.dumps(dataset.state_dict()))
        again = make()
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert ids(again) == order[count:]
        assert ids(again) == order  # the next epoch is whole


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [ShardDataset, ShardIterableDataset])
def test_a_stateful_loader_goes_on(kind: Any, workers: int, own: ShardStore) -> None:
    dataset = kind(own)
    loader = batches(dataset, workers, 4)
    got = flat(itertools.islice(loader, 3))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    add(own, "later")  # a job goes on with the samples that it began with
    again = kind(snapshot_in(state))
    other = batches(again, workers, 4)
    other.load_state_dict(state)
    rest = flat(other)
    assert sorted(got + rest) == sorted(set(own.sample_ids()) - {f"later.{n}" for n in range(4)})
    again.set_epoch(1)
    assert sorted(flat(other)) == sorted(got + rest)


@pytest.mark.parametrize("kind", [ShardDataset, ShardIterableDataset])
def test_a_state_that_is_loaded_over_a_store_that_has_grown(kind: Any, own: ShardStore) -> None:
    dataset = kind(own)
    order = ids(dataset[i] for i in range(24)) if kind is ShardDataset else ids(dataset)
    state = kind(own).state_dict()
    add(own, "later")
    again = kind(own)
    again.load_state_dict({**state, "given": 0})
    assert (ids(again[i] for i in range(len(again))) if kind is ShardDataset else ids(again)) == order


@pytest.mark.engine
def test_the_state_is_where_the_samples_are(store: ShardStore) -> None:
    dataset = ShardIterableDataset(store)
    assert dataset.state_dict()["given"] == 0
    flat(itertools.islice(batches(dataset, 1), 2))
    with pytest.raises(ConfigError, match="it does not know how far they are"):
        dataset.state_dict()
    list(dataset)
    assert dataset.state_dict()["given"] == len(store)


@pytest.mark.engine
def test_a_grown_store_under_a_map_style_dataset_whose_state_was_not_loaded(own: ShardStore) -> None:
    loader = batches(ShardDataset(own), 1)
    next(iter(loader))
    state = loader.state_dict()
    add(own, "later")
    other = batches(ShardDataset(own), 1)
    other.load_state_dict(state)
    require_raises(other, ConfigError, "the store has grown since")


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_another_number_of_ranks(world_size: int, workers: int, own: ShardStore) -> None:
    """Twice: 2 ranks, then `world_size`, then 1, each stopped in the middle."""
    add(own, "p6")
    add(own, "p7")
    given: list[str] = []
    states: list[Any] = []

    def run(ranks: int, count: int | None, merged: Any) -> None:
        states.clear()
        for rank in range(ranks):
            dataset = ShardIterableDataset(own, rank=rank, world_size=ranks, group_size=SIZE, uneven="pad")
            if merged is not None:
                dataset.load_state_dict(merged)
            loader = batches(dataset, workers if ranks > 1 else 0)
            given.extend(flat(itertools.islice(loader, count)))
            states.append(loader.state_dict())

    run(2, 2, None)
    run(world_size, 1, merge_states(states))
    run(1, None, merge_states(states))
    assert sorted(given) == own.sample_ids()


def test_states_that_cannot_be_merged_or_loaded(store: ShardStore) -> None:
    def state(count: int, rank: int, **settings: Any) -> dict[str, Any]:
        dataset = ShardIterableDataset(store, rank=rank, world_size=2, **{"group_size": SIZE, **settings})
        list(itertools.islice(dataset, count))
        return dataset.state_dict()

    merged = merge_states([state(8, 1), state(4, 0)])
    assert states_in([{"a": (merged,)}]) == [merged]
    for states, message in (
        ([state(4, 0)], "all ranks and workers are needed"),
        ([state(4, 0), state(4, 0)], "all ranks and workers are needed"),
        ([state(4, 0), state(5, 1)], "in the middle of a group"),
        ([state(4, 0), state(4, 1, seed=1)], "states of different seed"),
        ([state(4, 0), state(4, 1, group_size=None)], "states of different digest"),
        ([merged], "need not be merged again"),
        ([{}], "no state of a dataset"),
        ([{"_steps_since_snapshot": 2}], "some steps behind"),
        ([ShardDataset(store).state_dict()], "does not know how many"),
    ):
        with pytest.raises(ConfigError, match=message):
            merge_states(states)
    for settings, message in (
        ({"rank": 0, "world_size": 2}, "another data-parallel rank"),
        ({"rank": 1, "world_size": 3}, "another data-parallel rank"),
        ({"rank": 1, "world_size": 2, "seed": 4}, "another seed"),
        ({"rank": 1, "world_size": 2, "uneven": "pad"}, "another uneven"),
    ):
        with pytest.raises(ConfigError, match=message):
            ShardIterableDataset(store, group_size=SIZE, **settings).load_state_dict(state(4, 1))
    with pytest.raises(ConfigError, match="not the state of a dataset"):
        ShardDataset(store).load_state_dict({"epoch": 1})
    with pytest.raises(ConfigError, match="cannot begin in the middle"):
        ShardDataset(store).load_state_dict(ShardDataset(store).state_dict(given=4))


@pytest.mark.engine
def test_another_number_of_workers_and_another_epoch(store: ShardStore) -> None:
    dataset = ShardIterableDataset(store)
    list(itertools.islice(dataset, 4))
    state = dataset.state_dict()
    again = ShardIterableDataset(store)
    again.load_state_dict(state)
    require_raises(DataLoader(again, batch_size=4, num_workers=1, collate_fn=list), ConfigError, "another worker")
    other = ShardIterableDataset(store)
    other.set_epoch(1)
    other.load_state_dict(state)
    with pytest.raises(ConfigError, match="in the middle of another epoch"):
        list(other)


def test_the_map_style_is_dealt_anew_from_what_was_given(store: ShardStore) -> None:
    first = [ShardDataset(store, rank=rank, world_size=2) for rank in range(2)]
    got = [dataset[i].sample_id for dataset in first for i in range(8)]
    merged = merge_states([dataset.state_dict(given=8) for dataset in first])
    later = [ShardDataset(store, rank=rank, world_size=4) for rank in range(4)]
    for dataset in later:
        dataset.load_state_dict(merged)
    assert [len(dataset) for dataset in later] == [8] * 4
    assert sorted(got + [sample.sample_id for dataset in later for sample in dataset]) == store.sample_ids()
    later[0].set_epoch(1)
    assert len(later[0]) == 12


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(own: ShardStore) -> ShardStore:
    """One shard whose tokens are damaged, which its head does not show."""
    path = own.path_of("p2.1")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    return own


@pytest.mark.parametrize("kind", [ShardDataset, ShardIterableDataset])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_damaged_shard_raises_by_name(kind: Any, workers: int, damaged: ShardStore) -> None:
    require_raises(batches(kind(damaged), workers), ShardError, r"p2\.1")


@pytest.mark.parametrize("ahead", [0, 10_000])
def test_a_single_rank_leaves_a_damaged_unit_out(ahead: int, damaged: ShardStore) -> None:
    dataset = ShardIterableDataset(damaged, bad="skip", group_size=SIZE, prefetch_bytes=ahead)
    with pytest.warns(R3Warning, match=r"left out: .*p2\.1"):
        got = ids(dataset)
    assert sorted(got) == [name for name in damaged.sample_ids() if not name.startswith("p2")]
    assert dataset.state_dict()["given"] == 24


def test_several_ranks_give_as_many_and_say_in_whose_place(damaged: ShardStore) -> None:
    got = []
    for rank in range(2):
        dataset = ShardIterableDataset(damaged, rank=rank, world_size=2, bad="skip", group_size=SIZE)
        with pytest.warns(R3Warning, match="given again") if rank == owner(damaged) else nothing():
            got.append(list(dataset))
    assert [len(share) for share in got] == [12, 12]
    substitutes = [sample for share in got for sample in share if sample.instead_of]
    assert len(substitutes) == SIZE
    assert all("p2.1" in sample.instead_of for sample in substitutes)
    assert len({sample.group_id for sample in substitutes}) == 1


class nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def owner(store: ShardStore) -> int:
    dataset = ShardDataset(store, rank=0, world_size=2, group_size=SIZE)
    units = dataset.deal.shares[0]
    assert dataset.snapshot is not None
    return 0 if any(dataset.snapshot.units[unit].name == "0|p2" for unit in units) else 1


def test_a_substitute_of_a_share_that_is_gone_on_with(damaged: ShardStore) -> None:
    """The damaged unit is the last one: only what was given out before the resume can stand in."""
    snapshot, rank = Snapshot.take(damaged, bad="skip", group_size=SIZE), owner(damaged)
    for seed in itertools.count():
        dataset = ShardIterableDataset(snapshot, rank=rank, world_size=2, seed=seed)
        if snapshot.units[dataset.deal.shares[rank][-1]].name == "0|p2":
            break
    before = ids(itertools.islice(dataset, 2 * SIZE))
    again = ShardIterableDataset(snapshot, rank=rank, world_size=2, seed=seed)
    again.load_state_dict(dataset.state_dict())
    with pytest.warns(R3Warning, match="given again"):
        rest = list(again)
    assert [sample.sample_id for sample in rest] == before[SIZE:]
    assert all("p2.1" in sample.instead_of for sample in rest)


def test_a_share_of_which_nothing_can_be_read(own: ShardStore) -> None:
    for name in own.sample_ids():
        path = own.path_of(name)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    with pytest.raises(StoreError, match="no shard of a rank's share can be read"):
        list(ShardIterableDataset(own, rank=0, world_size=2, bad="skip"))


@pytest.mark.parametrize("ahead", [0, 10_000])
def test_a_copy_under_another_name_is_not_a_second_sample(ahead: int, own: ShardStore) -> None:
    own.path_of("p9.0").write_bytes(own.path_of("p0.0").read_bytes())
    for dataset in (ShardDataset(own), ShardIterableDataset(own, prefetch_bytes=ahead)):
        with pytest.raises(ShardError, match=r"p9\.0\.safetensors: a shard under another sample's name"):
            list(dataset)
    snapshot = Snapshot.take(own, bad="skip")
    assert list(snapshot.report.bad) == [str(own.path_of("p9.0"))]
    assert snapshot.num_samples == 24


def test_a_map_style_substitute(damaged: ShardStore) -> None:
    dataset = ShardDataset(damaged, bad="skip", shuffle=False)
    with pytest.warns(R3Warning, match=r"p2\.2.*given in its place.*p2\.1"):
        sample = dataset[damaged.sample_ids().index("p2.1")]
    assert (sample.sample_id, "p2.1" in sample.instead_of) == ("p2.2", True)
    with pytest.raises(ShardError, match=r"p2\.1"):
        list(ShardDataset(damaged, bad="skip", group_size=SIZE))


# Following ------------------------------------------------------------------------------------------------------------


def filling(store: ShardStore, groups: list[str], done: threading.Event) -> threading.Thread:
    """Writes the samples of these groups one after the other, those of a group apart from each other."""

    def fill() -> None:
        rng = np.random.default_rng(1)
        for number in range(SIZE):
            for group in groups:
                sample = random_sample(rng, num_tokens=9, sample_id=f"{group}.{number}", group_id=group)
                store.add(sample, fsync=False)
                time.sleep(0.001)
        done.set()

    thread = threading.Thread(target=fill)
    thread.start()
    return thread


@pytest.mark.parametrize("ahead", [0, 10_000])
@pytest.mark.parametrize("expected", [True, False])
def test_a_store_that_is_being_filled(expected: bool, ahead: int, tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    groups = [f"g{i}" for i in range(7)]
    done = threading.Event()
    follow = Follow(done.is_set, expected=groups if expected else None, poll_s=0.002)
    datasets = [
        ShardIterableDataset(
            store, rank=rank, world_size=2, group_size=SIZE, follow=follow, prefetch_bytes=ahead, uneven="pad"
        )
        for rank in range(2)
    ]
    writer = filling(store, groups, done)
    got = [ids(dataset) for dataset in datasets]
    writer.join()
    assert len(got[0]) == len(got[1])
    assert set(got[0] + got[1]) == set(store.sample_ids())
    padded = sum(dataset.follower.padded for dataset in datasets if dataset.follower is not None)
    assert len(got[0] + got[1]) == len(store) + padded * SIZE
    assert padded % 2 == 1  # 7 groups for 2 ranks
    assert not expected or padded == 1
    for share in got:
        assert all(len({one.partition(".")[0] for one in share[i : i + SIZE]}) == 1 for i in range(0, len(share), SIZE))


def test_a_stream_that_follows_goes_on_and_on_other_ranks(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    groups = [f"g{i}" for i in range(8)]

    def make(rank: int, ranks: int, total: int = 8 * SIZE, **options: Any) -> ShardIterableDataset:
        follow = Follow(total, expected=groups, poll_s=0.002)
        return ShardIterableDataset(store, rank=rank, world_size=ranks, group_size=SIZE, follow=follow, **options)

    for group in groups[:5]:
        add(store, group)
    first = [make(rank, 2) for rank in range(2)]
    got = [ids(itertools.islice(dataset, SIZE)) for dataset in first]
    states = [dataset.state_dict() for dataset in first]
    for group in groups[5:]:
        add(store, group)
    again = [make(rank, 2) for rank in range(2)]
    for dataset, state in zip(again, states, strict=True):
        dataset.load_state_dict(state)
    rest = [ids(dataset) for dataset in again]
    assert [len(share) for share in rest] == [12, 12]
    assert sorted(itertools.chain(*got, *rest)) == store.sample_ids()
    merged = merge_states(states)
    other = [make(rank, 3) for rank in range(3)]
    for dataset in other:
        dataset.load_state_dict(merged)
    shares = [ids(dataset) for dataset in other]
    assert sorted(itertools.chain(*got, *shares)) == store.sample_ids()
    assert [len(share) for share in shares] == [8, 8, 8]
    halfway = make(0, 2)
    list(itertools.islice(halfway, 2))
    with pytest.raises(ConfigError, match="in the middle of a group"):
        make(0, 2).load_state_dict(halfway.state_dict())
    with pytest.raises(ConfigError, match="not exchangeable"):
        ShardIterableDataset(store, rank=0, world_size=2).load_state_dict(states[0])


def test_a_share_that_has_only_what_others_have_is_filled_up_once_over_a_resume(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    add(store, "g0", 1)

    def make() -> ShardIterableDataset:
        follow = Follow(1, expected=["g0.0"], poll_s=0.002)
        return ShardIterableDataset(store, rank=1, world_size=2, follow=follow, uneven="pad")

    dataset = make()
    assert ids(itertools.islice(dataset, 1)) == ["g0.0"]
    again = make()
    again.load_state_dict(dataset.state_dict())
    assert ids(again) == []


@pytest.mark.engine
def test_following_with_workers(own: ShardStore) -> None:
    dataset = ShardIterableDataset(own, follow=Follow(24, poll_s=0.01), uneven="pad", group_size=SIZE)
    assert set(flat(batches(dataset, 2))) == set(own.sample_ids())


def test_following_refuses(own: ShardStore) -> None:
    def run(follow: Follow, **options: Any) -> list[str]:
        return ids(ShardIterableDataset(own, follow=follow, **options))

    with pytest.raises(StoreError, match=r"no new sample for 0\.02 s") as error:
        run(Follow(25, poll_s=0.005, timeout_s=0.02))
    assert (error.value.expected, error.value.got) == (25, "24 samples")
    with pytest.raises(ConfigError, match="cannot be left out afterwards"):
        run(Follow(24), uneven="drop")
    with pytest.raises(ConfigError, match="not of one length"):
        run(Follow(24), rank=0, world_size=5)
    with pytest.raises(StoreError, match="was not expected"):
        run(Follow(24, expected=["p0"]), group_size=SIZE)
    with pytest.raises(ConfigError, match="a snapshot does not grow"):
        ShardIterableDataset(Snapshot.take(own), follow=Follow(24))
    own.path_of("p3.3").unlink()
    with pytest.raises(StoreError, match="1 of 1 groups do not have 4"):
        run(Follow(lambda: True), group_size=SIZE)
    dataset = ShardIterableDataset(own, follow=Follow(lambda: True), group_size=SIZE, incomplete="drop")
    assert len(ids(dataset)) == 20
    assert dataset.follower is not None
    assert dataset.follower.report.incomplete == {"0|p3": 3}


def test_a_follower_that_nobody_reads_any_more_ends(own: ShardStore) -> None:
    stream: Iterator[LazySample] = iter(
        ShardIterableDataset(own, follow=Follow(10**6, poll_s=600.0), prefetch_bytes=1000)
    )
    assert len(list(itertools.islice(stream, 24))) == 24  # and now a thread waits for more
    close: Callable[[], None] = stream.close  # type: ignore[attr-defined]
    time.sleep(0.1)
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("r3-prefetch")]
