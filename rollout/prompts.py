"""prompts: read a JSONL file of prompts, and refuse it by line before an hour of sampling rather than in the middle.

One JSON object a line with exactly one of

    {"prompt": "text"}   {"messages": [{"role": "user", "content": "..."}]}   {"prompt_token_ids": [1, 2, 3]}

and, optionally, a unique string `id`. Other keys (answers, rewards, tags) are left alone. Blank lines are skipped.

Contract: the same file gives the same ids in every run, because a resumed collection recognises its samples by them. A
line without `id` is named by a digest of its prompt, and the second line of that prompt by the digest and `-2`.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from r3.errors import PromptError

Kind = Literal["prompt", "messages", "prompt_token_ids"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_DIGEST = 16  # hex characters of an id: 64 bits, so that a million prompts collide with probability 3e-8


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        prompt_id: Unique in its file; the group id of the samples that answer it.
        line: Line of the file it stands on, from 1, for messages; 0 if it came from elsewhere.
        kind: Which of the three forms `payload` has, in the name that vLLM's and this file's JSON give it.
        payload: str, list of chat messages, or list of token ids.
    """

    prompt_id: str
    line: int
    kind: Kind
    payload: Any

    @property
    def digest(self) -> str:
        """Hex digest of what is asked, whatever its id: tells a resumed collection that the prompt was edited."""
        content = orjson.dumps({self.kind: self.payload}, option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(content).hexdigest()[:_DIGEST]

    @property
    def where(self) -> str:
        return f"prompt {self.prompt_id!r}" + (f" (line {self.line})" if self.line else "")


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Every prompt of a file, in its order.

    Raises:
        PromptError: naming file and line: unreadable, not UTF-8, not JSON, none or two of the three forms, a wrong type,
            an id twice, or no prompt at all.
    """
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for line, record in _records(Path(path)):
        where = f"{path}:{line}"
        kind, payload = _payload(record, where)
        prompt = Prompt(_explicit_id(record, where), line, kind, payload)
        if not prompt.prompt_id:
            digest = prompt.digest
            seen[digest] += 1
            prompt = Prompt(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}", line, kind, payload)
        if prompt.prompt_id in line_of:
            raise PromptError(
                f"the id {prompt.prompt_id!r} is taken",
                where=where,
                expected="every id once",
                got=f"the same id on line {line_of[prompt.prompt_id]}",
                remedy="give each line its own id, or leave `id` out",
            )
        line_of[prompt.prompt_id] = line
        prompts.append(prompt)
    if not prompts:
        raise PromptError(
            "no prompts in this file",
            where=str(path),
            expected='lines such as {"prompt": "..."}',
            got="an empty file",
            remedy="write one JSON object a line",
        )
    return prompts


def require_distinct(prompts: Iterable[Prompt]) -> None:
    """For prompts that were not read from a file.

    Raises:
        PromptError: two have one id: of one of them there would be no sample, or the other's.
    """
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise PromptError(
                "the id is taken", where=prompt.where, expected="every id once", remedy="give each prompt its own id"
            )
        seen.add(prompt.prompt_id)


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line that is not blank."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PromptError(
            f"cannot read the prompts ({error.strerror or error})",
            where=str(path),
            remedy="check the path and its permissions; it is a JSONL file, one prompt a line",
        ) from None
    for line, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path}:{line}"
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(
                "this line is not UTF-8",
                where=where,
                expected="UTF-8 text",
                got=f"byte 0x{raw[error.start]:02x} at column {error.start + 1}",
                remedy="convert the file: iconv -f LATIN1 -t UTF-8 (if it is gzip or parquet, unpack it to JSONL first)",
            ) from None
        try:
            record = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise PromptError(
                f"this line is not JSON ({error.msg})",
                where=where,
                expected="one JSON object a line",
                got=_short(raw.decode("utf-8")),
                remedy="one object a line, without line breaks inside, commas after, or brackets around the lines",
            ) from None
        if not isinstance(record, dict):
            raise PromptError(
                "this line is not a JSON object",
                where=where,
                expected='an object such as {"prompt": "..."}',
                got=f"{_type(record)}: {_short(record)}",
                remedy="write one object a line; an array of prompts becomes one line each",
            )
        yield line, record


def _payload(record: dict[str, Any], where: str) -> tuple[Kind, Any]:
    present = [kind for kind in KINDS if kind in record]
    if len(present) != 1:
        raise PromptError(
            "this line has no prompt" if not present else "this line has more than one prompt",
            where=where,
            expected=f"exactly one of {', '.join(KINDS)}",
            got=f"the keys {', '.join(sorted(record)) or '(none)'}" if not present else " and ".join(present),
            remedy="rename the column that holds the prompt" if not present else "keep one of them",
        )
    kind = present[0]
    payload = record[kind]
    check = {"prompt": _check_text, "messages": _check_messages, "prompt_token_ids": _check_token_ids}[kind]
    check(payload, f"{where}: {kind}")
    return kind, payload


def _check_text(payload: Any, where: str) -> None:
    if not isinstance(payload, str) or not payload:
        raise _wrong(where, "a string that is not empty", payload, "an empty prompt has no token to start from")


def _check_messages(payload: Any, where: str) -> None:
    expected = 'a list such as [{"role": "user", "content": "..."}]'
    remedy = "write chat messages as vLLM's chat completions take them"
    if not isinstance(payload, list) or not payload:
        raise _wrong(where, expected, payload, remedy)
    for i, message in enumerate(payload):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(f"{where}[{i}]", 'an object with a string "role"', message, remedy)


def _check_token_ids(payload: Any, where: str) -> None:
    remedy = "write the prompt's token ids as non-negative integers"
    if not isinstance(payload, list) or not payload:
        raise _wrong(where, "a list of token ids that is not empty", payload, remedy)
    for i, token in enumerate(payload):
        if type(token) is not int or token < 0:  # bool is an int to isinstance
            raise _wrong(f"{where}[{i}]", "a non-negative integer", token, remedy)


def _explicit_id(record: dict[str, Any], where: str) -> str:
    """The line's own id, "" if it has none."""
    value = record.get("id")
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        raise _wrong(
            f"{where}: id", "a string that is not empty", value, 'write the id as a string ("17"), or leave it out'
        )
    return value


def _wrong(where: str, expected: str, got: Any, remedy: str) -> PromptError:
    return PromptError("not usable", where=where, expected=expected, got=f"{_type(got)}: {_short(got)}", remedy=remedy)


def _type(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
        int: "an integer",
    }
    return names.get(type(value), "a number")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:60] + "..."
