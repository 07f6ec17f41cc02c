"""The capturer, its snapshots and its layouts: what one step routed, whole, in place, and out of reach of the next."""

from __future__ import annotations

import pickle
import queue
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3 import RoutingSpec
from r3.errors import CaptureError
from r3.rollout.capture import BatchLayout, RoutePool, RoutingCapturer
from r3.testing import random_rows

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2, model_type="qwen3_moe")
WIDE = RoutingSpec(num_layers=2, moe_layers=(0, 1), num_experts=384, top_k=2, model_type="kimi_k2")


def rows_of(spec: RoutingSpec, num_rows: int, seed: int = 0) -> np.ndarray:
    return random_rows(np.random.default_rng(seed), spec, num_rows)


def run(capturer: RoutingCapturer, rows: np.ndarray, layers: tuple[int, ...] | None = None) -> None:
    """What a forward does: each layer reports its ids, in int64, as torch.topk gives them."""
    for layer in capturer.spec.moe_layers if layers is None else layers:
        ids = torch.from_numpy(rows[:, capturer.spec.moe_layers.index(layer)].astype(np.int64))
        capturer.capture(layer, ids)


def capturer_of(spec: RoutingSpec = SPEC, **options) -> RoutingCapturer:
    return RoutingCapturer(spec, max_tokens=32, device="cpu", **options)


@pytest.mark.parametrize("spec", [SPEC, WIDE])
@pytest.mark.parametrize("dtype", [None, torch.int32])
def test_a_step_comes_out_as_it_was_routed_in_the_narrowest_dtype(spec: RoutingSpec, dtype) -> None:
    capturer, rows = capturer_of(spec, dtype=dtype), rows_of(spec, 9)
    capturer.begin_step(9)
    run(capturer, rows)
    host = capturer.snapshot(torch.arange(9)).to_host().result()
    assert host.rows.dtype == (spec.dtype if dtype is None else np.int32)
    assert np.array_equal(host.rows, rows)
    assert np.array_equal(host.slots, np.arange(9))
    assert host.generations is None


def test_inactive_is_a_no_op() -> None:
    """Outside a step nothing is checked and nothing kept: not a layer that does not exist, not ids of any shape."""
    capturer = capturer_of()
    assert not capturer.active
    capturer.capture(99, torch.zeros(5))
    assert capturer.snapshot() is None
    assert RoutePool(4, SPEC).commit(capturer.snapshot()) == 0
    capturer.begin_step(3)
    assert capturer.active
    run(capturer, rows_of(SPEC, 3))
    assert capturer.snapshot() is not None
    assert not capturer.active
    assert capturer.snapshot() is None


def test_a_dummy_run_gives_no_snapshot_and_leaves_nothing_behind() -> None:
    capturer, rows = capturer_of(), rows_of(SPEC, 4)
    capturer.begin_step(8)
    run(capturer, rows_of(SPEC, 8, seed=1), layers=(1,))  # profiling may run a part of the layers
    assert capturer.snapshot(dummy=True) is None
    capturer.begin_step(4)
    run(capturer, rows)
    assert np.array_equal(capturer.snapshot().to_host().result().rows, rows)


def test_a_layer_that_did_not_fire_is_named_and_the_next_step_is_whole() -> None:
    capturer = capturer_of()
    for seed in range(2):  # the buffer holds a whole earlier step when a layer is missing
        rows = rows_of(SPEC, 5, seed)
        capturer.begin_step(5)
        run(capturer, rows)
        assert np.array_equal(capturer.snapshot().to_host().result().rows, rows)
        capturer.begin_step(5)
        run(capturer, rows_of(SPEC, 5, seed=9), layers=(1, 3))
        with pytest.raises(CaptureError, match="layer 2: 1 of 3 layers did not capture in this step"):
            capturer.snapshot()


