"""Other people's loops: the Hugging Face Trainer, accelerate, and TRL's GRPOTrainer on a real server's rollouts.

The first two are compared with a loop that is written out here; in the third the ids that the experts receive, in the loss
pass and in its recompute, are compared with the shards'.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from qwen import SPEC, build, samples_of
from torch import nn

from r3 import Layout, RolloutSample, ShardStore
from r3.errors import ReplayError
from r3.replay import Replay
from r3.rollout.collector import collect
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt, read_prompts
from r3.rollout.protocol import Sampling
from r3.trainers.hf import SAMPLES, ReplayCollator, ReplayGRPOMixin, ReplayRollouts, ReplayTrainerMixin
from r3.trainers.transformers import attach, detach, observe, right_padded

BATCH = samples_of(9, 12, 5, 16)  # one optimizer step: two micro-batches of two
RATE = 0.05


pytestmark = pytest.mark.usefixtures("one_thread")


def by_hand(*, replayed: bool = True) -> dict[str, torch.Tensor]:
    """The parameters after one step of SGD on the mean -log p of all tokens under the loss mask, a sample at a time."""
    model = build()
    replay = attach(model)
    count = sum(int(s.loss_mask.sum()) for s in BATCH)
    for sample in BATCH:
        layout, input_ids, mask = right_padded([sample])
        if replayed:
            with replay.micro_batch([sample], layout, input_ids):
                logits = model(input_ids, attention_mask=mask, use_cache=False).logits
        else:
            logits = model(input_ids, attention_mask=mask, use_cache=False).logits
        picked = logits[0, :-1].log_softmax(-1).gather(-1, input_ids[0, 1:, None])[:, 0]
        (-picked[torch.from_numpy(sample.loss_mask[1:])].sum() / count).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data -= RATE * parameter.grad
    return dict(model.named_parameters())


def require_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-7, msg=name)


class ReplayTrainer(ReplayTrainerMixin, transformers.Trainer):
    pass


def trainer_of(path: Path, dataset: list[Any], collator: ReplayCollator) -> ReplayTrainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = ReplayTrainer(model=build(), args=arguments, train_dataset=dataset, data_collator=collator)
    trainer.replay = attach(trainer.model)
    return trainer


def test_the_trainer_takes_the_step_of_a_loop_by_hand(tmp_path) -> None:
    """From ids in a store to a step of the optimizer: accumulation and checkpointing are the Trainer's."""
    store = ShardStore(tmp_path / "shards", create=True)
    for sample in BATCH:
        store.add(sample)
    trainer = trainer_of(tmp_path, store.sample_ids(), ReplayCollator(store))
    trainer.train()
    require_equal(trainer.model, by_hand())
    assert trainer.replay.coverage.forwards == 2
    assert trainer.replay.coverage.replayed == sum(s.num_tokens - 1 for s in BATCH)
    with pytest.raises(AssertionError):  # the live step is another
        require_equal(trainer.model, by_hand(replayed=False))


def test_the_trainer_computes_a_batch_without_samples_live(tmp_path) -> None:
    trainer = trainer_of(tmp_path, BATCH, ReplayCollator())
    batch = ReplayCollator()(BATCH[:2])
    live = {name: value for name, value in batch.items() if name != SAMPLES}
    with torch.no_grad():
        got = trainer.compute_loss(trainer.model, live)
        detach(trainer.model)
        assert torch.equal(got, trainer.model(**live, use_cache=False).loss)
    assert trainer.replay.coverage.forwards == 0


def test_a_batch_whose_tokens_were_changed_is_refused(tmp_path) -> None:
    trainer = trainer_of(tmp_path, BATCH, ReplayCollator())
    batch = ReplayCollator()(BATCH[:2])
    batch["input_ids"][1, 3] += 1
    with pytest.raises(ReplayError, match="sample 's1', token 3 "):
        trainer.compute_loss(trainer.model, batch)
    with pytest.raises(ReplayError, match="no store to open sample ids in"):
        ReplayCollator()(["s0"])


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(attach_first: bool, precision: str) -> None:
    model = build().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    replay = attach(model) if attach_first else None
    loader = torch.utils.data.DataLoader(BATCH, batch_size=2, collate_fn=ReplayCollator())
    wrapped, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE), loader)
    replay = replay or attach(wrapped)
    count = sum(int(s.loss_mask.sum()) for s in BATCH)
    for batch in loader:
        samples, labels = batch.pop(SAMPLES), batch.pop("labels")
        layout = Layout.from_attention_mask(batch["attention_mask"], [s.num_tokens for s in samples])
        with accelerator.accumulate(wrapped), observe(model, SPEC) as seen:
            with replay.micro_batch(samples, layout, batch["input_ids"]):
                logits = wrapped(**batch, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            accelerator.backward(loss / count * 2)  # which divides by the number of micro-batches
            optimizer.step()
            optimizer.zero_grad()
        require_received(seen, samples, layout)  # of the recompute, which came last
    if precision == "no":
        require_equal(model, by_hand())
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)  # its precision is the process's


