"""params: how one request is to be sampled, checked before the engine sees it. Pure: no torch, no transformers.

The names and meanings are vLLM's. What the engine cannot do is refused by name, never ignored: a rollout policy that silently
is another one than was asked for shows only as a KL that nobody can explain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from r3.errors import ConfigError
from r3.rollout.protocol import Sampling

# Fields that r3 and others send with their neutral value; any other value would change the policy in a way not built here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "length_penalty": (1, None),
    "min_tokens": (0, None),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "best_of": (1, None),
    "use_beam_search": (False, None),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (True, None),
    "include_stop_str_in_output": (False, None),
}
NEUTRAL_FIELDS = frozenset(_NEUTRAL)
_TAKEN = ("stop", "stop_token_ids", "ignore_eos")


@dataclass(frozen=True)
class Params:
    """How to sample one request.

    Attributes:
        temperature: 0 is greedy.
        top_p: In (0, 1].
        top_k: 0 is off.
        max_tokens: At most so many tokens.
        stop_token_ids: Tokens that end it and belong to it, the model's end-of-sequence tokens among them.
        stop: Strings that end it as soon as they are in its text.
        top_logprobs: How many of the most likely tokens are returned with each sampled one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0

    @classmethod
    def of(cls, sampling: Sampling, eos: frozenset[int], *, top_logprobs: int = 0) -> Params:
        """From r3's own settings; `eos` are the model's end-of-sequence tokens.

        Raises:
            ConfigError: a field of `extra` that this engine does not know, or a value that it cannot follow.
        """
        refuse_unusable(sampling.extra, set(_TAKEN))
        stop = sampling.extra.get("stop") or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        ids = sampling.extra.get("stop_token_ids") or ()
        if not all(isinstance(each, str) and each for each in stop) or not all(type(each) is int for each in ids):
            raise ConfigError(
                "stop holds strings that are not empty, stop_token_ids integers",
                where="sampling",
                got=f"stop={stop}, stop_token_ids={ids}",
            )
        ends = frozenset(ids) | (frozenset() if sampling.extra.get("ignore_eos") else eos)
        return cls(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, ends, stop, top_logprobs)


def refuse_unusable(extra: Mapping[str, Any], taken: set[str]) -> None:
    """Raise for request fields that are neither in `taken` nor at a value that changes nothing.

    Raises:
        ConfigError: naming the field.
    """
    for name, value in extra.items():
        if name in taken or any(_same(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            continue
        raise ConfigError(
            f"the transformers engine does not sample with {name}"
            if name in _NEUTRAL
            else f"the transformers engine does not know the field {name}",
            where="sampling",
            expected=f"{name} of {_NEUTRAL[name][0]!r}, or none" if name in _NEUTRAL else None,
            got=f"{name}={value!r}",
            remedy="leave it out, or sample with vLLM",
        )


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
