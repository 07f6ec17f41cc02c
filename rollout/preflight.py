"""preflight: before the first sample, find out what listens, and prove on a real request that its routes can be used.

A rollout that runs for an hour and holds no routes is the usual way to find a missing flag. So each server is asked once:
version, served models, two sampled tokens whose routes must decode against the model's RoutingSpec, and the same token
distribution at two temperatures, which tells whether its log-probs are raw or processed (`--logprobs-mode` is in no API).

Contract: `preflight` returns an EngineInfo that holds for every server given, or raises an EngineError that says which server
is what, and what to change. It changes nothing on the servers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from r3.errors import EngineError
from r3.fingerprint import model_fingerprint
from r3.rollout.client import new_session
from r3.rollout.probe import call, probe
from r3.sample import UNKNOWN_VERSION
from r3.spec import RoutingSpec
from r3.wire.engines import known_defects, parse_version

_NAMES = {"vllm": "vLLM", "transformers": "transformers"}  # engines whose servers answer in vLLM's format


@dataclass(frozen=True)
class EngineInfo:
    """What a preflight found out; goes into every sample's provenance.

    Attributes:
        urls: Base URLs of the servers, without a trailing slash or `/v1`.
        spec: The routing of the model they serve.
        model: The name under which they serve it.
        engine, engine_version: `vllm`, `0.30.0`; or `transformers`, `5.10.4`.
        model_root: vLLM's `root`: the path or hub id the weights came from.
        model_fingerprint: Of the weights, "" if they are not on a disk of this machine.
        max_model_len: Longest sequence, None if the server does not say.
        logprobs_mode: `raw_logprobs` or `processed_logprobs`, as measured.
        warnings: What the user should know about this version.
        weight_version: Of the weights, where the engine knows it.
    """

    urls: tuple[str, ...]
    spec: RoutingSpec
    model: str
    engine: str = "vllm"
    engine_version: str = ""
    model_root: str = ""
    model_fingerprint: str = ""
    max_model_len: int | None = None
    logprobs_mode: str = ""
    warnings: tuple[str, ...] = ()
    weight_version: int = UNKNOWN_VERSION


async def preflight(
    urls: str | Sequence[str],
    *,
    model_path: str | os.PathLike[str] | None = None,
    model_name: str | None = None,
    spec: RoutingSpec | None = None,
    api_key: str | None = None,
    timeout_s: float = 120.0,
) -> EngineInfo:
    """Check every server of a list, once, before collecting.

    Args:
        urls: Base URL or URLs; `host:port` and a trailing `/v1` are understood.
        model_path: Directory of the served model, for its routing; not needed if the server's own path is on this machine.
        model_name: The served model to use; None takes the server's base model.
        spec: The routing, if it is known already; `model_path` is then not needed.
        timeout_s: For each request; the first on a fresh server may be slow.

    Raises:
        EngineError: nothing listens, it is not vLLM, a version without routes, another model, the flag is off, ...
        SpecError: the model's routing cannot be told from `model_path`.
    """
    bases = [normalize_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
    if not bases:
        raise EngineError("no server to ask", expected="at least one URL, e.g. http://127.0.0.1:8000")
    async with new_session(timeout_s, api_key) as session:
        cards = await asyncio.gather(*(_identify(session, url, model_name) for url in bases))
        _require_agreement(cards)
        card = cards[0]
        routing, fingerprint = await asyncio.to_thread(_model_on_disk, card, spec, model_path)
        modes = await asyncio.gather(
            *(probe(session, each.url, each.model, routing, each.max_model_len) for each in cards)
        )
    _require_same(cards, "logprobs_mode", modes)
    return EngineInfo(
        urls=tuple(bases),
        spec=routing,
        model=card.model,
        engine=card.engine,
        engine_version=card.version,
        model_root=card.root,
        model_fingerprint=fingerprint,
        max_model_len=card.max_model_len,
        logprobs_mode=modes[0],
        warnings=check_version(card.version, card.url, card.engine),
        weight_version=card.weight_version,
    )


def normalize_url(url: str) -> str:
    """`scheme://host[:port][/path]` without a trailing slash or `/v1`."""
    text = url.strip()
    text = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise EngineError(
            "not the URL of a server", where=repr(url), expected="http://host:port", remedy="e.g. http://127.0.0.1:8000"
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def check_version(version: str, url: str, engine: str = "vllm") -> tuple[str, ...]:
    """Warnings about a version of an engine, from the table of `r3.wire.engines`.

    Raises:
        EngineError: it cannot return routes over HTTP.
    """
    name = _NAMES[engine]
    if parse_version(version) is None:
        return (
            f"{url}: {name} {version or '(no version)'} is a development version: its known defects could not be looked up",
        )
    warnings = []
    for defect in known_defects(engine, version, "http"):
        if defect.action == "refuse":
            raise EngineError(
                f"{name} {version} cannot be used: {defect.what}",
                where=url,
                expected="vLLM 0.22 or later",
                got=version,
                remedy=f"{defect.remedy} (on the server)",
            )
        if defect.action == "warn":
            warnings.append(f"{url}: {name} {version}: {defect.what}; {defect.remedy}")
    return tuple(warnings)


@dataclass(frozen=True)
class _Card:
    """What one server says of itself."""

    url: str
    engine: str
    version: str
    model: str
    root: str
    max_model_len: int | None
    weight_version: int


async def _identify(session: aiohttp.ClientSession, url: str, model_name: str | None) -> _Card:
    _, version = await call(session, url, "/version")
    status, models = await call(session, url, "/v1/models")
    entries = models.get("data") if isinstance(models, dict) else None
    entries = [entry for entry in entries or [] if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    if status in (401, 403):
        raise EngineError(
            f"the server wants another API key (HTTP {status})", where=url, remedy="give the key it was started with"
        )
    if not isinstance(version, dict) or not isinstance(version.get("version"), str) or not entries:
        raise EngineError(
            "this is not a vLLM server",
            where=url,
            expected="a JSON version at /version and models at /v1/models",
            got=await _looks_like(session, url, entries),
            remedy="start one with `python -m vllm.entrypoints.openai.api_server --model ... --enable-return-routed-experts` "
            "and give its own URL, not that of a gateway in front of it",
        )
    engine = version.get("engine", "vllm")  # vLLM's own says no more than its version
    if engine not in _NAMES:
        raise EngineError(
            "this engine is not known",
            where=url,
            expected=" or ".join(sorted(_NAMES)),
            got=engine,
            remedy="serve the model with vLLM, or with `r3 serve MODEL --engine transformers`",
        )
    check_version(version["version"], url, engine)
    served = [entry["id"] for entry in entries]
    if model_name is not None and model_name not in served:
        raise EngineError(
            f"the server does not serve a model named {model_name!r}",
            where=url,
            expected=model_name,
            got=", ".join(served),
            remedy="ask for one of those, or start the server with --served-model-name",
        )
    base = [entry for entry in entries if not entry.get("parent")] or entries  # an adapter names its parent
    entry = next(e for e in entries if e["id"] == model_name) if model_name is not None else base[0]
    length, weights = entry.get("max_model_len"), entry.get("weight_version")
    return _Card(
        url,
        engine,
        version["version"],
        entry["id"],
        str(entry.get("root") or ""),
        length if isinstance(length, int) else None,
        weights if isinstance(weights, int) else UNKNOWN_VERSION,
    )


async def _looks_like(session: aiohttp.ClientSession, url: str, entries: list[dict[str, Any]]) -> str:
    """What a server that is not vLLM seems to be."""
    owners = {str(entry.get("owned_by")) for entry in entries}
    for path in ("/get_model_info", "/model_info"):
        status, info = await call(session, url, path)
        if "sglang" in owners or (status == 200 and isinstance(info, dict) and "model_path" in info):
            return "what looks like SGLang"
    if "vllm" in owners:
        return "what looks like a gateway in front of vLLM"
    if entries:
        return f"an OpenAI-style API whose models are owned by {', '.join(sorted(owners))}"
    return "some other HTTP server"


def _require_agreement(cards: Sequence[_Card]) -> None:
    for what in ("engine", "version", "model", "root", "max_model_len", "weight_version"):
        _require_same(cards, what, [getattr(card, what) for card in cards])


def _require_same(cards: Sequence[_Card], what: str, values: Sequence[Any]) -> None:
    for card, value in zip(cards, values, strict=True):
        if value != values[0]:
            raise EngineError(
                f"the servers differ in {what}: their samples may not be mixed",
                where=card.url,
                expected=f"{values[0]} (as {cards[0].url})",
                got=value,
                remedy="start them alike, or collect from each into a directory of its own",
            )


def _model_on_disk(
    card: _Card, spec: RoutingSpec | None, model_path: str | os.PathLike[str] | None
) -> tuple[RoutingSpec, str]:
    """Routing and fingerprint of the served model."""
    served = Path(card.root) if card.root and Path(card.root).is_dir() else None
    given = Path(model_path) if model_path is not None else None
    directory = given or served
    if spec is None and directory is None:
        raise EngineError(
            "the routing of the served model cannot be told from here",
            where=card.url,
            expected="a model directory on this machine",
            got=card.root or "no root in /v1/models",
            remedy="give the model's directory (or its config.json) with --model",
        )
    fingerprint = model_fingerprint(directory) if directory is not None and directory.is_dir() else ""
    if fingerprint and served is not None and (theirs := model_fingerprint(served)) and theirs != fingerprint:
        raise EngineError(
            "the server serves other weights than those of --model",
            where=card.url,
            expected=f"{given} ({fingerprint})",
            got=f"{served} ({theirs})",
            remedy="give the path that is served, or leave --model out",
        )
    return spec if spec is not None else RoutingSpec.from_config(directory), fingerprint
