"""The pool by KV slot, what it costs, and the KV group whose slots it goes by."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from r3 import RoutingSpec
from r3.errors import CaptureError
from r3.rollout.capture import HostRoutes, RoutePool, RoutingCapturer, full_attention_group, memory
from r3.rollout.capture.memory import TAG_BYTES, attention_kv_bytes, latent_kv_bytes
from r3.testing import random_rows

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2, model_type="qwen3_moe")
WIDE = RoutingSpec(num_layers=2, moe_layers=(0, 1), num_experts=384, top_k=2, model_type="kimi_k2")


def rows_of(num_rows: int, seed: int = 0, spec: RoutingSpec = SPEC) -> np.ndarray:
    return random_rows(np.random.default_rng(seed), spec, num_rows)


@pytest.mark.parametrize("spec", [SPEC, WIDE])
def test_store_and_gather(spec: RoutingSpec) -> None:
    """Any slots in any order, rows as arrays or tensors; what comes out is a copy."""
    pool, rows = RoutePool(20, spec), rows_of(5, spec=spec)
    slots = [7, 20, 1, 3, 12]
    tags = pool.allocate(slots)
    assert pool.store(slots, rows) == 5
    got = pool.gather(slots, tags)
    assert got.numpy().dtype == spec.dtype
    assert np.array_equal(got.numpy(), rows)
    assert np.array_equal(pool.gather([3, 7], tags[[3, 0]]).numpy(), rows[[3, 0]])
    got.zero_()
    pool.store(torch.tensor([12]), torch.from_numpy(rows[:1].astype(np.int64)))  # wide rows are narrowed
    assert np.array_equal(pool.gather(slots, tags).numpy(), rows[[0, 1, 2, 3, 0]])


def test_store_layer_by_layer() -> None:
    """A slot is a record when its last layer is written; writing the first again begins anew."""
    pool, rows, slots = RoutePool(8, SPEC), rows_of(3), [2, 5, 6]
    tags = pool.allocate(slots)
    for position, layer in enumerate(SPEC.moe_layers):
        assert not pool.recorded(slots, tags).any()
        pool.store_layer(layer, slots, rows[:, position])
    assert np.array_equal(pool.gather(slots, tags).numpy(), rows)
    pool.store_layer(1, [5], rows[:1, 0])
    assert pool.recorded(slots, tags).tolist() == [True, False, True]
    with pytest.raises(CaptureError, match="slot 5, position 1: a slot has no record: 1 of 3 layers"):
        pool.gather(slots, tags)
    with pytest.raises(CaptureError, match="slot 5, layer 3: a layer is stored out of order"):
        pool.store_layer(3, [5], rows[:1, 2])
    with pytest.raises(CaptureError, match=r"layer 0: this layer does not route"):
        pool.store_layer(0, [5], rows[:1, 0])


def test_reserved_slot() -> None:
    """Padding, in whatever way an engine marks it, goes to row 0; nothing comes out of row 0, and nobody owns it."""
    pool, rows = RoutePool(8, SPEC), rows_of(4)
    tags = pool.allocate([3])
    assert pool.store([0, 3, -1, 0], rows) == 1
    assert pool.misdirected == 3
    assert np.array_equal(pool.gather([3], tags).numpy(), rows[1:2])
    for slot in (0, -1):
        with pytest.raises(CaptureError, match="slot 0, position 0: row 0 is reserved"):
            pool.gather([slot], pool.tags([slot]))
        with pytest.raises(CaptureError, match="row 0 is reserved: it cannot be allocated"):
            pool.allocate([slot])
    assert not pool.recorded([0], [0]).any()


def test_sizing() -> None:
    """[slots + 1, L, K] in the narrow dtype; the figure is what the pool really takes."""
    for spec, dtype in ((SPEC, torch.uint8), (WIDE, torch.uint16)):
        pool = RoutePool(100, spec)
        assert pool.rows.shape == (101, spec.num_moe_layers, spec.top_k)
        assert pool.rows.dtype == dtype
        figure = pool.memory(kv_bytes_per_token=1000)
        assert figure.bytes == pool.nbytes == 101 * (spec.bytes_per_token + TAG_BYTES)
        assert figure.share == figure.bytes_per_slot / 1000
    with pytest.raises(CaptureError, match=r"up to 101"):
        pool.store([101], rows_of(1, spec=WIDE))


def test_prefix_hit_retrieval() -> None:
    """A second request's shared tokens are never run again: their rows are those that the first one's forward wrote."""
    pool, prompt, first, second = RoutePool(40, SPEC), rows_of(8), rows_of(3, 1), rows_of(5, 2)
    a = np.arange(1, 12)
    pool.allocate(a)
    pool.store(a, np.concatenate([prompt, first]))
    shared, own = a[:8], np.arange(20, 25)
    b, b_tags = np.concatenate([shared, own]), np.concatenate([pool.tags(shared), pool.allocate(own)])
    pool.store(own, second)
    pool.free(a[8:])  # the first request ends; its prompt's slots stay, for they are shared
    assert np.array_equal(pool.gather(b, b_tags).numpy(), np.concatenate([prompt, second]))
    pool.free(shared)
    with pytest.raises(CaptureError, match="slot 1, position 0: a slot was freed, or given to another request"):
        pool.gather(b, b_tags)


def test_freed_and_reused_slots_never_leak() -> None:
    pool, slots = RoutePool(8, SPEC), [4, 5]
    old = pool.allocate(slots)
    pool.store(slots, rows_of(2))
    pool.free(slots)
    assert not pool.recorded(slots, pool.tags(slots)).any()  # a "prefix hit" on slots that are free
    new = pool.allocate(slots)
    assert not pool.recorded(slots, new).any()  # the former owner's rows are still in memory, and are no record
    for tags, what in ((old, "was freed, or given to another request"), (new, "has no record: 0 of 3 layers")):
        with pytest.raises(CaptureError, match=f"slot 4, position 0: a slot {what}"):
            pool.gather(slots, tags)
    assert pool.store(slots, rows_of(2, 1), old) == 0  # a step that ran for the former owner comes late
    assert pool.late == 2
    assert not pool.recorded(slots, new).any()
    pool.store(slots, rows_of(2, 2), new)
    assert np.array_equal(pool.gather(slots, new).numpy(), rows_of(2, 2))
    pool.flush()
    with pytest.raises(CaptureError, match="was freed, or given to another request"):
        pool.gather(slots, new)


def test_an_engine_that_only_gives_out_again() -> None:
    """`reused`: slots that were never said to be freed get a new generation all the same."""
    pool = RoutePool(8, SPEC)
    old = pool.allocate([1, 2], reused=True)
    pool.store([1, 2], rows_of(2))
    new = pool.allocate([2, 3], reused=True)
    assert pool.recorded([1, 2], old).tolist() == [True, False]
    assert not pool.recorded([2, 3], new).any()


def test_a_preempted_request_is_computed_again_elsewhere() -> None:
    """Its slots go, half written; the rows of the second run come out, of other slots and of one that it had before."""
    pool, rows = RoutePool(10, SPEC), rows_of(4)
    pool.allocate([1, 2, 3, 4])
    pool.store([1, 2], rows_of(2, 5))
    pool.free([1, 2, 3, 4])
    tags = pool.allocate([8, 2, 9, 7])
    pool.store([8, 2], rows[:2])
    with pytest.raises(CaptureError, match=r"slot 9, position 2: a slot has no record.*\n.*2 of 4 slots are such"):
        pool.gather([8, 2, 9, 7], tags)
    pool.store([9, 7], rows[2:])
    assert np.array_equal(pool.gather([8, 2, 9, 7], tags).numpy(), rows)


def test_capture_and_commit() -> None:
    capturer, pool = RoutingCapturer(SPEC, max_tokens=8, device="cpu"), RoutePool(8, SPEC)
    slots, rows = torch.tensor([3, 1, 6]), rows_of(3)
    tags = pool.allocate(slots)
    for commit in (lambda step: step, lambda step: step.to_host(), lambda step: step.to_host().result()):
        capturer.begin_step(3)
        for position, layer in enumerate(SPEC.moe_layers):
            capturer.capture(layer, torch.from_numpy(rows[:, position].astype(np.int64)))
        assert pool.commit(commit(capturer.snapshot(slots))) == 3
        assert np.array_equal(pool.gather(slots, tags).numpy(), rows)
        rows = rows[::-1].copy()
    with pytest.raises(CaptureError, match="a step without slots cannot be stored"):
        pool.commit(HostRoutes(rows, None, None))
    assert pool.commit(None) == 0


def test_misaligned_rows_are_counted_and_refused() -> None:
    pool, slots = RoutePool(8, SPEC), [1, 2, 3]
    tags = pool.allocate(slots)
    pool.store(slots, rows_of(3))
    for wrong in (rows_of(4, 1), rows_of(2, 1), rows_of(3, 1)[:, :2], rows_of(3, 1)[..., :1]):
        with pytest.raises(CaptureError, match=r"none of them is stored\n  expected \[3, 3, 2\], got"):
            pool.store(slots, wrong)
    with pytest.raises(CaptureError, match=r"none of them is stored\n  expected \[3, 2\]"):
        pool.store_layer(1, slots, rows_of(3)[:, 0, :1])
    assert pool.misaligned == 4 + 2 + 3 + 3 + 3
    assert np.array_equal(pool.gather(slots, tags).numpy(), rows_of(3))


def test_what_is_no_use_of_slots_is_refused() -> None:
    pool = RoutePool(8, SPEC)
    pool.allocate([1, 2])
    with pytest.raises(CaptureError, match="slot 2, position 1: a slot is allocated twice"):
        pool.allocate([3, 2])
    assert not pool.recorded([3], pool.tags([3])).any()
    pool.allocate([3])  # the refused call took nothing
    with pytest.raises(CaptureError, match="slot 4, position 0: a slot is freed that is not in use"):
        pool.free([4])
    with pytest.raises(CaptureError, match="slot 4, position 1: a row is stored in a slot that is not in use"):
        pool.store([1, 4], rows_of(2))
    with pytest.raises(CaptureError, match="a slot is named twice"):
        pool.allocate([5, 5])
    with pytest.raises(CaptureError, match="not one generation for each slot"):
        pool.gather([1, 2], [1])
    with pytest.raises(
        CaptureError, match=r"rows are not ids of experts\n  expected integers in 0..7, got torch.int64 in 0..9"
    ):
        pool.store([1], torch.tensor([[[0, 1], [2, 3], [4, 9]]]))
    with pytest.raises(CaptureError, match="not slots of the pool"):
        pool.gather(np.array([1.0]), [1])


def test_ten_thousand_random_operations_against_a_dictionary() -> None:
    """The pool of an engine at work: requests come, share prefixes, are preempted, end; steps commit late. A row that comes out
    is the one that was written for that request's token, or there is an error; the dictionary knows which."""
    pool, choose, rng = RoutePool(60, SPEC), random.Random(1), np.random.default_rng(1)
    free, truth = set(range(1, 61)), {}  # truth: (slot, generation) -> row
    live: list[tuple[list[int], list[int]]] = []
    references = dict.fromkeys(range(1, 61), 0)
    late: list[tuple[list[int], list[int], np.ndarray]] = []
    outcomes = {"whole": 0, "refused": 0}

    def release(slots: list[int]) -> None:
        gone = []
        for slot in slots:
            references[slot] -= 1
            if references[slot] == 0:
                gone.append(slot)
        pool.free(gone)
        free.update(gone)

    for _ in range(10_000):
        action = choose.random()
        if action < 0.15 and len(free) > 8:
            prefix = live[choose.randrange(len(live))] if live and choose.random() < 0.5 else ([], [])
            cut = choose.randrange(len(prefix[0]) + 1)
            own = choose.sample(sorted(free), choose.randrange(1, 8))
            free.difference_update(own)
            slots = prefix[0][:cut] + own
            tags = pool.tags(prefix[0][:cut]).tolist() + pool.allocate(own).tolist()
            for slot in slots:
                references[slot] += 1
            live.append((slots, tags))
        elif action < 0.45 and live:
            slots, tags = live[choose.randrange(len(live))]
            begin = choose.randrange(len(slots)) if choose.random() < 0.3 else 0
            late.append((slots[begin:], tags[begin:], random_rows(rng, SPEC, len(slots) - begin)))
        elif action < 0.75 and late:
            slots, tags, rows = late.pop(choose.randrange(len(late)) if choose.random() < 0.3 else -1)
            pool.store(slots, rows, tags)
            for slot, tag, row in zip(slots, tags, rows, strict=True):
                if pool.tags([slot])[0] == tag:
                    truth[slot, tag] = row
        elif action < 0.82 and live:
            release(live.pop(choose.randrange(len(live)))[0])
        elif live:
            slots, tags = live[choose.randrange(len(live))]
            known = [truth.get(key) for key in zip(slots, tags, strict=True)]
            assert pool.recorded(slots, tags).tolist() == [row is not None for row in known]
            if all(row is not None for row in known):
                assert np.array_equal(pool.gather(slots, tags).numpy(), np.stack(known))
                outcomes["whole"] += 1
            else:
                with pytest.raises(CaptureError, match="has no record"):
                    pool.gather(slots, tags)
                outcomes["refused"] += 1
    assert min(*outcomes.values(), pool.late) > 100, (outcomes, pool.late)


