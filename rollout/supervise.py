"""supervise: run one server so that nothing of it outlives the process that wanted it. Standard library only.

vLLM's API server starts an engine core, which starts workers; killed with SIGKILL it leaves them running with all of the
model in memory (seen with 0.30.0). PR_SET_PDEATHSIG alone does not help: it reaches one process, not its children, and fires
when the *thread* that started it ends. So `r3.rollout.server` starts this small process between itself and the server:

    python supervise.py PARENT_PID GRACE_SECONDS COMMAND...

Contract: the command runs in a process group of its own. When the command ends, when PARENT_PID is no longer this process's
parent (SIGKILL included), or on SIGTERM, the command gets SIGTERM, after the grace its whole group gets SIGKILL, and this
process ends with the command's exit status (128 + signal if it was killed). Should this process be killed itself, the
command gets SIGTERM by PR_SET_PDEATHSIG: this process has one thread, which ends when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL = 0.1  # seconds; ten system calls a second


def main(arguments: list[str]) -> int:
    parent, grace, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    stop = False

    def on_signal(_number: int, _frame: object) -> None:
        nonlocal stop
        stop = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_supervisor
    )
    try:
        while not stop and os.getppid() == parent and not _ended(process.pid):
            time.sleep(_POLL)
        if not _ended(process.pid):
            os.kill(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline and not _ended(process.pid):
                time.sleep(_POLL)
    finally:
        # Before the leader is reaped: until then its number cannot be given to another process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    return status if status >= 0 else 128 - status


def _die_with_supervisor() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ended(pid: int) -> bool:
    """Whether a child has ended, leaving it unreaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