def require_received(seen: dict[int, torch.Tensor], samples: Sequence[RolloutSample], layout: Layout) -> None:
    recorded = np.concatenate([s.routes.recorded for s in samples])
    for position, layer in enumerate(samples[0].spec.moe_layers):
        got = np.zeros((len(recorded), seen[layer].shape[1]), np.int64)
        held = layout.rows >= 0
        got[layout.rows[held]] = seen[layer].numpy()[held]
        want = np.concatenate([s.routes.ids[position] for s in samples])
        assert np.array_equal(got[recorded], want[recorded])


def test_rollouts_are_found_by_their_tokens() -> None:
    batches = iter([BATCH[:2], BATCH[2:], BATCH[:1]])
    rollouts = ReplayRollouts(lambda _prompts: next(batches), keep=1)
    answer = rollouts(["a", "b"])
    assert answer["prompt_ids"] == [s.tokens[:4].tolist() for s in BATCH[:2]]
    assert answer["completion_ids"] == [s.tokens[4:].tolist() for s in BATCH[:2]]
    assert [len(one) for one in answer["logprobs"]] == [5, 8]
    assert rollouts.find(BATCH[1].tokens.astype(np.int64)) is BATCH[1]
    rollouts(["c", "d"])
    with pytest.raises(ReplayError, match=r"9 tokens, beginning .*: a sequence of this batch is none of the rollout's"):
        rollouts.find(BATCH[0].tokens)
    with pytest.raises(ReplayError, match="each prompt of the batch needs one sample"):
        rollouts(["e", "f"])


# TRL ------------------------------------------------------------------------------------------------------------------


def sampler_of(engine: EngineInfo, root: Path) -> Callable[[Sequence[str]], list[RolloutSample]]:
    """As docs/training.md shows it: TRL's batch of prompts, each there once for each completion, through the collector."""
    steps = itertools.count()

    def generate(prompts: Sequence[str]) -> list[RolloutSample]:
        step = next(steps)
        store = ShardStore(root / f"step-{step}", create=True)
        unique = list(dict.fromkeys(prompts))
        asked = [Prompt(f"p{i}", 0, "prompt", text) for i, text in enumerate(unique)]
        sampling = Sampling(max_tokens=32, seed=step)
        asyncio.run(collect(asked, store, engine, sampling=sampling, n=prompts.count(unique[0]), weight_version=0))
        groups = {text: [s for s in store if s.group_id == f"p{i}"] for i, text in enumerate(unique)}
        return [groups[text].pop() for text in prompts]

    return generate


@pytest.mark.engine
def test_grpo_of_trl_trains_on_the_routes_of_a_server(engine: EngineInfo, tiny_model: Path, tmp_path: Path) -> None:
    import datasets
    import trl

    class Watched(ReplayGRPOMixin, trl.GRPOTrainer):
        """Looks at the experts after each forward of the policy and after each backward."""

        checked = 0

        def watch(self) -> None:
            self.seen = observe(self.model, self.replay.spec)
            self.ids = self.seen.__enter__()
            self.model.register_forward_hook(self.after_forward, with_kwargs=True)

        def after_forward(self, _model: nn.Module, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
            held = kwargs["attention_mask"].bool()
            lines = zip(kwargs["input_ids"], held, strict=True)
            samples = [self.rollouts.find(tokens[mask].numpy()) for tokens, mask in lines]
            self.last = samples, Layout.from_attention_mask(held, [s.num_tokens for s in samples])
            require_received(self.ids, *self.last)
            self.ids.clear()
            self.checked += 1

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            require_received(self.ids, *self.last)  # of the recompute
            return loss

    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=2,
        num_iterations=2,
        max_steps=2,
        beta=0.04,  # so there is a reference model, which routes live
        learning_rate=1e-4,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        model_init_kwargs={"dtype": torch.float32},
    )
    prompts = [{"prompt": prompt.payload} for prompt in read_prompts(tiny_model / "prompts.jsonl")[:4]]
    rollouts = ReplayRollouts(sampler_of(engine, tmp_path / "rollouts"))
    trainer = Watched(
        model=str(tiny_model),
        args=arguments,
        processing_class=transformers.AutoTokenizer.from_pretrained(tiny_model),
        train_dataset=datasets.Dataset.from_list(prompts),
        reward_funcs=lambda completions, **_: [float(text.count("e")) for text in completions],
        rollout_func=rollouts,
    )
    trainer.replay, trainer.rollouts = attach(trainer.model), rollouts
    trainer.watch()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "gate.weight" in name}
    trainer.train()
    assert trainer.checked >= 2 * 2
    replay: Replay = trainer.replay
    assert replay.coverage.forwards == trainer.checked
    assert replay.coverage.share > 0.97
    assert replay.agreement.share > 0.9
    assert any((trainer.model.get_parameter(name) != value).any() for name, value in before.items())
