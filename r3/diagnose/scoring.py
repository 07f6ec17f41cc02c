"""What stands behind a diagnosis: a trainer that scores samples, with its own routing or with theirs.

`r3.trainers.score.TransformersScorer` and `r3.trainers.megatron.score.MegatronScorer` are two. A scorer keeps nothing between
calls: the same samples in the same order are the same batch, which is what makes passes comparable.

T tokens of a sample, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from r3.errors import ConfigError, ReplayError
from r3.sample import RolloutSample
from r3.spec import RoutingSpec


@dataclass(frozen=True)
class Scored:
    """What one forward said of one sample of T tokens.

    Attributes:
        logprobs: [T] log p(token t | tokens before t); entry 0 is NaN.
        expert_ids: [L, T, K], the ids that the experts received.
        padding_mass: [T] the probability that the trainer's softmax gives to ids beyond the vocabulary, where its logits are
            wider; entry 0 is NaN. None where they are not. `logprobs` are the trainer's own, padding included.
        router_logprobs: [L, T, E] log-softmax of each router's logits over its experts; None where the scorer was not asked for
            them or cannot tell.
    """

    logprobs: npt.NDArray[np.float32]
    expert_ids: npt.NDArray[Any]
    padding_mass: npt.NDArray[np.float32] | None = None
    router_logprobs: npt.NDArray[np.float32] | None = None


class Scorer(Protocol):
    """A trainer that can score samples with its own routing or with theirs.

    Attributes:
        spec: The routing of its model.
        fingerprint: `r3.fingerprint.model_fingerprint` of its weights, "" if not known.
    """

    spec: RoutingSpec
    fingerprint: str

    def describe(self) -> dict[str, str]:
        """The stack, for the report: `framework` and versions, `model`, `dtype`, `device`."""
        ...

    def score(self, samples: Sequence[RolloutSample], *, replay: bool, temperature: float) -> list[Scored]:
        """One forward over the samples as one batch; log-probs of logits / temperature."""
        ...


def require_dtype(dtype: str) -> None:
    """
    Raises:
        ConfigError: not a dtype of a scorer's forward.
    """
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError("unknown dtype of the trainer's forward", expected="bfloat16, float16 or float32", got=dtype)


def require_replayed(sample: RolloutSample, scored: Scored, spec: RoutingSpec) -> None:
    """Every recorded (token, layer) used the recorded experts.

    Raises:
        ReplayError: naming the first that did not.
    """
    # As sets: where experts are called one by one, the order of a token's choices is not seen.
    used, recorded = np.sort(scored.expert_ids, axis=-1), np.sort(sample.routes.ids, axis=-1)
    wrong = (used != recorded).any(axis=-1) & sample.routes.recorded
    if wrong.any():
        layer, token = (int(i) for i in np.argwhere(wrong)[0])
        layers = [spec.moe_layers[i] for i in np.flatnonzero(wrong.any(axis=1))]
        raise ReplayError(
            f"{int(wrong.sum())} of {wrong.size} (token, layer) used other experts than the recorded ones, "
            f"in decoder layers {layers}",
            where=f"sample {sample.sample_id!r}, token {token}, layer {spec.moe_layers[layer]}",
            expected=sample.routes.ids[layer, token].tolist(),
            got=scored.expert_ids[layer, token].tolist(),
            remedy="this is a defect of the override for this model: do not train with it, and report it",
        )
