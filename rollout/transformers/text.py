"""text: prompts become token ids and back, by the model's own tokenizer, as vLLM does it.

Text gets the tokenizer's special tokens (a BOS), chat goes through the model's chat template with the opening of the
assistant's turn, token ids are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from r3.errors import EngineError, PromptError, first_line
from r3.rollout.prompts import Prompt


class Text:
    """A tokenizer, or the absence of one; false if there is none."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Any, path: str | None) -> Text:
        """The tokenizer given, or that of a model.

        Raises:
            EngineError: the model has tokenizer files that cannot be read.
        """
        if tokenizer is not None or path is None:
            return cls(tokenizer)
        directory = Path(path)
        if directory.is_dir() and not any(directory.glob("*token*")) and not any(directory.glob("*.model")):
            return cls()
        try:
            return cls(transformers.AutoTokenizer.from_pretrained(path))
        except (OSError, ValueError) as error:
            raise EngineError(
                f"transformers cannot load the tokenizer of this model ({first_line(error)})",
                where=path,
                remedy="give the engine a tokenizer of your own, or prompts as token ids and no tokenizer files",
            ) from None

    def __bool__(self) -> bool:
        return self.tokenizer is not None

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            PromptError: text or chat without a tokenizer, text that it refuses, or a chat that the template refuses.
        """
        if prompt.kind == "prompt_token_ids":
            return list(prompt.payload)
        if self.tokenizer is None:
            raise PromptError(
                "this engine has no tokenizer",
                where=prompt.where,
                expected="prompt_token_ids",
                got=prompt.kind,
                remedy="give the engine a tokenizer, or prompts as token ids",
            )
        try:
            if prompt.kind == "prompt":
                return list(self.tokenizer(prompt.payload)["input_ids"])
            ids = self.tokenizer.apply_chat_template(
                prompt.payload, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # tokenizers and templates (Jinja) are foreign code: they fail in ways of their own
            text = prompt.kind == "prompt"
            raise PromptError(
                f"the model's {'tokenizer refuses this text' if text else 'chat template refuses these messages'} "
                f"({first_line(error) or type(error).__name__})",
                where=prompt.where,
                remedy="unpaired surrogates are no text"
                if text
                else "write the messages as the model's template takes them",
            ) from None
        return list(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token(self, token: int) -> str:
        """One token's text, special ones included."""
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))