# The full-attention group


def test_the_full_attention_group_of_transformers_models() -> None:
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    plain = transformers.Qwen3MoeConfig(num_hidden_layers=4)
    assert full_attention_group(group_layers_by_attn_type(plain)) == 0
    hybrid = transformers.GptOssConfig(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    )
    pair = group_layers_by_attn_type(hybrid)
    assert pair[1][full_attention_group(pair)] == "full_attention"
    assert full_attention_group(pair) > 0
    windows = transformers.GptOssConfig(num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    with pytest.raises(
        CaptureError, match=r"no KV-cache group .* full attention.*\n.*got groups \['sliding_attention'\]"
    ):
        full_attention_group(group_layers_by_attn_type(windows))


def test_a_group_of_unknown_kind_is_not_taken_for_full_attention() -> None:
    """Fail-closed: only what says so is; a predicate must answer True, not something like it."""
    unknown = [SimpleNamespace(kv_cache_spec=SimpleNamespace()), SimpleNamespace(), "linear_attention"]
    with pytest.raises(CaptureError, match=r"\['SimpleNamespace', 'SimpleNamespace', 'linear_attention'\]"):
        full_attention_group(unknown)
    with pytest.raises(CaptureError):
        full_attention_group([])
    assert full_attention_group(unknown, is_full=lambda group: group == "linear_attention") == 2
    with pytest.raises(CaptureError):
        full_attention_group(unknown, is_full=lambda _group: 1)


@pytest.mark.engine
def test_the_full_attention_group_of_vllm() -> None:
    """vLLM's own classes; and where its own choice is not stricter, the same group."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import get_routed_experts_attn_gid
    from vllm.v1 import kv_cache_interface as kv

    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    full = kv.FullAttentionSpec(**sizes)
    latent = kv.MLAAttentionSpec(**sizes)
    window = kv.SlidingWindowSpec(**sizes, sliding_window=32)
    state = kv.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    several = kv.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full, "b": latent})
    mixed = kv.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full, "b": window})

    def config(*specs):
        groups = [kv.KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
        return kv.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)

    for specs, chosen in [
        ((full,), 0),
        ((state, full), 1),
        ((window, state, latent, full), 2),
        ((state, several), 1),
        ((mixed, full), 1),
    ]:
        assert full_attention_group(config(*specs)) == chosen == get_routed_experts_attn_gid(config(*specs))
        assert full_attention_group(config(*specs).kv_cache_groups) == chosen
    for specs, seen in [((state, window), "'MambaSpec', 'SlidingWindowSpec'"), ((mixed,), "FullAttentionSpec/Sliding")]:
        with pytest.raises(CaptureError, match=seen):
            full_attention_group(config(*specs))
        with pytest.raises(ValueError, match="requires a full-attention"):
            get_routed_experts_attn_gid(config(*specs))
    evicting = kv.RSWASpec(**sizes, rswa_window=32)  # evicts a request's own slots, and is a FullAttentionSpec to vLLM
    with pytest.raises(CaptureError, match="RSWASpec"):
        full_attention_group(config(evicting))


# The table of docs/capture.md

MODELS = [
    # spec (layers, MoE layers, experts, top-k), KV bytes per token in bfloat16, from the models' config.json
    ("Qwen3-30B-A3B", RoutingSpec(48, tuple(range(48)), 128, 8), attention_kv_bytes(48, kv_heads=4, head_dim=128)),
    ("DeepSeek-V3", RoutingSpec(61, tuple(range(3, 61)), 256, 8), latent_kv_bytes(61, 512, 64)),
    ("Kimi-K2", RoutingSpec(61, tuple(range(1, 61)), 384, 8), latent_kv_bytes(61, 512, 64)),
]
DOCS = Path(__file__).parent.parent / "docs" / "capture.md"


def table() -> str:
    lines = [
        "| model | ids a token, bytes | KV a token, bytes | pool of 1,000,000 slots | share of KV |",
        "|---|---|---|---|---|",
    ]
    for name, spec, kv in MODELS:
        figure = memory(spec, 1_000_000, kv)
        lines.append(
            f"| {name} | {spec.bytes_per_token} | {kv:,} | {figure.bytes / 1e6:,.0f} MB | {figure.share:.2%} |"
        )
    return "\n".join(lines)


def test_the_documents_table_is_what_the_function_says() -> None:
    found = re.search(r"\| model \| ids a token.*?(?=\n\n)", DOCS.read_text(), re.DOTALL)
    assert found is not None
    assert found.group() == table()


if __name__ == "__main__":
    print(table())
