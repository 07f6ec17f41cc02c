"""guard: nothing that an engine started outlives the Ray actor that wanted it. Standard library only.

An in-process vLLM is not in the actor's process: `AsyncLLM` starts an engine core, which starts workers, and those hold the
model. Ray kills the process group of a worker that died, but only while its raylet lives, and not what has left the group. A
SIGKILL of the actor must not leave gigabytes behind either way, so the actor starts this small process first:

    python guard.py PARENT_PID PARENT_START MARK

Contract: when that process is gone, by whatever way, every process whose environment holds `R3_GUARDED=MARK` gets
SIGKILL, until there is none. The actor sets the mark before it makes the engine, and all that is started by exec after
that inherits it, at any depth and in any session or process group; vLLM is told to spawn and not to fork, because a fork
keeps the environment that the *actor* was started with. This process leaves the actor's session, so that what kills the
actor's group does not kill it first."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time

MARK = "R3_GUARDED"
_POLL = 0.1  # seconds; ten reads of /proc/PID/stat a second
_ROUNDS = 5  # empty scans before it ends: what was being started when its parent was killed has time to appear


def guard_children() -> str:
    """Guard what this process starts from now on; returns the mark. Called once per process, again returns the same mark."""
    mark = os.environ.get(MARK, "")
    if mark.startswith(f"{os.getpid()}."):
        return mark
    mark = f"{os.getpid()}.{secrets.token_hex(8)}"
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), start_time(os.getpid()), mark]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    process.wait()  # the child has forked and ended: the guard is nobody's child, so no wait or kill of children meets it
    os.environ[MARK] = mark
    return mark


def guarded(mark: str) -> list[int]:
    """Processes whose environment holds the mark; those of other users cannot be read and are not ours."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot: tells it from a later one of the same number. "" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold spaces
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()  # proc(5): state is field 3, starttime field 22


def main(parent: int, started: str, mark: str) -> None:
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends by itself when there is nothing to guard
    while start_time(parent) == started:
        time.sleep(_POLL)
    empty = 0
    while empty < _ROUNDS:
        pids = guarded(mark)
        empty = 0 if pids else empty + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
