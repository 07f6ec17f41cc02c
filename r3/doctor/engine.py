"""What the settings of a rollout engine tell, from its configuration file or from what a server says of itself.

Settings of vLLM (`vllm serve --config FILE`, or `VllmConfig` as its server shows it) and of SGLang (with or without the prefix
`sglang_` of slime and miles). Rules that depend on a version say so; without a version they assume the worst of those that are
known. Where a rule comes from: the engines' own checks and issues, by number in `r3.wire.engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from r3.doctor.checks import Check, Settings, green, red, yellow
from r3.wire.engines import Version, known_defects, parse_version

_STALE_CONNECTORS = ("Nixl", "MoRIIO", "Mooncake")  # rejected by vLLM 0.31 and later
_LOGITS = ("raw_logits", "processed_logits")


@dataclass(frozen=True)
class Engine:
    """An engine's settings.

    Attributes:
        name: `vllm` or `sglang`.
        version: As it calls itself; "" if not known.
    """

    settings: Settings
    name: str = "vllm"
    version: str = ""

    @property
    def number(self) -> Version | None:
        return parse_version(self.version)

    def before(self, *version: int) -> bool:
        """Whether it is, or may be, older."""
        return self.number is None or self.number < version

    @property
    def release(self) -> str:
        return f"{self.name} {self.version}" if self.version else f"{self.name} of unknown version"


def version(engine: Engine) -> Check:
    """Against the table of known defects."""
    if engine.number is None:
        return yellow(
            "engine version",
            f"{engine.release}: its known defects could not be looked up",
            "say which: --engine-version 0.30.0",
        )
    defects = known_defects(engine.name, engine.version, "http")
    refused = [each for each in defects if each.action == "refuse"]
    if refused:
        return red("engine version", f"{engine.release}: {refused[0].what}", refused[0].remedy)
    warned = [each for each in defects if each.action == "warn"]
    if warned:
        return yellow(
            "engine version",
            f"{engine.release}: " + "; ".join(each.what for each in warned),
            "; ".join(dict.fromkeys(each.remedy for each in warned)),
        )
    return green("engine version", f"{engine.release}: no known defect that r3 does not handle")


def capture_flag(engine: Engine) -> Check:
    if engine.settings.on("enable_return_routed_experts"):
        return green("capture flag", "enable_return_routed_experts is on")
    return red(
        "capture flag",
        "enable_return_routed_experts is off: responses will hold no routes",
        "start the engine with --enable-return-routed-experts",
    )


def parallelism(engine: Engine) -> Check | None:
    """Pipeline and context parallelism, of which no engine collects the routes."""
    names = {
        "pipeline_parallel_size": "pipeline",
        "pp_size": "pipeline",
        "decode_context_parallel_size": "decode context",
        "prefill_context_parallel_size": "prefill context",
    }
    for name, kind in names.items():
        size = engine.settings.number(name) or 1
        if size > 1:
            return red(
                "engine parallelism",
                f"{name}={size:.0f}: routes of the other {kind}-parallel ranks are lost, or the engine refuses",
                f"set {name}=1 and use tensor or data parallelism",
            )
    return green("engine parallelism", "no pipeline or context parallelism")


def prefix_cache(engine: Engine) -> Check | None:
    """vLLM keeps the routes of cached blocks in different ways, by version."""
    if engine.name != "vllm":
        if engine.settings.on("enable_hierarchical_cache"):
            return red(
                "prefix cache",
                "HiCache pages that come back from the host hold other rows (SGLang 26975)",
                "take --enable-hierarchical-cache out",
            )
        return green("prefix cache", "radix cache: a hit returns the rows of the first computation")
    off = engine.settings.get("enable_prefix_caching") is False or engine.settings.on("no_enable_prefix_caching")
    modern = engine.number is not None and engine.number >= (0, 31)
    if off and modern:
        return red(
            "prefix cache",
            f"off, and {engine.release} keeps routes by the cache's block hashes: it needs the cache",
            "start it with --enable-prefix-caching",
        )
    if not off and engine.number is not None and (0, 21) <= engine.number < (0, 22):
        return red("prefix cache", "on: in vLLM 0.21 rows of a hit are zero", "use vLLM 0.22 or later")
    text = "off" if off else "on: a hit returns the rows of the first computation; reset it with every weight update"
    return green("prefix cache", text)


def kv_transfer(engine: Engine) -> Check | None:
    """Connectors move KV blocks, not the routes that belong to them."""
    connector = engine.settings.get("kv_connector", "kv_transfer_config.kv_connector", "kv_transfer_config")
    if not connector:
        return None
    text = str(connector)
    if engine.before(0, 31):
        return red(
            "KV transfer",
            f"{text}: {engine.release} rejects it with routed experts, or returns stale rows",
            "sample without a KV connector (no prefill/decode split, no KV offload)",
        )
    if any(name in text for name in _STALE_CONNECTORS):
        return red("KV transfer", f"{text}: rejected with routed experts", "sample without this connector")
    return yellow(
        "KV transfer", f"{text}: blocks that it brings may have no routes", "watch coverage: `r3 inspect STORE`"
    )


def speculative(engine: Engine) -> Check | None:
    """MTP and other drafts."""
    method = engine.settings.get(
        "speculative_config.method", "speculative_algorithm", "speculative_config.model", "speculative_config"
    )
    if not method:
        return None
    fixed = (0, 26) if engine.name == "vllm" else (0, 5, 15)
    if engine.before(*fixed):
        return red(
            "speculative decoding",
            f"{method}: in {engine.release} the draft's routers may overwrite those of the model (layer 0)",
            f"use {engine.name} {'.'.join(map(str, fixed))} or later, or sample without speculative decoding",
        )
    return green("speculative decoding", f"{method}: the draft's routers are not recorded")


def kernel(engine: Engine) -> Check | None:
    """MoE kernels that choose experts inside never tell which."""
    backend = str(engine.settings.get("moe_backend", "moe_runner_backend", "kernel_config.moe_backend", default="auto"))
    if engine.name == "sglang":
        if "trtllm" in backend:
            return red(
                "MoE kernel",
                f"{backend} selects experts inside its kernel and never calls the capture: routes may be zero",
                "choose another: --moe-runner-backend triton",
            )
        return green("MoE kernel", backend)
    if engine.before(0, 27) and backend != "triton":
        return yellow(
            "MoE kernel",
            f"{backend}: up to vLLM 0.26 monolithic kernels record zeros without a word (r3's checks refuse those)",
            "use vLLM 0.27 or later, which refuses them at the start, or --moe-backend triton",
        )
    return green("MoE kernel", backend)


def expert_placement(engine: Engine) -> Check | None:
    """Expert-parallel load balancing moves experts: ids must be taken before that map."""
    if not engine.settings.on("enable_eplb", "parallel_config.enable_eplb"):
        return green("expert placement", "no expert-parallel load balancing")
    fixed = (0, 16) if engine.name == "vllm" else (0, 5, 10)
    if engine.before(*fixed):
        return red(
            "expert placement",
            f"EPLB is on, and {engine.release} returns physical ids: experts of another number",
            f"turn EPLB off, or use {engine.name} {'.'.join(map(str, fixed))} or later",
        )
    return green("expert placement", "EPLB is on; ids are logical, taken before the placement")


def number_formats(engine: Engine) -> Check | None:
    """What makes the engine's numbers others than the trainer's, whatever the routes."""
    found = []
    for name in ("quantization", "kv_cache_dtype", "cache_dtype"):
        value = engine.settings.get(name)
        if value and str(value).lower() not in ("auto", "none", "bfloat16", "float16", "bf16", "fp16"):
            found.append(f"{name}={value}")
    if not found:
        dtype = str(engine.settings.get("dtype", default="auto"))
        return green("engine dtype", dtype)
    return yellow(
        "engine dtype",
        f"{', '.join(found)}: a gap that is not routing, and that replay leaves",
        "take the diagnostic's replay row as what remains, and add importance sampling (TIS, MIS) for it",
    )


def logprobs_mode(engine: Engine) -> Check | None:
    mode = engine.settings.get("logprobs_mode")
    if mode in _LOGITS:
        return red(
            "log-probs mode", f"{mode}: logits, which no trainer can be compared with", "--logprobs-mode raw_logprobs"
        )
    if mode == "processed_logprobs":
        return yellow(
            "log-probs mode",
            "processed_logprobs: after temperature, top-p and top-k",
            "sample with top_p=1 and top_k off, and let the trainer divide its logits by the temperature",
        )
    return green("log-probs mode", mode or "the engine's default (raw_logprobs in vLLM)")


CHECKS = (
    version,
    capture_flag,
    parallelism,
    prefix_cache,
    kv_transfer,
    speculative,
    kernel,
    expert_placement,
    number_formats,
    logprobs_mode,
)


def examine(engine: Engine) -> list[Check]:
    return [found for check in CHECKS if (found := check(engine)) is not None]


def problems(engine: Engine, checks: Sequence[Callable[[Engine], Check | None]]) -> list[Check]:
    """Of some checks, what is not green: for a trainer's configuration, which says little of its engine."""
    return [found for check in checks if (found := check(engine)) is not None and found.level != "green"]


def kind_of(settings: Settings) -> str:
    """`sglang` or `vllm`, by names that only one of them has."""
    sglang = ("mem_fraction_static", "disable_radix_cache", "moe_runner_backend", "tp_size", "model_path")
    return "sglang" if any(name in settings for name in sglang) else "vllm"
