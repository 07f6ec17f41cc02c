"""What a running server tells: that its routes come and fit, and those of its settings that it shows.

vLLM shows its cache settings in /metrics, and the whole configuration in /server_info if it was started with
VLLM_SERVER_DEV_MODE=1; SGLang its arguments in /get_server_info. What a server does not show is not guessed: the check says
that it was not seen.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from r3.doctor import engine as engines
from r3.doctor.checks import Check, Settings, green, refused, yellow
from r3.doctor.engine import Engine
from r3.errors import EngineError, R3Error

_LABELS = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def examine(url: str, model: Path | None) -> list[Check]:
    """All checks of one server: nothing is changed on it; two sampled tokens prove its routes."""
    from r3.rollout.preflight import preflight

    try:
        info = asyncio.run(preflight(url, model_path=model))
    except R3Error as error:
        return [refused("routes", error), *asyncio.run(_sglang(url))]
    lines = [
        f"{info.engine} {info.engine_version} returns routes of {info.model}",
        info.spec.brief(),
        f"context {info.max_model_len}",
        f"weights {info.model_fingerprint or 'not on this machine'}",
    ]
    out = [green("routes", "; ".join(lines))]
    out += [
        yellow("engine version", warning, "see `r3.wire.engines` for the versions that do not have it")
        for warning in info.warnings
    ]
    mode = engines.logprobs_mode(Engine(Settings({"logprobs_mode": info.logprobs_mode})))
    out += [mode] if mode is not None else []
    metrics, whole = asyncio.run(_shown(info.urls[0]))
    return out + settings_shown(info.engine_version, metrics, whole)


def settings_shown(version: str, metrics: str, whole: dict[str, Any] | None) -> list[Check]:
    """Checks of a vLLM's settings.

    Args:
        metrics: The text of /metrics, "" if it was not served.
        whole: `vllm_config` of /server_info, None if it was not served.
    """
    if whole is not None:
        settings = Settings(whole)
        engine = Engine(settings, "vllm", version)
        seen = (engines.parallelism, engines.kv_transfer, engines.speculative, engines.kernel, engines.expert_placement)
        found = [check(engine) for check in (*seen, engines.number_formats, engines.prefix_cache)]
        return [check for check in found if check is not None]
    cache = cache_settings(metrics)
    if not cache:
        return [
            Check(
                "engine settings",
                "none",
                "not shown by this server (no /metrics): give its configuration with --engine",
            )
        ]
    engine = Engine(Settings(cache), "vllm", version)
    found = [engines.prefix_cache(engine), engines.number_formats(engine)]
    rest = Check(
        "other engine settings", "none", "shown only with VLLM_SERVER_DEV_MODE=1, or give them with --engine FILE"
    )
    return [*(check for check in found if check is not None), rest]


def cache_settings(metrics: str) -> dict[str, Any]:
    """The labels of `vllm:cache_config_info`."""
    line = next((each for each in metrics.splitlines() if each.startswith("vllm:cache_config_info{")), "")
    words = {"True": True, "False": False, "None": None}
    return {name: words.get(value, value) for name, value in _LABELS.findall(line)}


async def _shown(url: str) -> tuple[str, dict[str, Any] | None]:
    from r3.rollout.client import new_session
    from r3.rollout.probe import call

    async with new_session(30.0, None) as session:
        status, metrics = await call(session, url, "/metrics")
        text = metrics.decode("utf-8", "replace") if status == 200 and isinstance(metrics, bytes) else ""
        status, info = await call(session, url, "/server_info?config_format=json")
    whole = info.get("vllm_config") if status == 200 and isinstance(info, dict) else None
    return text, whole if isinstance(whole, dict) else None


async def _sglang(url: str) -> list[Check]:
    """Checks of a server that turned out to be SGLang, from its own account of its arguments."""
    from r3.rollout.client import new_session
    from r3.rollout.preflight import normalize_url
    from r3.rollout.probe import call

    try:
        async with new_session(30.0, None) as session:
            status, info = await call(session, normalize_url(url), "/get_server_info")
    except EngineError:
        return []
    if status != 200 or not isinstance(info, dict) or "enable_return_routed_experts" not in info:
        return []
    return engines.examine(Engine(Settings(info), "sglang", str(info.get("version", ""))))
