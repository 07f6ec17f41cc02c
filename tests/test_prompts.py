"""prompts: what a file may hold, the ids it gets, and the error each defect is told by."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.errors import PromptError
from r3.rollout.prompts import Prompt, read_prompts


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_the_three_forms(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"id": "a", "prompt": "1+1=", "answer": "2"}\n'
        "\n"
        '{"id": "b", "messages": [{"role": "user", "content": "hi"}]}\r\n'
        '{"id": "c", "prompt_token_ids": [0, 5, 7]}',
    )
    assert read_prompts(path) == [
        Prompt("a", 1, "prompt", "1+1="),
        Prompt("b", 3, "messages", [{"role": "user", "content": "hi"}]),
        Prompt("c", 4, "prompt_token_ids", [0, 5, 7]),
    ]


def test_a_line_without_id_is_named_by_its_content(tmp_path: Path) -> None:
    lines = ['{"prompt": "x"}', '{"prompt": "y"}', '{"prompt": "x", "tag": 1}', '{"prompt": "x"}']
    x, y, x2, x3 = (prompt.prompt_id for prompt in read_prompts(write(tmp_path, "\n".join(lines))))
    assert (x2, x3) == (f"{x}-2", f"{x}-3")
    assert len({x, y, x2, x3}) == 4
    again = read_prompts(write(tmp_path, "\n".join(['{"id": "first", "prompt": "z"}', *lines])))
    assert [prompt.prompt_id for prompt in again] == ["first", x, y, x2, x3]


def test_the_digest_does_not_depend_on_the_order_of_keys_nor_on_the_id() -> None:
    one = Prompt("a", 1, "messages", [{"role": "user", "content": "hi"}])
    assert one.digest == Prompt("b", 2, "messages", [{"content": "hi", "role": "user"}]).digest
    assert one.digest != Prompt("a", 1, "messages", [{"role": "user", "content": "ho"}]).digest
    assert Prompt("a", 1, "prompt", "[1]").digest != Prompt("a", 1, "prompt_token_ids", [1]).digest


def test_ids_do_not_change_between_releases(tmp_path: Path) -> None:
    (prompt,) = read_prompts(write(tmp_path, '{"prompt": "x"}'))
    assert prompt.prompt_id == "b2c6fa432c743118"


def test_a_byte_order_mark_is_not_a_defect(tmp_path: Path) -> None:
    assert len(read_prompts(write(tmp_path, b'\xef\xbb\xbf{"prompt": "x"}\n'))) == 1


GOOD = b'{"id": "a", "prompt": "x"}\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "caf\xe9"}', ["not UTF-8", "0xe9 at column 16", "iconv"]),
        (b'{"prompt": "x"', ["not JSON", "one JSON object a line"]),
        (b'["x"]', ["not a JSON object", "a list"]),
        (b'"x"', ["not a JSON object", "a string"]),
        (b'{"text": "x", "answer": "y"}', ["no prompt", "exactly one of", "answer, text", "rename"]),
        (b"{}", ["no prompt", "(none)"]),
        (b'{"prompt": "x", "messages": []}', ["more than one prompt", "prompt and messages"]),
        (b'{"prompt": 3}', [":2: prompt: ", "an integer: 3"]),
        (b'{"prompt": ""}', [":2: prompt: ", "not empty"]),
        (b'{"messages": "hi"}', [":2: messages: ", "a string: hi"]),
        (b'{"messages": []}', [":2: messages: ", "a list: []"]),
        (b'{"messages": [{"role": "user"}, {"content": "x"}]}', ["messages[1]", '"role"']),
        (b'{"prompt_token_ids": []}', ["prompt_token_ids: ", "not empty"]),
        (b'{"prompt_token_ids": [1, -2]}', ["prompt_token_ids[1]", "an integer: -2"]),
        (b'{"prompt_token_ids": [1, true]}', ["prompt_token_ids[1]", "a boolean: true"]),
        (b'{"prompt_token_ids": [1.0]}', ["prompt_token_ids[0]", "a number: 1.0"]),
        (b'{"id": 7, "prompt": "y"}', [":2: id: ", "a string", "an integer: 7"]),
        (b'{"id": "a", "prompt": "y"}', ["'a' is taken", "line 1"]),
    ],
)
def test_a_defect_is_told_with_its_line(tmp_path: Path, line: bytes, said: list[str]) -> None:
    with pytest.raises(PromptError) as caught:
        read_prompts(write(tmp_path, GOOD + line + b"\n" + GOOD))
    message = str(caught.value)
    assert "prompts.jsonl:2" in message
    assert "expected" in message
    assert "remedy" in message
    for words in said:
        assert words in message


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_prompts(tmp_path: Path, content: str) -> None:
    with pytest.raises(PromptError, match="no prompts in this file"):
        read_prompts(write(tmp_path, content))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(PromptError, match="cannot read the prompts") as caught:
            read_prompts(path)
        assert str(path) in str(caught.value)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    with contextlib.suppress(PromptError):
        assert read_prompts(path)
