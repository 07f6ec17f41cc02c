"""What a model's directory tells: its routing, what replay will not reach, and what its routes cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from r3.doctor.checks import Check, green, red, yellow
from r3.fingerprint import model_fingerprint
from r3.spec import RoutingSpec

OTHER_BYTES = 14  # of a token besides its routes: id 4, log-prob 4, weight version 4, mask 1, recorded 1


def routing(spec: RoutingSpec) -> Check:
    return green("routing", f"{spec.brief()}; {spec.bytes_per_token} bytes of routes a token")


def weights(path: Path) -> Check | None:
    """Without weights nothing can prove that trainer and engine hold the same ones."""
    if not path.is_dir():
        return None
    fingerprint = model_fingerprint(path)
    if fingerprint:
        return green("weights", f"fingerprint {fingerprint}")
    return yellow(
        "weights",
        "no weights in this directory: shards cannot say which weights sampled",
        "give the directory with *.safetensors that the engine serves",
    )


def quantization(config: dict[str, Any]) -> Check:
    """The engine's number format. What it costs is not routing, so that replay cannot repair it."""
    scheme = config.get("quantization_config")
    if scheme:
        method = scheme.get("quant_method", "unknown") if isinstance(scheme, dict) else scheme
        return yellow(
            "number format",
            f"the weights are quantised ({method}): a trainer in bfloat16 has other weights, and replay repairs routes only",
            "train and sample from one format, or expect the gap of the quantisation to stay after replay",
        )
    dtype = config.get("dtype") or config.get("torch_dtype") or "not stated"
    if dtype == "float16":
        return yellow(
            "number format", "float16", "give engine and trainer the same --dtype; many trainers default to bfloat16"
        )
    return green("number format", str(dtype))


def multi_token_prediction(config: dict[str, Any]) -> Check | None:
    """MTP layers have routers of their own, which no engine records."""
    count = config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers") or 0
    if not count:
        return None
    return green(
        "multi-token prediction",
        f"{count} MTP layer(s): their routers are not recorded and not replayed, and are not part of the policy's log-probs",
    )


def zero_experts(spec: RoutingSpec) -> Check | None:
    """LongCat's identity experts."""
    if not spec.zero_experts:
        return None
    return yellow(
        "zero-computation experts",
        f"{spec.zero_experts} of {spec.num_experts} experts compute nothing, and vLLM reports expert 0 in their place",
        "record in the trainer (R2), or count on live routing for these rows",
    )


def budget(spec: RoutingSpec, tokens_per_step: int, free_bytes: int | None, write_rate: float | None) -> Check:
    """What a step's shards take: bytes on disk and on the wire, and seconds to write.

    Args:
        free_bytes: Free space where they go, None if not known.
        write_rate: Bytes a second that were written there.
    """
    each = spec.bytes_per_token + OTHER_BYTES
    size = each * tokens_per_step
    text = (
        f"{tokens_per_step:,} tokens a step: {size / 1e9:.2f} GB of shards ({each} bytes a token), "
        f"{spec.bytes_per_token * tokens_per_step * 4 / 3 / 1e9:.2f} GB of base64 from the engine"
    )
    if free_bytes is not None and size > free_bytes:
        return red(
            "budget", f"{text}; only {free_bytes / 1e9:.1f} GB are free", "free space, or choose another directory"
        )
    if free_bytes is not None and 4 * size > free_bytes:
        return yellow(
            "budget",
            f"{text}; {free_bytes / 1e9:.1f} GB are free: room for {free_bytes // size} steps",
            "delete old steps as you go: `r3 gc STORE --keep-steps 2`",
        )
    if write_rate is not None and size / write_rate > 60:
        return yellow(
            "budget",
            f"{text}; {size / write_rate:.0f} s to write at {write_rate / 1e6:.0f} MB/s",
            "write to a faster disk, or from several workers: each sample is a file of its own",
        )
    if write_rate is not None:
        text += f"; {size / write_rate:.1f} s to write at {write_rate / 1e6:.0f} MB/s"
    return green("budget", text)


def read_config(path: Path) -> dict[str, Any]:
    """The model's config.json with its text part on top; empty where there is none (`routing` says so)."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    return {**config, **(config.get("text_config") or {})}
