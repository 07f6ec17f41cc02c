"""The rollout side of miles, slime's fork: what its hooks allow. See docs/miles.md.

    --custom-generate-function-path r3.rollout.miles.generate                  calls miles' own, then writes the shard
    --rollout-all-samples-process-path r3.rollout.miles.write_shards           for agents and sessions: after the rollout

miles has no hook for one sample between its generation and its reward, so `generate` takes the place of miles' generate
function and calls it. Samples that come out of a session server are complete only after the rollout: `write_shards` takes
those.

What happens to a sample is in `r3.rollout.slime.hooks`. What differs: the routes field is left an array of the right length
without bytes (miles counts its rows and looks at nothing else), and the trainer finds the shard by index and tokens.
"""

from __future__ import annotations

import asyncio
from typing import Any

from r3.errors import ConfigError
from r3.rollout.slime.hooks import Writer, load
from r3.rollout.slime.settings import Settings, require_routes_are_asked_for

_MILES_GENERATE = "miles.rollout.generate_hub.single_turn.generate"

__all__ = ["generate", "write_shards"]


async def generate(input: Any) -> Any:
    """miles' generate function: call another one and write the shards of what it returns.

    Args:
        input: miles' `GenerateFnInput`: `args`, `sample`, `sampling_params`, `evaluation`. `r3_generate` in the settings names
            the function that is called, in the same form.

    Returns:
        Its `GenerateFnOutput`, with the shards of its samples written.

    Raises:
        ConfigError, WireError, SampleError, StoreError: as `r3.rollout.slime.write_shard`.
    """
    writer = _writer(input.args, "r3.rollout.miles.generate")
    output = await load(writer.settings.generate or _MILES_GENERATE)(input)
    if not hasattr(output, "samples"):
        raise ConfigError(
            "this generate function is of miles' older form",
            where="r3_generate",
            expected="async (input: GenerateFnInput) -> GenerateFnOutput",
            got=type(output).__name__,
            remedy="name a function of the newer form, or use --rollout-all-samples-process-path r3.rollout.miles.write_shards",
        )
    if input.evaluation and not writer.settings.evaluation:
        return output
    samples = output.samples if isinstance(output.samples, list) else [output.samples]
    for sample in samples:
        await asyncio.to_thread(writer.keep, sample, None)
    return output


def write_shards(args: Any, all_samples: list[Any], data_source: Any) -> None:  # noqa: ARG001
    """miles' hook after a rollout: write the shards of all its samples, groups of groups included.

    Args:
        args: miles' arguments with the `r3_*` settings.
        all_samples: Groups of samples, those that a filter dropped too.
        data_source: Not used.

    Raises:
        ConfigError, WireError, SampleError, StoreError: as `r3.rollout.slime.write_shard`.
    """
    writer = _writer(args, "r3.rollout.miles.write_shards")
    for sample in _leaves(all_samples):
        writer.keep(sample, None)


def _writer(args: Any, hook: str) -> Writer:
    settings = Settings.from_args(args)
    require_routes_are_asked_for(args, hook)
    if settings.routes == "key" and getattr(args, "object_store_backend", "ray") != "ray":
        raise ConfigError(
            "r3_routes: key has been read for miles' Ray object store alone",
            where=hook,
            expected="--object-store-backend ray",
            got=args.object_store_backend,
            remedy="set r3_routes: full: the shards are written, and miles carries its own rows",
        )
    return Writer(args, settings, "miles")


def _leaves(samples: Any) -> list[Any]:
    return [leaf for each in samples for leaf in _leaves(each)] if isinstance(samples, list) else [samples]
