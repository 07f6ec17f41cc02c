"""Replay in the Hugging Face Trainer, in TRL's GRPOTrainer, and in any loop whose batches are dictionaries for the model.

    class MyTrainer(ReplayTrainerMixin, transformers.Trainer): ...

    trainer = MyTrainer(model=model, args=TrainingArguments(..., remove_unused_columns=False),
                        train_dataset=store.sample_ids(), data_collator=ReplayCollator(store))
    trainer.replay = attach(trainer.model)

    class MyGRPOTrainer(ReplayGRPOMixin, trl.GRPOTrainer): ...

    trainer = MyGRPOTrainer(model=model, ..., rollout_func=rollouts)     # rollouts = ReplayRollouts(generate)
    trainer.replay, trainer.rollouts = attach(trainer.model), rollouts

Contract: a mixin stands before the trainer's class and overrides one method, in which it makes the micro-batch current. Attach
before `train()`: trainers wrap the model there, and FSDP1 must not be first. Imports neither transformers nor TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from r3.errors import ReplayError
from r3.layout import Layout
from r3.partial import Replayable
from r3.replay import Replay
from r3.sample import RolloutSample, token_digest
from r3.store import ShardStore
from r3.trainers.transformers import right_padded

SAMPLES = "rollout_samples"  # of a batch: a list of samples, in the order of its lines
IGNORED = -100  # the label of a token that is not in the loss


class ReplayCollator:
    """Data collator: samples, or their ids in a store, become one right-padded batch that knows its samples.

    Args:
        store: Where ids are opened; None if the dataset holds samples (a `ShardDataset` does).
        pad_id: Token of the padding.

    Returns:
        Of a call: input_ids, attention_mask, labels ([batch, width] int64; labels are the tokens under the loss mask,
        else -100), and the samples themselves.
    """

    def __init__(self, store: ShardStore | None = None, *, pad_id: int = 0) -> None:
        self.store, self.pad_id = store, pad_id

    def __call__(self, features: Sequence[Replayable | str]) -> dict[str, Any]:
        samples = [self._open(feature) for feature in features]
        layout, input_ids, attention_mask = right_padded(samples, self.pad_id)
        in_loss = layout.gather(np.concatenate([sample.loss_mask for sample in samples]), fill=False)
        labels = torch.where(torch.from_numpy(in_loss).reshape(input_ids.shape), input_ids, IGNORED)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, SAMPLES: samples}

    def _open(self, feature: Replayable | str) -> Replayable:
        if not isinstance(feature, str):
            return feature
        if self.store is None:
            raise ReplayError("this collator has no store to open sample ids in", got=repr(feature))
        return self.store.open(feature)


class ReplayTrainerMixin:
    """Before a `transformers.Trainer`: computes the loss of a batch of `ReplayCollator` under replay.

    A batch without samples is computed live.

    Attributes:
        replay: The handle of the trained model; set it before training.
    """

    replay: Replay

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        samples = inputs.get(SAMPLES)
        if samples is None:
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        rest = {name: value for name, value in inputs.items() if name != SAMPLES}
        lengths = [sample.num_tokens for sample in samples]
        layout = Layout.from_attention_mask(rest["attention_mask"].cpu(), lengths)
        with self.replay.micro_batch(samples, layout, rest["input_ids"]):
            return super().compute_loss(model, rest, *args, **kwargs)  # type: ignore[misc]


class ReplayRollouts:
    """TRL's `rollout_func` on samples with routes; remembers them until the loss pass asks for them by their tokens.

    Args:
        generate: From the prompts of TRL's batch (one entry for each completion that is wanted, so a prompt stands there
            `num_generations` times) to as many samples: from an engine that returns routes, or from shards.
        keep: Calls whose samples are remembered. TRL reuses the completions of one call for
            `steps_per_generation * num_iterations` steps, so 1 is enough unless it also evaluates in between.
    """

    def __init__(self, generate: Callable[[Sequence[Any]], Sequence[RolloutSample]], *, keep: int = 2) -> None:
        self.generate, self.keep = generate, keep
        self._calls: list[dict[str, RolloutSample]] = []

    def __call__(self, prompts: Sequence[Any], _trainer: Any = None) -> dict[str, Any]:
        samples = list(self.generate(prompts))
        if len(samples) != len(prompts):
            raise ReplayError("each prompt of the batch needs one sample", expected=len(prompts), got=len(samples))
        self._calls = [*self._calls, {sample.token_digest: sample for sample in samples}][-self.keep :]
        return {
            "prompt_ids": [sample.tokens[: sample.prompt_length].tolist() for sample in samples],
            "completion_ids": [sample.tokens[sample.prompt_length :].tolist() for sample in samples],
            "logprobs": [sample.rollout_logprobs[sample.prompt_length :].tolist() for sample in samples],
        }

    def find(self, tokens: np.ndarray[Any, Any]) -> RolloutSample:
        """The sample of these tokens. Samples with the same tokens were routed alike, so any of them will do.

        Raises:
            ReplayError: nothing that was generated has these tokens.
        """
        digest = token_digest(tokens)
        for call in reversed(self._calls):
            if digest in call:
                return call[digest]
        raise ReplayError(
            "a sequence of this batch is none of the rollout's",
            where=f"{len(tokens)} tokens, beginning {tokens[:8].tolist()}",
            expected="prompt and completion as they were generated",
            remedy="leave mask_truncated_completions off (it hides completions), and raise `keep` if older ones are trained on",
        )


class ReplayGRPOMixin:
    """Before a `trl.GRPOTrainer`: log-probs of the policy are computed under replay, those of a reference model are not.

    TRL shuffles and splits its batches between generation and loss; sequences are recognised by their tokens. Text only.

    Attributes:
        replay: The handle of the policy.
        rollouts: The trainer's `rollout_func`.
    """

    replay: Replay
    rollouts: ReplayRollouts
    ref_model: Any

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        score: Callable[..., tuple[torch.Tensor | None, ...]] = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if model is self.ref_model:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
        held, tokens = attention_mask.bool().cpu(), input_ids.cpu()
        parts = []
        for lines in torch.split(torch.arange(len(tokens)), batch_size or len(tokens)):  # one forward, one micro-batch
            samples = [self.rollouts.find(tokens[line][held[line]].numpy()) for line in lines]
            layout = Layout.from_attention_mask(held[lines], [sample.num_tokens for sample in samples])
            with self.replay.micro_batch(samples, layout, input_ids[lines]):
                parts.append(score(model, input_ids[lines], attention_mask[lines], logits_to_keep, **kwargs))
        return tuple(_joined(values) for values in zip(*parts, strict=True))


def _joined(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Of the chunks: log-probs and entropies one after another, the load-balancing loss as their mean."""
    tensors = [value for value in values if value is not None]
    if not tensors:
        return None
    return torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors).mean()
