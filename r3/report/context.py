"""The worst tokens in the text around them. Texts and ids come from models and datasets: they are data here, and the page escapes
them; characters that would not be seen are shown by their symbols."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from r3.report.documents import Document, pair

SHOWN = 20


class Tokenizer(Protocol):
    """What transformers and tokenizers have alike."""

    def decode(self, token_ids: list[int]) -> str: ...


def tokenizer_of(document: Document) -> Tokenizer | None:
    """The tokenizer in the trainer's model directory, if there is one on this machine."""
    path = Path(str(document["trainer"].get("model", "")))
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        from transformers import AutoTokenizer

        found: Tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None  # the page then shows ids, and says so
    return found


def worst_tokens(document: Document, tokenizer: Tokenizer | None, count: int = SHOWN) -> list[dict[str, Any]]:
    """The tokens that carry most of the k3 of the pass before replay: what is known of each, and `before`, `token`, `after`."""
    base, other = pair(document)
    return [
        {
            **token,
            "base_logprob": token["train_logprobs"].get(base),
            "other_logprob": token["train_logprobs"].get(other) if other else None,
            **_text(token, tokenizer),
        }
        for token in document["forwards"][base]["top_tokens"][:count]
    ]


def _text(token: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, str]:
    ids, at = [int(one) for one in token["context"]], token["position"] - token["context_start"]
    if not 0 <= at < len(ids):
        return {"before": "", "token": "" if token["token_id"] < 0 else str(token["token_id"]), "after": ""}
    parts = ids[:at], ids[at : at + 1], ids[at + 1 :]
    if tokenizer is None:
        texts = [" ".join(map(str, part)) for part in parts]
    else:
        texts = [visible(tokenizer.decode(part)) if part else "" for part in parts]
    return dict(zip(("before", "token", "after"), texts, strict=True))


def visible(text: str) -> str:
    """Line breaks, tabs and control characters as the symbols that Unicode has for them; the rest as it is."""
    return "".join(
        "\u23ce" if character == "\n" else chr(0x2400 + ord(character)) if ord(character) < 32 else character
        for character in text.replace("\x7f", "\u2421")
    )