def test_a_layer_out_of_range_is_an_index_error_that_names_the_range() -> None:
    capturer, ids = capturer_of(), torch.zeros((3, 2), dtype=torch.int64)
    capturer.begin_step(3)
    for layer in (4, -1):
        with pytest.raises(
            IndexError, match=rf"layer {layer}: .*\n.*expected 0..3, of which \[1, 2, 3\] route"
        ) as raised:
            capturer.capture(layer, ids)
        assert isinstance(raised.value, CaptureError)
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), IndexError)
    with pytest.raises(CaptureError, match="layer 0: a layer that does not route by the spec captures"):
        capturer.capture(0, ids)
    capturer.capture(1, ids)
    with pytest.raises(CaptureError, match="layer 1: a layer captured twice in one step"):
        capturer.capture(1, ids)


@pytest.mark.parametrize(
    "ids",
    [torch.zeros((3, 3), dtype=torch.int64), torch.zeros(6, dtype=torch.int64), torch.zeros((3, 2))],
)
def test_what_are_no_ids_is_refused(ids: torch.Tensor) -> None:
    capturer = capturer_of()
    capturer.begin_step(3)
    with pytest.raises(CaptureError, match=r"layer 1: what a layer reported are not its experts' ids"):
        capturer.capture(1, ids)


@pytest.mark.parametrize(("spec", "bad"), [(SPEC, 8), (SPEC, 260), (SPEC, -1), (WIDE, 384), (WIDE, 65536 + 3)])
def test_ids_of_physical_experts_are_found_when_the_step_ends(spec: RoutingSpec, bad: int) -> None:
    """260 is 4 and 65539 is 3 once they are narrowed: the check is before that."""
    capturer, rows = capturer_of(spec), rows_of(spec, 4).astype(np.int64)
    rows[2, 1, 0] = bad
    capturer.begin_step(4)
    run(capturer, rows)
    pending = capturer.snapshot().to_host()
    with pytest.raises(
        CaptureError, match=rf"layer {spec.moe_layers[1]}: 1 layers selected experts that do not exist"
    ) as error:
        pending.result()
    assert str(bad) in str(error.value)


def test_capture_detaches_and_copies() -> None:
    """What the router does with its ids afterwards (an in-place map, a backward) is its own business."""
    capturer = capturer_of()
    rows = rows_of(SPEC, 3)
    capturer.begin_step(3)
    scores = torch.rand(3, 8, requires_grad=True)
    values, _ = scores.softmax(-1).topk(2)
    for position, layer in enumerate(SPEC.moe_layers):
        ids = torch.from_numpy(rows[:, position].astype(np.int64))
        capturer.capture(layer, ids)
        ids.fill_(7)
    values.sum().backward()
    step = capturer.snapshot()
    assert not step.rows.requires_grad
    assert np.array_equal(step.to_host().result().rows, rows)


