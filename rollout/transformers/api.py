"""api: bodies of the endpoint: OpenAI's requests with vLLM's fields in, responses in vLLM's format out. Pure: no server here.

Contract: a field that would change what is sampled and is not built here is refused with its name (400), and so is one that
nobody knows: silence would make another rollout policy. `routed_experts` is as vLLM sends it: base64 of a `.npy` of
[P+G-1, decoder layers, K], uint8 or uint16, zeros in layers that do not route.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from r3.errors import ConfigError, PromptError
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Sampling
from r3.rollout.transformers.params import Params, refuse_unusable
from r3.rollout.transformers.requests import Output, Rows
from r3.rollout.transformers.text import Text
from r3.wire import encode_vllm

_IGNORED = {"user", "metadata", "service_tier", "store", "priority", "request_id", "top_logprobs"}  # change no token


class Request(BaseModel):
    """What both routes share. Other fields are allowed to come and are judged by `params`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    n: int = Field(1, ge=1, le=1024)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    def prompt_of(self) -> Prompt:
        """What is to be answered."""
        raise NotImplementedError

    def alternatives(self) -> int | None:
        """Most likely tokens asked for with each sampled one; None if no log-probs are wanted."""
        raise NotImplementedError

    def params(self, eos: frozenset[int], room: int) -> Params:
        """How to sample.

        Args:
            eos: The model's end-of-sequence tokens.
            room: Tokens left behind the prompt, for requests without max_tokens.

        Raises:
            ConfigError: a field that this engine cannot follow.
        """
        if self.stream:
            raise ConfigError("responses are not streamed", where="stream", remedy="leave stream out")
        extra = {name: value for name, value in (self.model_extra or {}).items() if name not in _IGNORED}
        refuse_unusable(extra, set())
        sampling = Sampling(
            self.temperature,
            self.top_p,
            max(0, self.top_k),
            self.limit(room),
            self.seed,
            {"stop": self.stop, "stop_token_ids": self.stop_token_ids, "ignore_eos": self.ignore_eos},
        )
        return Params.of(sampling, eos, top_logprobs=self.alternatives() or 0)

    def limit(self, room: int) -> int:
        """The most tokens to sample; `room` for a request that says nothing."""
        return self.max_tokens or max(1, room)


class CompletionRequest(Request):
    """`/v1/completions`: one prompt, text or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    add_special_tokens: bool = True

    def prompt_of(self) -> Prompt:
        if self.echo or not self.add_special_tokens:
            raise ConfigError(
                "echo and add_special_tokens=false are not built", where="prompt", remedy="leave them out"
            )
        prompt: Any = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return Prompt("request", 0, "prompt", prompt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return Prompt("request", 0, "prompt_token_ids", prompt)
        raise PromptError("one prompt a request", where="prompt", expected="a text, or token ids", got=str(prompt)[:60])

    def alternatives(self) -> int | None:
        return self.logprobs

    def limit(self, room: int) -> int:
        return super().limit(min(16, room))  # OpenAI's default on this route


class ChatRequest(Request):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=1)

    def prompt_of(self) -> Prompt:
        return Prompt("request", 0, "messages", self.messages)

    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def limit(self, room: int) -> int:
        return self.max_completion_tokens or super().limit(room)  # the newer name first, as vLLM


class TokenizeRequest(BaseModel):
    """`/tokenize`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None

    def prompt_of(self) -> Prompt:
        if (self.prompt is None) == (self.messages is None):
            raise PromptError("one of prompt and messages", where="/tokenize")
        if self.prompt is not None:
            return Prompt("request", 0, "prompt", self.prompt)
        return Prompt("request", 0, "messages", self.messages)


def response(
    request: Request, outputs: Sequence[Output], model: str, text: Text, all_layers: Callable[[Rows], Rows]
) -> dict[str, Any]:
    """The body of a response: one choice for each output.

    Args:
        model: The name under which it is served.
        text: For the text of the tokens.
        all_layers: Rows of MoE layers to rows of all decoder layers.
    """
    chat = isinstance(request, ChatRequest)
    prompt = outputs[0].prompt_token_ids
    choices = []
    for index, output in enumerate(outputs):
        content = text.decode(output.token_ids)
        if output.stop_text is not None:
            content = content[: content.find(output.stop_text)]
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_text,
            "logprobs": None,
            "routed_experts": None if output.rows is None else encode_vllm(all_layers(output.rows)),
        }
        if request.alternatives() is not None:
            choice["logprobs"] = (_chat_logprobs if chat else _logprobs)(output, request, text)
        if request.return_token_ids:
            choice["token_ids"] = output.token_ids
        if chat:
            choice["message"] = {"role": "assistant", "content": content}
        else:
            choice["text"] = content
            if request.return_token_ids:
                choice["prompt_token_ids"] = prompt
        choices.append(choice)
    sampled = sum(len(output.token_ids) for output in outputs)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": sampled,
            "total_tokens": len(prompt) + sampled,
            "prompt_tokens_details": {"cached_tokens": outputs[0].shared},
        },
        "weight_version": outputs[0].weight_version,
    }
    return {**body, "prompt_token_ids": prompt} if chat and request.return_token_ids else body


def _logprobs(output: Output, request: Request, text: Text) -> dict[str, Any]:
    names = [_name(token, request, text) for token in output.token_ids]
    offsets, end = [], 0
    for token in output.token_ids:
        offsets.append(end)
        end += len(text.token(token))
    top = None
    if request.alternatives():
        top = [
            {_name(each, request, text): value for each, value in [*alternatives, (token, logprob)]}
            for alternatives, token, logprob in zip(output.top_logprobs, output.token_ids, output.logprobs, strict=True)
        ]
    return {"tokens": names, "token_logprobs": output.logprobs, "text_offset": offsets, "top_logprobs": top}


def _chat_logprobs(output: Output, request: Request, text: Text) -> dict[str, Any]:
    alternatives = output.top_logprobs or [[] for _ in output.token_ids]

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": _name(token, request, text),
            "logprob": logprob,
            "bytes": list(text.token(token).encode()),
        }

    return {
        "content": [
            {**entry(token, logprob), "top_logprobs": [entry(*each) for each in top]}
            for token, logprob, top in zip(output.token_ids, output.logprobs, alternatives, strict=True)
        ]
    }


def _name(token: int, request: Request, text: Text) -> str:
    return f"token_id:{token}" if request.return_tokens_as_token_ids else text.token(token)


def error(message: str, status: int, kind: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error, in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
