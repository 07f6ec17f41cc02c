"""Settings that come as text: a YAML file of defaults for the command line, JSON in an option. Misspelled ones are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import orjson
import yaml

from r3.errors import ConfigError


def read_defaults(path: Path, known: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
    """Defaults of options, from a YAML file with a section per command.

    Args:
        known: Options of each command. In the file they may be written with dashes, as on the command line.

    Raises:
        ConfigError: unreadable, or a section or an option that is not known: it would have no effect.
    """
    where = str(path)
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read this configuration ({error})", where=where) from None
    if not isinstance(values, dict) or not all(isinstance(section, dict) for section in values.values()):
        raise ConfigError("a configuration is sections of options", where=where, expected=f"sections {sorted(known)}")
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError("unknown sections", where=where, expected=sorted(known), got=unknown)
    defaults = {
        section: {str(option).replace("-", "_"): value for option, value in options.items()}
        for section, options in values.items()
    }
    for section, options in defaults.items():
        if unknown := sorted(set(options) - set(known[section])):
            raise ConfigError(
                f"unknown options of {section}", where=where, expected=sorted(known[section]), got=unknown
            )
    return defaults


def json_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object given as text.

    Raises:
        ConfigError: it is something else.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"not JSON ({error})", where=where, got=text) from None
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object", where=where, got=text)
    return value
