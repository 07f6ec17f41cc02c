"""What a check says, and where a configuration's values are found: the two nouns of the doctor.

A check is one function that looks at one thing and returns a `Check`, or None where there is nothing to say. It never raises for
what it was made to find, and it never says red or yellow without a remedy.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from r3.errors import ConfigError, R3Error

Level = Literal["green", "yellow", "red", "none"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at, in words: `capture flag`.
        level: `red`: replay will not work, or numbers will be wrong; `yellow`: it works, with a cost or a risk that should be
            known; `green`; `none`: for information, nothing was asked about it.
        text: What was found.
        remedy: What to do about it; never empty for red and yellow.
        where: The server, file or directory.
    """

    name: str
    level: Level
    text: str
    remedy: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        if self.level in ("red", "yellow") and not self.remedy:
            raise ValueError(f"check {self.name!r} is {self.level} without a remedy")


def green(name: str, text: str) -> Check:
    return Check(name, "green", text)


def yellow(name: str, text: str, remedy: str) -> Check:
    return Check(name, "yellow", text, remedy)


def red(name: str, text: str, remedy: str) -> Check:
    return Check(name, "red", text, remedy)


def refused(name: str, error: R3Error) -> Check:
    """An error as a red check: its message is the finding, its remedy the remedy."""
    facts = (("expected", error.expected), ("got", error.got))
    found = "".join(f", {word} {value}" for word, value in facts if value is not None)
    return Check(name, "red", f"{error.what}{found}", error.remedy or "see the message", error.where or "")


class Settings:
    """The values of a configuration, found by their names, however the file nests and spells them.

    Names are compared in lower case, with dashes as underscores and leading dashes dropped. `get("moe_router_fusion")` finds
    `--moe-router-fusion` of a command line and `actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_fusion`
    of a YAML file alike. A value that only its own program knows counts as absent: `${...}`, and `???` for one still to be given.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.where = where
        self.flat: dict[str, Any] = {}
        self._add("", values)

    def _add(self, prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            name = f"{prefix}{str(key).lstrip('-+').replace('-', '_').lower()}"
            if isinstance(value, Mapping):
                self._add(f"{name}.", value)
            elif not (isinstance(value, str) and ("${" in value or value == "???")):
                self.flat[name] = value

    def __contains__(self, name: str) -> bool:
        return self._key(name) is not None

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of the names that the file has; None in the file counts as absent."""
        for name in names:
            key = self._key(name)
            if key is not None and self.flat[key] is not None:
                return self.flat[key]
        return default

    def number(self, *names: str) -> float | None:
        """As `get`; None for what is no number."""
        value = self.get(*names)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def on(self, *names: str) -> bool:
        """Whether a switch is on."""
        return self.get(*names) in (True, 1, "true", "True", "1")

    def under(self, *prefixes: str) -> Settings:
        """The values below sections, with those prefixes taken off; later ones override earlier ones."""
        out = Settings({}, self.where)
        for prefix in prefixes:
            out.flat.update(
                {key.removeprefix(prefix): value for key, value in self.flat.items() if key.startswith(prefix)}
            )
        return out

    def _key(self, name: str) -> str | None:
        if name in self.flat:
            return name
        return next((key for key in self.flat if key.endswith(f".{name}")), None)


def read_settings(path: Path) -> Settings:
    """A YAML or JSON file, or a shell script (or text file) with a program's options.

    Of a script, `--name value`, `--name=value` and Hydra's `a.b.c=value` are read; values from shell variables are not.

    Raises:
        ConfigError: it cannot be read, or holds no settings.
    """
    try:
        text = path.read_text()
        values = (
            yaml.safe_load(text)
            if path.suffix in (".yaml", ".yml")
            else json.loads(text)
            if path.suffix == ".json"
            else options_of(text)
        )
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read this configuration ({error})", where=str(path)) from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(
            "no settings in this file",
            where=str(path),
            expected="a YAML or JSON mapping, or a script with --options",
            remedy="give the file that the trainer or the engine is started with (Hydra keeps one in .hydra/config.yaml)",
        )
    return Settings(values, str(path))


def options_of(text: str) -> dict[str, Any]:
    """`--name value` and `a.b=value` of a shell script."""
    found: dict[str, Any] = {}
    name = ""
    for word in shlex.split(text.replace("\\\n", " "), comments=True):
        word = word.strip("()")
        assignment = re.fullmatch(r"(--[\w.-]+|\+{0,2}[A-Za-z_]\w*(?:\.\w+)+)=(.*)", word, re.DOTALL)
        if assignment:
            found[assignment[1]], name = _value(assignment[2]), ""
        elif re.fullmatch(r"--[A-Za-z][\w.-]*", word):
            found[word], name = True, word
        elif name and word and not word.startswith("$"):
            found[name], name = _value(word), ""  # of several values, the first
        else:
            if name and word:
                found[name] = "${" + word  # known to be set, not to what
            name = ""
    return found


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