def test_nothing_is_captured_into_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured, the copy would be recorded and run in every replay. Here only the question is stood in for."""
    capturer = capturer_of()
    capturer.begin_step(3)
    capturer.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(capturer, rows_of(SPEC, 3))
    with pytest.raises(CaptureError, match=r"layer 1: 3 of 3 layers did not capture.*\n.*\n.*CUDA graph"):
        capturer.snapshot()


def test_a_replayed_graph_is_captured_from_its_static_buffers() -> None:
    """The recipe of docs/capture.md. A replay runs what was recorded, at the recorded size, and no Python."""
    capturer, size = capturer_of(), 8
    static_input = torch.zeros((size, 16))
    weights = [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    static_ids = [torch.zeros((size, 2), dtype=torch.int64) for _ in weights]

    def replay() -> None:
        for weight, ids in zip(weights, static_ids, strict=True):
            ids.copy_((static_input @ weight).topk(2).indices)

    for num_rows in (8, 5, 3):
        hidden = torch.randn(num_rows, 16)
        static_input[:num_rows] = hidden
        capturer.begin_step(num_rows, BatchLayout.padded(num_rows, size))
        replay()
        for layer, ids in zip(SPEC.moe_layers, static_ids, strict=True):
            capturer.capture(layer, ids)
        step = capturer.snapshot()
        static_input.zero_()
        replay()  # the next step
        expected = torch.stack([(hidden @ weight).topk(2).indices for weight in weights], 1)
        assert np.array_equal(step.to_host().result().rows, expected.numpy())


def test_a_step_that_does_not_fit_is_refused() -> None:
    capturer = capturer_of()
    with pytest.raises(CaptureError, match="at most 32"):
        capturer.begin_step(33)
    with pytest.raises(CaptureError, match="5 rows by the layout"):
        capturer.begin_step(5, BatchLayout.local(6))
    capturer.begin_step(5)
    run(capturer, rows_of(SPEC, 5))
    with pytest.raises(CaptureError, match=r"slots are not those of the step's rows\n  expected integers \[5\]"):
        capturer.snapshot(torch.arange(8))
    with pytest.raises(CaptureError, match=r"torch.uint8 or torch.int32"):
        capturer_of(dtype=torch.int16)


def test_a_forward_that_failed_is_forgotten() -> None:
    capturer, rows = capturer_of(), rows_of(SPEC, 4)
    capturer.begin_step(6)
    run(capturer, rows_of(SPEC, 6, seed=3), layers=(1, 2))
    capturer.begin_step(4)
    run(capturer, rows)
    assert np.array_equal(capturer.snapshot().to_host().result().rows, rows)


@pytest.mark.parametrize("dtype", [None, torch.int32])
def test_torture_later_steps_never_tear_a_snapshot(dtype: torch.dtype | None) -> None:
    """300 steps of one capturer and one slot mapping, both written again at once; copies to the host happen in other threads,
    up to 40 steps late and out of order. Every one must still be its own step."""
    capturer, rng, choose = capturer_of(dtype=dtype), np.random.default_rng(0), random.Random(0)
    mapping = torch.zeros(32, dtype=torch.int64)
    held: list = []
    results: queue.Queue = queue.Queue()

    def copy(number: int, step) -> None:
        results.put((number, step.to_host().result()))

    expected, threads = {}, []
    for number in range(300):
        num_rows = int(rng.integers(0, 33))
        rows, slots = random_rows(rng, SPEC, num_rows), rng.integers(1, 1000, num_rows)
        expected[number] = (rows, slots)
        mapping[:num_rows] = torch.from_numpy(slots)
        capturer.begin_step(num_rows)
        run(capturer, rows)
        held.append((number, capturer.snapshot(mapping[:num_rows])))
        while len(held) > 40 or (held and number == 299):
            thread = threading.Thread(target=copy, args=held.pop(choose.randrange(len(held))))
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join()
    assert results.qsize() == 300
    for _ in range(300):
        number, host = results.get()
        assert np.array_equal(host.rows, expected[number][0]), number
        assert np.array_equal(host.slots, expected[number][1]), number


def test_async_output_pass_through() -> None:
    """An engine's asynchronous output: the pending copy goes through a queue to another thread, which waits for it there."""
    capturer, pool = capturer_of(), RoutePool(64, SPEC)
    outputs: queue.Queue = queue.Queue()
    slots = torch.arange(1, 5)
    tags = pool.allocate(slots)
    rows = rows_of(SPEC, 4)

    def publish() -> None:
        while (pending := outputs.get()) is not None:
            pool.commit(pending)

    thread = threading.Thread(target=publish)
    thread.start()
    capturer.begin_step(4)
    run(capturer, rows)
    outputs.put(capturer.snapshot(slots, generations=torch.from_numpy(tags)).to_host())
    capturer.begin_step(4)
    run(capturer, rows_of(SPEC, 4, seed=1))
    assert capturer.snapshot(dummy=True) is None
    outputs.put(None)
    thread.join()
    assert np.array_equal(pool.gather(slots, tags).numpy(), rows)


# Layouts


def as_seen(rows: np.ndarray, before: int, after: int, seed: int = 7) -> np.ndarray:
    """A router's batch: other rows around these."""
    spec = SPEC
    return np.concatenate([rows_of(spec, before, seed), rows, rows_of(spec, after, seed + 1)])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=4), st.data())
