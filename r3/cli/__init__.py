"""The command line `r3`, one module per subject: budgeting, collecting, serving, shards, diagnosing. Shared: `r3.cli.app`.

Thin: each command parses, calls one function of the library and prints.
"""

from r3.cli import budgeting, collecting, diagnosing, serving, shards  # noqa: F401  (their commands register themselves)
from r3.cli.app import app, console, main, options_by_command, run_reporting_errors
from r3.cli.serving import starting_server

__all__ = ["app", "console", "main", "options_by_command", "run_reporting_errors", "starting_server"]
