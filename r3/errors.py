"""The errors of r3: one base class, and a message that says what, where, expected against got, and the remedy.

Routes are lost silently everywhere else in the field, so a failure here is meant to be read by someone who has never
seen this code: each names the sample, token and layer where that applies, and what to do next. The command line prints
`str(error)` alone; a traceback there is a bug of ours.
"""

from __future__ import annotations

from typing import Any


class R3Warning(UserWarning):
    """Something that the numbers will show and the user should know, but that loses no data."""


class R3Error(Exception):
    """Base class of every error that r3 raises on purpose.

    Args:
        what: One sentence: what is wrong.
        where: The file, sample, token, layer or URL at which it is wrong.
        expected: What the contract asks for.
        got: What was found instead.
        remedy: What the reader can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: Any = None,
        got: Any = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.where, self.expected, self.got, self.remedy = what, where, expected, got, remedy

    def __str__(self) -> str:
        lines = [self.what if self.where is None else f"{self.where}: {self.what}"]
        found = [
            f"{name} {value}" for name, value in (("expected", self.expected), ("got", self.got)) if value is not None
        ]
        if found:
            lines.append("  " + ", ".join(found))
        if self.remedy is not None:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def at(self, where: str) -> R3Error:
        """The same error with an outer place put in front: a file or a sample that the raising code did not know."""
        self.where = where if self.where is None else f"{where}: {self.where}"
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders (Ray, multiprocessing) by pickle, which drops keyword arguments.
        return _rebuild, (type(self), self.what, self.where, self.expected, self.got, self.remedy)


def _rebuild(cls: type[R3Error], what: str, where: Any, expected: Any, got: Any, remedy: Any) -> R3Error:
    return cls(what, where=where, expected=expected, got=got, remedy=remedy)


class SpecError(R3Error):
    """A model whose routing r3 cannot tell, or two specs that do not agree."""


class WireError(R3Error):
    """A payload from an engine that cannot be trusted."""


class SampleError(R3Error):
    """Parts of a rollout sample that do not fit each other."""


class ShardError(R3Error):
    """A shard file that is not one, is damaged, or is of another version."""


class NoShardError(ShardError):
    """There is no file, or object, of that name."""


class StoreError(R3Error):
    """A directory of shards that cannot be read or written."""


class PresentError(StoreError):
    """What was to be written is there already: another writer was first, and its shard stays."""


class LayoutError(R3Error):
    """A micro-batch whose rows do not fit its samples."""


class ReplayError(R3Error):
    """A model that cannot be replayed, or a forward that did not do what was asked."""


class EngineError(R3Error):
    """A rollout engine that is absent, is not what it should be, or does not return routes."""


class CaptureError(R3Error):
    """An engine whose routers cannot be captured, or a step, a slot or a batch that does not fit what was captured."""


class LayerRangeError(CaptureError, IndexError):
    """A layer that captures and is not one of the model's."""


class PromptError(R3Error):
    """A prompts file, or one line of it, that cannot be used."""


class MetricError(R3Error):
    """Numbers that may not be compared."""


class ConfigError(R3Error):
    """A setting or a combination of settings that cannot work."""


def first_line(error: Exception) -> str:
    """Of another library's message, for a message of ours; empty if it has none."""
    return str(error).strip().partition("\n")[0]
