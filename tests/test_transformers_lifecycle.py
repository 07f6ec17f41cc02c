"""The transformers engine beside what uses it: updates that fail, a live model, two engines, requests that meet the end."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qwen
import torch
import transformers
from safetensors.torch import load_file, save_file

from r3 import ShardStore
from r3.errors import ConfigError, EngineError, PromptError
from r3.rollout.collector import collect_sync
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Sampling, parse_completion
from r3.rollout.transformers.engine import TransformersEngine
from r3.rollout.transformers.params import Params
from r3.rollout.transformers.sampling import warped
from r3.rollout.transformers.text import Text
from r3.trainers.score import TransformersScorer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

SIZES: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_batch_tokens": 64}
PROMPT = list(range(40))


@pytest.fixture
def small() -> Iterator[TransformersEngine]:
    with TransformersEngine(qwen.build(), **SIZES) as engine:
        yield engine


def greedy(engine: TransformersEngine, max_tokens: int = 3) -> Any:
    return engine.submit(PROMPT, Params(0, max_tokens=max_tokens)).future.result(timeout=60)


# Weights


def test_an_update_that_fails_in_the_middle_is_not_sampled_from(small: TransformersEngine) -> None:
    expected_old = greedy(small)
    whole = qwen.build(seed=9).state_dict()
    part = {name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        small.update_weights(part, version=2)
    with pytest.raises(EngineError, match="changed in part"):
        small.submit(PROMPT, Params(0, max_tokens=3))
    small.update_weights(whole, version=3)
    new = greedy(small)
    assert (new.weight_version, new.shared) == (3, 0)
    assert new.token_ids != expected_old.token_ids


def test_an_update_that_times_out_is_raised_to_the_caller(small: TransformersEngine) -> None:
    raised: list[BaseException] = []

    def late(_model: object) -> None:
        raise TimeoutError("no weights came")

    def update() -> None:
        try:
            small.update_weights(late, version=1)
        except TimeoutError as error:
            raised.append(error)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    thread.join(30)
    assert [str(error) for error in raised] == ["no weights came"]


def test_weights_may_change_as_soon_as_all_requests_are_cancelled(small: TransformersEngine) -> None:
    for version in range(5):
        small.cancel(small.submit(PROMPT, Params(max_tokens=400)))
        small.update_weights(lambda _: None, version=version)
        assert small.weight_version == version


def test_samples_carry_the_version_of_the_weights_that_sampled(small: TransformersEngine, tmp_path: Path) -> None:
    small.sampling = Sampling(max_tokens=3, seed=0)
    store = ShardStore(tmp_path / "s", create=True)
    prompts = [Prompt(f"p{i}", 0, "prompt_token_ids", PROMPT[i:]) for i in range(3)]
    stale = small.info
    small.update_weights(lambda _: None, version=4)
    collect_sync(prompts[:1], store, small.info, sampling=small.sampling, sampler=small, fsync=False)
    small.update_weights(lambda _: None, version=5)  # a collection that began before would not know
    collect_sync(prompts[1:2], store, stale, sampling=small.sampling, sampler=small, fsync=False)
    versions = [set(store.open(f"p{i}.0").weight_version[-3:].tolist()) for i in range(2)]
    assert versions == [{4}, {5}]
    # And it is resumed from: what is there was sampled by these weights.
    report = collect_sync(prompts[1:3], store, small.info, sampling=small.sampling, sampler=small, fsync=False)
    assert (report.present, report.written) == (1, 1)


def test_a_server_may_say_which_weights_sampled() -> None:
    choice = b'{"token_ids":[1],"prompt_token_ids":[2],"logprobs":{"token_logprobs":[-1.0]},"finish_reason":"stop"}'
    assert parse_completion(b'{"choices":[%s],"weight_version":7}' % choice, "u").weight_version == 7
    assert parse_completion(b'{"choices":[%s]}' % choice, "u").weight_version == -1


def test_weights_in_memory_have_no_fingerprint_of_the_disk(tiny_model: Path) -> None:
    with TransformersEngine(tiny_model) as engine:
        assert engine.info.model_fingerprint
        engine.update_weights(lambda model: model.lm_head.weight.mul_(2), version=1)
        assert engine.info.model_fingerprint == ""
    live = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    with TransformersEngine(live) as engine:
        assert engine.info.model_fingerprint == ""


# The live model


def test_a_forward_of_the_trainer_is_refused_while_the_engine_has_the_model() -> None:
    model = qwen.build().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    ids = torch.tensor([PROMPT])
    before = model(ids, use_cache=False).logits
    with TransformersEngine(model, **SIZES) as engine:
        for forward in (model, model.model):
            with pytest.raises(EngineError, match="its attention is paged"):
                forward(ids, use_cache=False)
        assert len(greedy(engine).token_ids) == 3
    assert torch.equal(model(ids, use_cache=False).logits, before)
    assert [module.training for module in model.modules()] == modes


def test_two_engines_run_side_by_side_and_not_on_one_model(small: TransformersEngine) -> None:
    expected = greedy(small).token_ids
    for capture in (True, False):
        with pytest.raises(EngineError, match="another engine runs it"):
            TransformersEngine(small.model, capture=capture, **SIZES).start()
    with TransformersEngine(qwen.build(), **SIZES) as other:
        runs = [engine.submit(PROMPT, Params(0, max_tokens=20)) for engine in (small, other) for _ in range(4)]
        outputs = [run.future.result(timeout=60) for run in runs]
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert all((output.rows == outputs[0].rows).all() for output in outputs)
    assert greedy(small).token_ids == expected


def test_an_engine_that_cannot_start_leaves_the_model_as_it_was() -> None:
    model = qwen.build().train()
    with pytest.raises(ConfigError, match="the cache holds no sequence"):
        TransformersEngine(model, num_blocks=1).start()
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    model(torch.tensor([PROMPT]), use_cache=False)


# The end


def test_requests_under_way_say_that_the_engine_was_closed() -> None:
    engine = TransformersEngine(qwen.build(), **SIZES)
    engine.start()
    run = engine.submit(PROMPT, Params(max_tokens=400))
    while not engine.counters["steps"]:
        threading.Event().wait(0.01)
    engine.close()
    with pytest.raises(EngineError, match="closed before this request ended"):
        run.future.result(timeout=30)


def test_a_request_that_meets_the_end_is_not_waited_for_for_ever(small: TransformersEngine) -> None:
    closing = threading.Thread(target=small.close)

    class Seeds:
        def getrandbits(self, _bits: int) -> int:  # asked for in the middle of `submit`
            closing.start()
            closing.join(2)
            return 1

    small._seeds = Seeds()  # type: ignore[assignment]
    run = small.submit(PROMPT, Params(max_tokens=400))
    closing.join()
    with pytest.raises(EngineError, match="closed before this request ended"):
        run.future.result(timeout=10)


def test_a_command_that_was_not_come_to_does_not_run_after_the_next_start(small: TransformersEngine) -> None:
    late: list[int] = []
    small.close()
    small._commands.put(lambda: late.append(1))
    small.start()
    greedy(small)
    assert late == []


# Requests and settings


def test_a_model_that_gives_nan_gives_no_samples() -> None:
    model = qwen.build()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with TransformersEngine(model, **SIZES) as engine, pytest.raises(EngineError, match="no finite log-prob"):
        greedy(engine)


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = torch.tensor([[3.0, -2.0, 3.5, 0.0]])
    for temperature in (1e-3, 1e-20, 1e-40, 5e-324):
        probabilities = warped(logits, [Params(temperature)]).softmax(-1)
        assert probabilities.argmax() == 2
        assert torch.allclose(probabilities, torch.tensor([[0.0, 0.0, 1.0, 0.0]]))


def test_text_that_is_none_is_a_bad_prompt(tiny_model: Path) -> None:
    text = Text(transformers.AutoTokenizer.from_pretrained(tiny_model))
    with pytest.raises(PromptError, match="prompt 'p': the model's tokenizer refuses this text"):
        text.tokens_of(Prompt("p", 0, "prompt", "\ud800"))
    text.tokenizer.chat_template = None
    with pytest.raises(PromptError, match="chat template"):
        text.tokens_of(Prompt("p", 0, "messages", [{"role": "user", "content": "hi"}]))


def test_a_checkpoint_without_a_router_is_not_completed_at_random(tmp_path: Path) -> None:
    qwen.build().save_pretrained(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    del weights["model.layers.1.mlp.gate.weight"]
    save_file(weights, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    TransformersEngine(tmp_path / "whole")
    TransformersScorer(tmp_path / "whole", dtype="float32")
    with pytest.raises(EngineError, match=r"not all weights of this model: 1 .*\n.*layers\.1\.mlp\.gate\.weight"):
        TransformersEngine(tmp_path / "part")
    with pytest.raises(ConfigError, match=r"not all weights of this model: 1 .*\n.*layers\.1\.mlp\.gate\.weight"):
        TransformersScorer(tmp_path / "part", dtype="float32")
    (tmp_path / "part" / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(EngineError, match="transformers cannot load this model"):
        TransformersEngine(tmp_path / "part")


def test_settings_that_cannot_be_are_named(small: TransformersEngine) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        TransformersEngine(qwen.build(), options={"nonsense": 1})
    with pytest.raises(ConfigError, match="block_size"):
        TransformersEngine(qwen.build(), block_size=0)
    with pytest.raises(EngineError, match="a bounded queue"):
        TransformersEngine(qwen.build(), options={"max_queue_size": 1})
    with pytest.raises(ConfigError, match="not a dtype"):
        TransformersEngine("anywhere", dtype="float17")
    with pytest.raises(ConfigError, match="no token is asked for"):
        small.submit(PROMPT, Params(max_tokens=0))


def test_a_prompt_of_one_token_and_one_token_more(small: TransformersEngine) -> None:
    runs = small.between_two_steps(lambda: [small.submit([7], Params(0, max_tokens=1)) for _ in range(9)])
    outputs = [run.future.result(timeout=60) for run in runs]
    assert {output.rows.shape for output in outputs} == {(1, 3, 2)}
    assert all((output.rows == outputs[0].rows).all() for output in outputs)
    assert asyncio.run(small.generate([7], Params(0, max_tokens=1))).token_ids == outputs[0].token_ids