def test_every_rank_finds_its_own_rows_in_a_gathered_batch(sizes, data) -> None:
    """Against a loop: rank by rank, its tokens and then its padding."""
    counts, spans = [n for n, _ in sizes], [n + pad for n, pad in sizes]
    rank = data.draw(st.integers(0, len(sizes) - 1))
    batch = [(r, i if i < counts[r] else None) for r in range(len(sizes)) for i in range(spans[r])]
    layout = BatchLayout.gathered(counts, rank, spans)
    assert [*batch[layout.select(len(batch), 0)]] == [(rank, i) for i in range(counts[rank])]


@pytest.mark.parametrize(
    ("layout", "before", "after"),
    [
        (BatchLayout.local(5), 0, 0),
        (BatchLayout.padded(5, 8), 0, 3),
        (BatchLayout.gathered([4, 5, 6], 1), 4, 6),
        (BatchLayout.gathered([4, 5, 6], 1, [8, 8, 8]), 8, 11),
        (BatchLayout.gathered([4, 5], 1), 4, 0),
    ],
)
def test_exact_row_selection(layout: BatchLayout, before: int, after: int) -> None:
    rows = rows_of(SPEC, 5)
    capturer = capturer_of()
    capturer.begin_step(5, layout)
    run(capturer, as_seen(rows, before, after))
    assert np.array_equal(capturer.snapshot().to_host().result().rows, rows)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (BatchLayout.local(5), r"5 rows \(local: \[5\] rows, of which rows 0..4 are kept for 5 tokens\)"),
        (BatchLayout.padded(5, 8), r"8 rows \(padded: \[5, 3\] rows"),
        (BatchLayout.gathered([4, 5, 6], 1), r"15 rows \(gathered: \[4, 5, 6\] rows, of which rows 4..8"),
        (BatchLayout.sharded(5, 1, 2), r"3 rows \(sharded: \[3, 3\] rows"),
    ],
)
def test_misaligned_rows_are_refused_with_all_sizes(layout: BatchLayout, sizes: str) -> None:
    capturer = capturer_of()
    capturer.begin_step(5, layout)
    with pytest.raises(CaptureError, match=rf"layer 1, layout {layout.kind}: .*\n  expected {sizes}.*, got 7"):
        run(capturer, rows_of(SPEC, 7))


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(CaptureError, match="rows of a batch do not hold its tokens"):
        BatchLayout.padded(5, 4)
    with pytest.raises(CaptureError, match="rows of a batch do not hold its tokens"):
        BatchLayout.gathered([4, 5], 0, [4, 4])
    with pytest.raises(CaptureError, match=r"rank in 0..1, got 2"):
        BatchLayout.gathered([4, 5], 2)
    with pytest.raises(CaptureError, match="shards are not those of the group"):
        BatchLayout.sharded(5, 2, 2)
    with pytest.raises(CaptureError, match="rows of a batch do not hold its tokens"):
        BatchLayout.sharded(5, 0, 2, sizes=[2, 2])


def test_the_engine_of_the_documentation() -> None:
    """Every row that it returns is that of a forward of the whole sequence; shared ones were captured in the first request."""
    text = (Path(__file__).parent.parent / "docs" / "capture.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    made: dict = {"__name__": "documented"}
    exec(compile(found.group(1), "docs/capture.md", "exec"), made)
    engine = made["engine"]
    pool, capturer = engine.pool, engine.capturer
    assert pool.misaligned == pool.late == pool.misdirected == 0
    for tokens, routes in (made["first"], made["second"]):
        assert routes.recorded.tolist() == [True] * (len(tokens) - 1) + [False]
        alone, slots = torch.zeros(len(tokens) + 1, 32), list(range(1, len(tokens)))
        with torch.no_grad():
            capturer.begin_step(len(slots))
            engine.model(torch.tensor(tokens[:-1]), alone, slots, [slots[: i + 1] for i in range(len(slots))])
        whole = capturer.snapshot().to_host().result().rows
        assert np.array_equal(routes.ids[:, :-1], whole.transpose(1, 0, 2))
    assert np.array_equal(made["first"][1].ids[:, :4], made["second"][1].ids[:, :4])
    assert len(engine.free) == 256 - 7  # five slots of the first prompt, and two that the second one did not share
    engine.binding.unbind()
