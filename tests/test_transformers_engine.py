"""The transformers engine: its routes are those of a plain forward, each row its own token's, shared rows the first writer's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qwen
import torch
import transformers
import transformers_oracle
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

from r3 import ShardStore
from r3.errors import CaptureError, EngineError, PromptError
from r3.rollout.collector import collect_sync
from r3.rollout.prompts import Prompt, read_prompts
from r3.rollout.protocol import Sampling
from r3.rollout.transformers.engine import TransformersEngine
from r3.rollout.transformers.params import Params
from r3.rollout.transformers.requests import Output, Run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]


def together(engine: TransformersEngine, requests: Sequence[tuple[Sequence[int], Params, int | None]]) -> list[Output]:
    """Requests that are all there when the first batch is scheduled, so that batches do not depend on timing."""
    runs = engine.between_two_steps(lambda: [engine.submit(p, params, seed=seed) for p, params, seed in requests])
    return [run.future.result(timeout=1200) for run in runs]


def one(engine: TransformersEngine, prompt: Sequence[int], params: Params, seed: int | None = None) -> Output:
    return together(engine, [(prompt, params, seed)])[0]


def random_prompts(*lengths: int, vocabulary: int = 100, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    return [tokenizer(prompt.payload)["input_ids"] for prompt in read_prompts(tiny_model / "prompts.jsonl")[:24]]


@pytest.fixture
def small() -> Iterator[TransformersEngine]:
    """A random model in float32 whose layer 0 is dense."""
    with TransformersEngine(qwen.build(), num_blocks=64, block_size=8, max_batch_tokens=64) as engine:
        yield engine


# Equality


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_routes_are_those_of_a_plain_forward_but_for_ties(
    tiny_model: Path, prompts: list[list[int]], dtype: str, record_property: Callable[[str, object], None]
) -> None:
    with TransformersEngine(tiny_model, dtype=dtype, max_batch_tokens=256) as engine:
        outputs = together(engine, [(prompt, Params(0, max_tokens=48), None) for prompt in prompts])
        spec = engine.spec
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype).eval()
    logits: dict[int, torch.Tensor] = {}
    for layer in spec.moe_layers:
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda _m, _a, out, layer=layer: logits.__setitem__(layer, out[0].float()))
    rows = ties = 0
    worst, gap = 0.0, []
    for output in outputs:
        assert output.rows is not None
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        with torch.no_grad():
            plain = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        first = len(output.prompt_token_ids)
        gap.append(plain[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0] - torch.tensor(output.logprobs))
        for position, layer in enumerate(spec.moe_layers):
            scores = logits[layer][:-1]
            captured = torch.from_numpy(output.rows[:, position].astype(np.int64))
            differs = (captured.sort(1).values != scores.topk(spec.top_k).indices.sort(1).values).any(1)
            rows, ties = rows + len(differs), ties + int(differs.sum())
            # How far the least captured expert is below the plain forward's last choice, against the row's largest logit.
            short = scores.topk(spec.top_k).values[:, -1] - scores.gather(1, captured).min(1).values
            relative = short[differs] / scores[differs].abs().amax(1)
            worst = max(worst, float(relative.max()) if len(relative) else 0.0)
    record_property("rows", rows)
    record_property("near ties", ties)
    record_property("largest relative shortfall", worst)
    print(f"\n{dtype}: {ties} of {rows} (token, layer) differ, by at most {worst:.2g} of the largest router logit")
    assert rows == sum(len(o.prompt_token_ids) + len(o.token_ids) - 1 for o in outputs) * spec.num_moe_layers
    assert worst <= 4 * torch.finfo(getattr(torch, dtype)).eps
    assert ties <= 0.01 * rows
    error = torch.cat(gap).abs()
    assert float(error.max()) < {"float32": 1e-4, "bfloat16": 1.0}[dtype]
    assert float(error.mean()) < {"float32": 1e-6, "bfloat16": 0.02}[dtype]


def test_ids_are_those_of_transformers_own_manager_and_the_same_without_capture(
    prompts: list[list[int]], tiny_model: Path
) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()
    own = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(block_size=16, num_blocks=256, max_batch_tokens=256),
        progress_bar=False,
    )
    asked = [(prompt, Params(0, max_tokens=24), None) for prompt in prompts]
    seeded = [(prompt, Params(max_tokens=24, top_p=0.9), 7 + i) for i, prompt in enumerate(prompts)]
    found = []
    for capture in (True, False):
        with TransformersEngine(model, num_blocks=256, max_batch_tokens=256, capture=capture) as engine:
            found.append([*together(engine, asked), *together(engine, seeded)])
    on, off = found
    assert [o.token_ids for o in on[: len(prompts)]] == [each.generated_tokens for each in own.values()]
    assert [(o.token_ids, o.logprobs) for o in on] == [(o.token_ids, o.logprobs) for o in off]
    assert all(o.rows is not None for o in on)
    assert all(o.rows is None for o in off)


def test_a_seeded_request_is_the_same_in_any_company(small: TransformersEngine) -> None:
    mine, *others = random_prompts(20, 5, 17, 30)
    params = Params(temperature=1.2, top_p=0.95, max_tokens=20)
    alone = one(small, mine, params, 11)
    company = together(small, [(other, Params(), None) for other in others] + [(mine, params, 11)])[-1]
    another = one(small, mine, params, 12)
    assert alone.token_ids == company.token_ids
    assert alone.token_ids != another.token_ids


def test_log_probs_are_raw_and_of_the_tokens_sampled(small: TransformersEngine) -> None:
    (prompt,) = random_prompts(12)
    output = one(small, prompt, Params(temperature=0.5, top_k=3, max_tokens=10, top_logprobs=4), 1)
    with torch.no_grad():
        logits = qwen.build()(torch.tensor([prompt + output.token_ids]), use_cache=False).logits[0]
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    sampled = logprobs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert np.allclose(output.logprobs, sampled, atol=1e-4)
    values, ids = logprobs.topk(4)
    assert [[token for token, _ in top] for top in output.top_logprobs] == ids.tolist()
    assert np.allclose([[value for _, value in top] for top in output.top_logprobs], values, atol=1e-4)
    assert all(token in top[:3].tolist() for token, top in zip(output.token_ids, ids, strict=True))


# Shared prefixes


def test_a_shared_prefix_skips_the_forward_and_brings_the_first_requests_rows(small: TransformersEngine) -> None:
    head, tail, other = random_prompts(40, 5, 9)
    first = one(small, head + tail, Params(0, max_tokens=4))
    before = small.counters["tokens"]
    second = one(small, head + other, Params(0, max_tokens=6))
    assert second.shared == 40  # five blocks of 8
    assert small.counters["tokens"] - before == len(other) + 6 - 1  # the prefix did not go through the model
    assert np.array_equal(second.rows[:40], first.rows[:40])
    again = one(
        small, head, Params(0, max_tokens=3)
    )  # every block of the prompt is there: its last token is computed all the same
    assert again.shared == 39
    assert np.array_equal(again.rows[:39], first.rows[:39])


def test_shared_rows_are_those_that_were_written_with_the_cache_and_flush_forgets_them(
    small: TransformersEngine,
) -> None:
    (prompt,) = random_prompts(41)
    first = one(small, prompt, Params(0, max_tokens=2))
    gate = small.model.model.layers[1].mlp.gate.weight

    def other_router() -> None:
        with torch.no_grad():
            gate.copy_(-gate)

    small.between_two_steps(other_router)  # behind the engine's back: what is cached is as it was
    stale = one(small, prompt, Params(0, max_tokens=2))
    assert stale.shared == 40
    assert np.array_equal(stale.rows[:40], first.rows[:40])
    small.flush()
    fresh = one(small, prompt, Params(0, max_tokens=2))
    assert fresh.shared == 0
    assert (np.sort(fresh.rows[:40, 0]) != np.sort(first.rows[:40, 0])).any(-1).mean() > 0.9


def test_without_sharing_every_token_goes_through_the_model() -> None:
    (prompt,) = random_prompts(40)
    with TransformersEngine(qwen.build(), num_blocks=32, block_size=8, prefix_sharing=False) as engine:
        for _ in range(2):
            before = engine.counters["tokens"]
            assert one(engine, prompt, Params(0, max_tokens=3)).shared == 0
            assert engine.counters["tokens"] - before == 42


# No row of another request


def test_a_thousand_requests_and_every_row_is_its_own_tokens(record_property: Callable[[str, object], None]) -> None:
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, transformers_oracle.VOCABULARY, 24).tolist() for _ in range(40)]
    requests = []
    for i in range(1000):
        tail = rng.integers(0, transformers_oracle.VOCABULARY, int(rng.integers(1, 60))).tolist()
        head = heads[i // 25] if i % 2 else []
        limit = int(rng.integers(1, 9)) if i % 6 else 64
        requests.append(([*head, *tail], Params(max_tokens=limit), None))
    with TransformersEngine(
        transformers_oracle.build(), num_blocks=34, block_size=8, max_batch_tokens=80, seed=1
    ) as engine:
        assert engine.max_model_len >= 24 + 60 + 64
        outputs = together(engine, requests)
        counters = engine.counters
        assert not engine._runs
    shared, recomputed = sum(o.shared for o in outputs), sum(o.recomputed for o in outputs)
    facts = {**counters, "shared": shared, "recomputed": recomputed}
    print(f"\n1000 requests: {facts}")
    for name, value in facts.items():
        record_property(name, value)
    assert counters["evictions"] >= 20  # the cache was too small, as meant
    assert recomputed > 500
    assert shared > 2000
    # Nothing was computed that is not accounted for.
    rows = sum(len(o.prompt_token_ids) + len(o.token_ids) - 1 for o in outputs)
    assert counters["tokens"] >= rows - shared
    for (prompt, params, _), output in zip(requests, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert len(output.token_ids) == params.max_tokens
        tokens = np.array(prompt + output.token_ids)[:-1]
        assert np.array_equal(output.rows, transformers_oracle.rows_of(tokens, np.arange(len(tokens))))


def test_rows_of_a_model_of_sliding_windows_are_its_own_too() -> None:
    """No layer keeps its slots, so blocks are not shared and rows are followed by request and position alone."""
    model = transformers_oracle.build(use_sliding_window=True, sliding_window=16, max_window_layers=0)
    requests = [(p, Params(max_tokens=30), None) for p in random_prompts(3, 60, 25, 40, vocabulary=4096)]
    with TransformersEngine(model, num_blocks=40, block_size=8, max_batch_tokens=32, seed=1) as engine:
        assert not engine.prefix_sharing
        for output in together(engine, requests):
            tokens = np.array(output.prompt_token_ids + output.token_ids)[:-1]
            assert np.array_equal(output.rows, transformers_oracle.rows_of(tokens, np.arange(len(tokens))))


# Weights


def test_new_weights_have_their_version_and_no_old_prefix(small: TransformersEngine) -> None:
    (prompt,) = random_prompts(33)
    params = Params(0, max_tokens=8)
    one(small, prompt, params)
    other = qwen.build(seed=9)
    small.update_weights(other.state_dict(), version=4)
    updated = one(small, prompt, params)
    assert (updated.weight_version, updated.shared) == (4, 0)
    with TransformersEngine(other, num_blocks=64, block_size=8, max_batch_tokens=64) as fresh:
        expected = one(fresh, prompt, params)
    assert expected.weight_version == -1
    assert updated.token_ids == expected.token_ids
    assert np.array_equal(updated.rows, expected.rows)


def test_weights_do_not_change_under_a_request(small: TransformersEngine) -> None:
    (prompt,) = random_prompts(5)
    run = small.submit(prompt, Params(max_tokens=400))
    with pytest.raises(EngineError, match="under requests that are being sampled"):
        small.update_weights(lambda _: None, version=1)
    small.cancel(run)
    wait_for(lambda: not small._runs)
    small.update_weights(lambda _: None, version=1)
    assert small.weight_version == 1


# Requests that end otherwise


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def free_blocks(engine: TransformersEngine) -> int:
    assert engine._manager is not None
    return int(engine._manager.batch_processor.cache.get_num_free_blocks())


def test_a_cancelled_wait_frees_its_blocks(small: TransformersEngine) -> None:
    (prompt,) = random_prompts(9)

    async def give_up() -> None:
        task = asyncio.create_task(small.generate(prompt, Params(max_tokens=400)))
        await asyncio.sleep(0.2)
        assert free_blocks(small) < 64
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(give_up())
    wait_for(lambda: not small._runs and free_blocks(small) == 64)
    assert len(one(small, prompt, Params(max_tokens=3)).token_ids) == 3


def test_waiting_requests_go_on_when_all_that_run_are_cancelled_after_an_eviction() -> None:
    with TransformersEngine(
        transformers_oracle.build(), num_blocks=24, block_size=8, max_batch_tokens=64, seed=0
    ) as engine:
        prompts = random_prompts(*[40] * 6, vocabulary=4096)
        runs: list[Run] = [engine.submit(prompt, Params(max_tokens=100)) for prompt in prompts]
        wait_for(lambda: engine.evictions > 0)

        def cancel_those_that_run() -> set[str]:
            running = set(engine._manager.batch_processor.scheduler.active_requests)
            for run in runs:
                if run.request_id in running:
                    engine.cancel(run)
            return running

        gone = engine.between_two_steps(cancel_those_that_run)
        for run in runs:
            if run.request_id not in gone:
                assert len(run.future.result(timeout=600).token_ids) == 100


def test_a_step_that_fails_fails_every_request_with_its_reason(small: TransformersEngine) -> None:
    assert small._keeper is not None
    small.between_two_steps(small._keeper.binding.pause)  # the routers report no more
    runs = [small.submit(prompt, Params(max_tokens=4)) for prompt in random_prompts(5, 6, 7)]
    for run in runs:
        with pytest.raises(CaptureError, match="3 of 3 layers did not capture"):
            run.future.result(timeout=300)
    assert isinstance(small.failure, CaptureError)
    with pytest.raises(CaptureError):
        small.submit([1, 2], Params())
    small.close()
    small.start()
    assert small.failure is None
    assert len(one(small, [1, 2], Params(max_tokens=2)).token_ids) == 2


def test_a_model_that_raises_is_an_engine_error(small: TransformersEngine) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel for this")

    handle = small.model.lm_head.register_forward_pre_hook(broken)
    with pytest.raises(EngineError, match="the engine failed: no kernel for this"):
        one(small, [1, 2], Params())
    handle.remove()


def test_what_does_not_fit_is_refused_before_it_can_end_the_loop(small: TransformersEngine) -> None:
    assert small.max_model_len == 63 * 8 - 1
    with pytest.raises(PromptError, match="maximum context length is 503 tokens"):
        small.submit([1] * 400, Params(max_tokens=104))
    assert len(one(small, [1] * 400, Params(0, max_tokens=103)).token_ids) == 103
    for tokens in ([], [100], [-1]):
        with pytest.raises(PromptError, match="not a prompt of this model"):
            small.submit(tokens, Params())
    small.close()
    with pytest.raises(EngineError, match="does not run"):
        small.submit([1], Params())


# The model afterwards


def test_the_model_and_the_random_generators_are_as_they_were() -> None:
    model = qwen.build()
    ids = torch.tensor(random_prompts(30))
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    torch.manual_seed(3)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    with TransformersEngine(model, num_blocks=16, block_size=8) as engine:
        one(engine, [1, 2, 3], Params(max_tokens=3), 5)
    assert torch.equal(torch.rand(3), drawn)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before)


# As a sampler of the collector


def test_the_collector_samples_with_the_engine_itself(tiny_model: Path, tmp_path: Path) -> None:
    asked = [
        *read_prompts(tiny_model / "prompts.jsonl")[:4],
        Prompt("chat", 0, "messages", [{"role": "user", "content": "hi"}]),
    ]
    sampling = Sampling(temperature=0.8, max_tokens=12, seed=3)
    stores = []
    for name in ("a", "b"):
        with TransformersEngine(tiny_model, dtype="float32", sampling=sampling, weight_version=6) as engine:
            store = ShardStore(tmp_path / name, create=True)
            info = engine.info
            report = collect_sync(
                asked,
                store,
                info,
                sampling=sampling,
                n=2,
                weight_version=engine.weight_version,
                sampler=engine,
                fsync=False,
            )
            assert (report.written, report.failures) == (10, ())
            assert engine._manager is not None  # who started it ends it
            stores.append(store)
    for sample_id in stores[0].sample_ids():
        first, second = (store.open(sample_id) for store in stores)
        assert first.provenance.engine == "transformers"
        assert first.provenance.engine_version == transformers.__version__
        assert first.provenance.logprobs_mode == "raw_logprobs"
        assert first.provenance.model_fingerprint
        assert set(first.weight_version[first.loss_mask].tolist()) == {6}
        assert first.routes.num_recorded == len(first.tokens) - 1
        assert np.array_equal(first.tokens, second.tokens)
        assert first.routes.equal(second.routes)


def test_dense_layers_do_not_shift_the_others(small: TransformersEngine, tmp_path: Path) -> None:
    small.sampling = Sampling(max_tokens=6, seed=0)
    store = ShardStore(tmp_path / "s", create=True)
    prompts = [Prompt("p", 0, "prompt_token_ids", random_prompts(12)[0])]
    collect_sync(prompts, store, small.info, sampling=small.sampling, sampler=small, fsync=False)
    sample = store.open("p.0")
    assert sample.spec == qwen.SPEC
    model = qwen.build()
    chosen: list[torch.Tensor] = []
    for layer in qwen.SPEC.moe_layers:
        model.model.layers[layer].mlp.gate.register_forward_hook(lambda _m, _a, out: chosen.append(out[2]))
    with torch.no_grad():
        model(torch.from_numpy(sample.tokens.astype(np.int64))[None], use_cache=False)
    expected = torch.stack(chosen).sort(-1).values.numpy()
    assert np.array_equal(np.sort(sample.routes.ids[:, :-1], -1), expected[:, :-1])
