"""What a directory of shards tells: whether they fit together and the model, and what its disk can take."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field

from r3 import shard
from r3.doctor.checks import Check, green, red, yellow
from r3.errors import StoreError
from r3.shard import files
from r3.spec import RoutingSpec
from r3.store import ShardStore

HEADS = 256  # shards whose heads are read, spread over the store: a few KB each
WRITE_BYTES = 32 << 20


@dataclass
class Heads:
    """What the heads of some shards of a store say.

    Attributes:
        shards, read: Shards in the store and its steps, and how many were read.
        tokens, recorded, sampled: Of those that were read. The last token of each has no row and is counted as recorded.
        values: For each metadata field, how often each value was seen.
        versions: Weight versions of sampled tokens, and how many shards have them.
        mixed: Shards with more than one weight version.
        leftovers: Temporary files in the directories.
    """

    shards: int = 0
    read: int = 0
    tokens: int = 0
    recorded: int = 0
    sampled: int = 0
    values: dict[str, Counter[str]] = field(default_factory=dict)
    versions: Counter[int] = field(default_factory=Counter)
    mixed: int = 0
    leftovers: int = 0


def read_heads(root: str | os.PathLike[str]) -> Heads:
    """Raises StoreError or ShardError for a store that cannot be read."""
    heads = Heads()
    store = ShardStore(root)
    stores = store.stores()
    keys = [each.key_of(sample_id) for each in stores for sample_id in each.sample_ids()]
    heads.shards = len(keys)
    heads.leftovers = sum(each.leftovers() for each in {one.url: one for one in (store, *stores)}.values())
    for key in keys[:: max(1, len(keys) // HEADS)]:
        with shard.open_file(key) as file:
            versions = set(file.weight_version[file.loss_mask].tolist())
            heads.read += 1
            heads.tokens += file.num_tokens
            heads.recorded += int(file.recorded[:-1].sum()) + (file.num_tokens > 0)
            heads.sampled += int(file.loss_mask.sum())
            heads.versions.update(versions)
            heads.mixed += len(versions) > 1
            for name, value in file.metadata.items():
                heads.values.setdefault(name, Counter())[value] += 1
    return heads


def samples(heads: Heads) -> Check:
    name = "samples"
    if not heads.shards:
        return red(name, "no shard in this directory", "collect some: `r3 collect PROMPTS STORE --server URL`")
    if not heads.sampled:
        return red(name, f"{heads.shards:,} shards without a sampled token", "collect with max_tokens above 0")
    some = "" if heads.read == heads.shards else f" ({heads.read:,} heads read)"
    return green(name, f"{heads.shards:,} shards{some}, {heads.sampled / heads.read:.0f} sampled tokens each")


def coverage(heads: Heads) -> Check | None:
    """Rows without a record route live: the gap that replay should close stays in them."""
    if not heads.tokens:
        return None
    share = heads.recorded / heads.tokens
    text = f"{share:.2%} of the rows that an engine can record are recorded"
    if share > 0.999:
        return green("coverage", text)
    remedy = "find out which: `r3 inspect SHARD`; prefix caches, aborted requests and other engines' zero rows are the causes"
    return (red if share < 0.5 else yellow)("coverage", text, remedy)


def one_rollout(heads: Heads) -> Check | None:
    """Samples of several engines, models or sampling settings cannot be diagnosed as one rollout."""
    names = ("spec", "engine", "engine_version", "model_fingerprint", "temperature", "top_p", "top_k", "logprobs_mode")
    differing = [name for name in names if len(heads.values.get(name, ())) > 1]
    if not heads.read:
        return None
    if "spec" in differing:
        return red(
            "one rollout",
            "shards of models that route differently",
            "give each model a store of its own: they cannot be replayed in one trainer",
        )
    if differing:
        kinds = "; ".join(f"{name}: {', '.join(map(repr, sorted(heads.values[name])))}" for name in differing)
        return yellow(
            "one rollout", f"shards differ in {kinds}", "give each rollout a store of its own, then diagnose each"
        )
    return green("one rollout", "engine, model, sampling and log-probs are the same in all")


def weight_versions(heads: Heads) -> Check | None:
    if not heads.versions:
        return None
    known = sorted(heads.versions)
    text = ", ".join("unknown" if version < 0 else str(version) for version in known[:8])
    if heads.mixed:
        return yellow(
            "weight versions",
            f"{heads.mixed:,} of {heads.read:,} shards mix weight versions within a sample ({text})",
            "expect staleness in the gap: the diagnostic tells it by weight version",
        )
    if known == [-1]:
        return yellow(
            "weight versions", "unknown", "collect with --weight-version, so that staleness can be told apart"
        )
    return green("weight versions", text)


def logprobs(heads: Heads) -> Check | None:
    """Which log-probs these are, and whether a trainer can reproduce them."""
    if not heads.read:
        return None
    name = "log-probs"
    modes = set(heads.values["logprobs_mode"])
    truncated = any(float(p) < 1 for p in heads.values["top_p"]) or any(int(k) > 0 for k in heads.values["top_k"])
    if "processed_logprobs" in modes and truncated:
        return red(
            name,
            "processed log-probs of a truncated distribution (top-p or top-k): each holds the log of the kept mass",
            "start the engine with --logprobs-mode raw_logprobs, or sample with top_p=1 and top_k=0",
        )
    if not modes <= {"raw_logprobs", "processed_logprobs"}:
        return yellow(
            name, "the shards do not say which log-probs they hold", "collect with `r3 collect`, which finds out"
        )
    return green(name, ", ".join(sorted(modes)))


def fits_model(heads: Heads, spec: RoutingSpec, fingerprint: str) -> Check | None:
    """Against --model: a trainer with other weights measures staleness, one with other routing cannot replay at all."""
    if not heads.read:
        return None
    for text in heads.values["spec"]:
        theirs = RoutingSpec.from_json(text)
        if (theirs.moe_layers, theirs.num_experts, theirs.top_k) != (spec.moe_layers, spec.num_experts, spec.top_k):
            return red(
                "shards and model", f"shards: {theirs.brief()}; model: {spec.brief()}", "give the model that sampled"
            )
    seen = set(heads.values["model_fingerprint"])
    if fingerprint and seen - {"", fingerprint}:
        return yellow(
            "shards and model",
            "the shards were sampled by other weights than those of the model",
            "give the checkpoint that the engine served; otherwise the gap contains staleness",
        )
    if not fingerprint or "" in seen:
        return yellow(
            "shards and model",
            "whether these weights sampled the shards cannot be told",
            "collect with --model, and give the model's weights here",
        )
    return green("shards and model", "the same routing and the same weights")


def leftovers(heads: Heads) -> Check | None:
    if not heads.leftovers:
        return None
    return yellow(
        "leftovers",
        f"{heads.leftovers} temporary files of writers that were killed",
        "ShardStore(path).remove_leftovers() deletes those whose writer is dead",
    )


def disk(root: str | os.PathLike[str], *, size: int = WRITE_BYTES) -> tuple[Check, int | None, float]:
    """Free space (None where nobody says), and the speed of writing and syncing `size` bytes; returns both besides the check.

    Raises:
        StoreError: this user may not write there, or so much does not fit.
    """
    store = ShardStore(root)
    store.check_writable()
    if files.is_url(root):
        return _object_store(store, size)
    root = files.local_path(root)
    free = shutil.disk_usage(root).free
    probe = root / files.temporary_name()
    block = os.urandom(1 << 20)  # a file system that compresses must not look faster than it is
    begin = time.perf_counter()
    try:
        with open(probe, "wb") as file:
            for _ in range(size >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rate = size / (time.perf_counter() - begin)
    except OSError as error:  # a full disk, a quota, a file system that went away
        raise StoreError(
            f"{size >> 20} MB cannot be written here ({error.strerror or error})",
            where=str(root),
            remedy="free space or raise the quota: a shard is written whole or not at all",
        ) from None
    finally:
        probe.unlink(missing_ok=True)
    return space(free, rate), free, rate


def _object_store(store: ShardStore, size: int) -> tuple[Check, None, float]:
    from r3.shard import objects

    url, block = f"{store.url}/{files.temporary_name()}", os.urandom(size)
    begin = time.perf_counter()
    objects.put(url, block)
    rate = size / (time.perf_counter() - begin)
    objects.remove(url)
    return green("disk", f"an object of {size >> 20} MB is written at {rate / 1e6:.0f} MB/s"), None, rate


def space(free: int, rate: float) -> Check:
    """Args: free bytes, and bytes a second."""
    text = f"{free / 1e9:.1f} GB free, writes and syncs {rate / 1e6:.0f} MB/s"
    if free < 1 << 30:
        return red("disk", text, "free space: a shard is written whole or not at all, and collecting would stop")
    if rate < 20e6:
        return yellow("disk", text, "use a local disk or a parallel file system")
    return green("disk", text)
