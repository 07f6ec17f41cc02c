"""server: it comes up, and whatever happens to us, nothing of it stays. Most tests supervise a stand-in for vLLM."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from r3.errors import EngineError
from r3.rollout import server as server_module
from r3.rollout import supervise
from r3.rollout.server import VllmServer

TESTS = Path(__file__).resolve().parent

# An "API server" with an "engine core": both write their process ids; the core outlives the death of its parent.
STAND_IN = """
import http.server, os, signal, subprocess, sys, time
mode, folder, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if mode == "dies":
    print("ValueError: no such model", flush=True)
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
core = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"])
open(os.path.join(folder, "pids.tmp"), "w").write(f"{os.getpid()} {core.pid}")
os.rename(os.path.join(folder, "pids.tmp"), os.path.join(folder, "pids"))
if mode == "hangs":
    time.sleep(300)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


class StandIn(VllmServer):
    def __init__(self, mode: str, folder: Path, **options: object) -> None:
        super().__init__("stand-in", log_path=folder / "log", **options)  # type: ignore[arg-type]
        self.mode, self.folder = mode, folder

    def command(self) -> list[str]:
        return [sys.executable, "-c", STAND_IN, self.mode, str(self.folder), str(self.port)]

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self.folder / "pids").read_text().split()]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "engine" not in request.keywords:
        monkeypatch.setattr(server_module, "require_vllm", lambda: None)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def all_end(pids: list[int], seconds: float = 5.0) -> None:
    wait_for(lambda: not any(map(alive, pids)), seconds, f"still alive: {[pid for pid in pids if alive(pid)]}")


def test_a_server_lives_as_long_as_the_block(tmp_path: Path) -> None:
    with StandIn("serves", tmp_path) as server:
        assert urllib.request.urlopen(f"{server.url}/health", timeout=5).status == 200
        pids = server.pids()
        assert all(map(alive, pids))
        assert server.pid is not None
        assert os.getsid(server.pid) != os.getsid(0)  # a Ctrl-C in the terminal does not reach it
        assert os.getpgid(pids[0]) == pids[0] == os.getpgid(pids[1]) != os.getpgid(0)
    assert not any(map(alive, pids))
    server.stop()  # a second time does nothing


def test_an_exception_in_the_block_ends_it(tmp_path: Path) -> None:
    server = StandIn("serves", tmp_path)
    with pytest.raises(KeyboardInterrupt), server:
        raise KeyboardInterrupt
    assert not any(map(alive, server.pids()))


def test_a_server_that_dies_shows_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match=r"ended while starting \(exit status 3\)") as caught,
        StandIn("dies", tmp_path),
    ):
        pass
    assert "    ValueError: no such model" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)


def test_a_server_that_is_not_up_in_time(tmp_path: Path) -> None:
    server = StandIn("hangs", tmp_path, timeout_s=1.5)
    told: list[float] = []
    server._progress = lambda seconds, _: told.append(seconds)
    with pytest.raises(EngineError, match="not up yet") as caught, server:
        pass
    assert "within 1.5 s" in str(caught.value)
    assert len(told) == 1
    assert not any(map(alive, server.pids()))


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match="No such file or directory"),
        VllmServer("m", log_path=tmp_path / "no" / "log"),
    ):
        pass


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_GRACE", 0.3)
    with StandIn("stubborn", tmp_path) as server:
        pids = server.pids()
    assert not any(map(alive, pids))


PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import time, test_server
test_server.server_module.require_vllm = lambda: None
try:
    with test_server.StandIn(sys.argv[2], Path(sys.argv[3])):
        print("up", flush=True)
        time.sleep(300)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that runs a stand-in server."""
    started: list[subprocess.Popen[str]] = []

    def start(mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PARENT, str(TESTS), mode, str(tmp_path)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        wait_for((tmp_path / "pids").exists, 20, "the stand-in did not start")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("mode", ["serves", "hangs"])  # inside the block, and while waiting for the server
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_our_death_is_its_death(
    tmp_path: Path, parent: Callable[[str], subprocess.Popen[str]], mode: str, number: signal.Signals
) -> None:
    process = parent(mode)
    assert process.stdout is not None
    if mode == "serves":
        assert process.stdout.readline() == "up\n"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(alive, pids))
    process.send_signal(number)
    assert process.wait(15) == (130 if number == signal.SIGINT else -number)
    all_end(pids)


def test_the_death_of_the_api_server_ends_the_engine_core(tmp_path: Path) -> None:
    with StandIn("serves", tmp_path) as server:
        api_server, core = server.pids()
        os.kill(api_server, signal.SIGKILL)
        all_end([api_server, core])


def test_the_death_of_the_supervisor_ends_the_api_server(tmp_path: Path) -> None:
    with StandIn("serves", tmp_path) as server:
        assert server.pid is not None
        api_server, core = server.pids()
        os.kill(server.pid, signal.SIGKILL)
        all_end([api_server])
    os.kill(
        core, signal.SIGKILL
    )  # the stand-in's core, unlike vLLM's, does not end with an API server that is asked to


def test_the_supervisor_passes_the_exit_status_on() -> None:
    def run(code: str) -> int:
        command = [sys.executable, "-I", supervise.__file__, str(os.getpid()), "1", sys.executable, "-c", code]
        return subprocess.run(command, timeout=20).returncode

    assert run("raise SystemExit(7)") == 7
    assert run("import os; os.kill(os.getpid(), 9)") == 128 + 9


def test_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EngineError, match="vLLM is not installed") as caught, VllmServer("model"):
        pass
    assert "pip install" in str(caught.value)


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "is_cpu_build", lambda: False)
    server = VllmServer(
        "m", dtype="bfloat16", max_model_len=512, served_model_name="tiny", seed=3, extra_args=["--tp", "2"], port=8000
    )
    assert server.command()[1:] == [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--host", "127.0.0.1", "--port", "8000"),
        *("--dtype", "bfloat16", "--seed", "3", "--enable-return-routed-experts", "--max-model-len", "512"),
        *("--served-model-name", "tiny", "--tp", "2"),
    ]
    assert "--enable-return-routed-experts" not in VllmServer("m", routed_experts=False).command()
    monkeypatch.setattr(server_module, "is_cpu_build", lambda: True)
    assert "--enforce-eager" in VllmServer("m").command()


@pytest.mark.engine
def test_a_real_server_that_cannot_load_its_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="ended while starting") as caught, VllmServer(tmp_path / "nothing"):
        pass
    assert "nothing" in str(caught.value)


@pytest.mark.engine
def test_sigkill_of_our_process_ends_a_real_engine_core(tiny_model: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from r3.rollout.server import VllmServer\n"
        "with VllmServer(sys.argv[1], log_path=sys.argv[2], max_model_len=64) as server:\n"
        "    print(server.pid, flush=True); time.sleep(300)"
    )
    command = [sys.executable, "-c", code, str(tiny_model), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        tree = descendants(int(process.stdout.readline()))
        names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in tree]
        assert any("EngineCore" in name for name in names), names
        process.kill()
        process.wait()
    all_end(tree, seconds=20)


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in descendants(int(child)))]
