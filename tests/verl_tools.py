"""A tool that veRL loads by path, and a parser for a model that cannot call tools: each response is a call."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool
def look_up(name: str) -> str:
    """Look a name up.

    Args:
        name: What to look up.
    """
    return f"{name} = 42"


@ToolParser.register("always")
class AlwaysCalls(ToolParser):
    async def extract_tool_calls(self, responses_ids: list[int], *_: Any, **__: Any) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        return text, [FunctionCall(name="look_up", arguments='{"name": "x"}')]
