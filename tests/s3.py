"""A real S3 server for tests: moto's, in a process of its own, behind a layer that breaks what it is told to break.

    python tests/s3.py        serve on a free port and print it

The layer stands in front of the server as a network does: it answers in its place, cuts connections in the middle of a body,
loses answers, holds requests. It counts requests and bytes. Writes pass it one after the other: S3 promises that of two
conditional puts one fails, and moto looks whether a key is there and then writes it, without a lock.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
_ERRORS = {
    "SlowDown": ("503 Service Unavailable", "Please reduce your request rate."),
    "InternalError": ("500 Internal Server Error", "We encountered an internal error. Please try again."),
    "AccessDenied": ("403 Forbidden", "Access Denied"),
    "ConditionalRequestConflict": ("409 Conflict", "The conditional request cannot succeed."),
}


class Server:
    """The client side of the process: faults to come, and what was asked so far."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"

    def fault(self, kind: str, *, method: str = "", match: str = "", times: int = 1) -> None:
        """Break the next `times` requests of this method whose URL contains `match`.

        Kinds: a code of `_ERRORS`; `cut`: half of the answer's body; `reset`: in the middle of the request's body; `lost`: done,
        and not answered; `hold`: nothing is read for 30 s; `replace`: the condition of a conditional put is ignored.
        """
        self._ask("/-/fault", {"kind": kind, "method": method, "match": match, "times": times})

    def clear(self) -> None:
        """Forget faults and requests."""
        self._ask("/-/clear", {})

    def requests(self) -> list[dict[str, Any]]:
        """method, url, status, bytes in, bytes out of each request since `clear`."""
        found: list[dict[str, Any]] = self._ask("/-/requests", {})
        return found

    def methods(self) -> list[str]:
        return [each["method"] for each in self.requests()]

    def wait_for(self, count: int, match: str) -> None:
        """Until so many requests have begun whose URL contains `match`."""
        end = time.monotonic() + 20
        while sum(match in url for url in self._ask("/-/begun", {})) < count:
            assert time.monotonic() < end, f"no {count} requests for {match}"
            time.sleep(0.01)

    def bucket(self) -> str:
        """A new bucket."""
        name = f"b-{uuid.uuid4().hex[:12]}"
        with urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")):
            return name

    def _ask(self, path: str, body: Any) -> Any:
        with urllib.request.urlopen(self.endpoint + path, json.dumps(body).encode()) as answer:
            return json.loads(answer.read())


@functools.cache
def _started() -> tuple[subprocess.Popen[str], Server]:
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Server(int(process.stdout.readline()))


@pytest.fixture(scope="session")
def server_process() -> Iterator[Server]:
    """One for the session, started when the first test asks for it.

    For all modules that import this fixture, to each of which it is another one: s3fs keeps the endpoint that it saw first.
    """
    process, server = _started()
    yield server
    process.kill()
    process.wait()


@pytest.fixture
def server(server_process: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, with credentials and endpoint in the environment, as a user gives them, and short pauses between retries."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server_process.endpoint, "AWS_MAX_ATTEMPTS": "3"}.items():
        monkeypatch.setenv(name, value)
    server_process.clear()
    return server_process


@pytest.fixture
def bucket(server: Server) -> str:
    return f"s3://{server.bucket()}"


class _Layer:
    """The WSGI application."""

    def __init__(self, application: Any) -> None:
        self.application, self.faults, self.done, self.begun = application, [], [], []
        self.lock, self.writing = threading.Lock(), threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        path = environ["PATH_INFO"]
        if path.startswith("/-/"):
            return self._control(path[3:], environ, start)
        method, url = environ["REQUEST_METHOD"], path + "?" + environ.get("QUERY_STRING", "")
        with self.lock:
            self.begun.append(f"{method} {url}")
            fault = next((f for f in self.faults if f["method"] in ("", method) and f["match"] in url), None)
            if fault is not None:
                fault["times"] -= 1
                self.faults = [f for f in self.faults if f["times"] > 0]
        kind = fault["kind"] if fault else ""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if kind == "hold":
            time.sleep(30)
        if kind == "reset":
            environ["wsgi.input"].read(length // 2)
            return self._drop(environ)
        try:
            body = environ["wsgi.input"].read(length)
        except Exception:  # the client is gone
            body = b""
        if len(body) < length:
            return self._drop(environ)
        if kind == "replace":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        environ["wsgi.input"] = io.BytesIO(body)
        if kind in _ERRORS:
            status, message = _ERRORS[kind]
            headers, answer = [("Content-Type", "application/xml")], _ERROR.format(kind, message).encode()
        else:
            status, headers, answer = self._served(environ, method)
        with self.lock:
            sent = 0 if method == "HEAD" else len(answer)
            self.done.append({"method": method, "url": url, "status": int(status[:3]), "in": len(body), "out": sent})
        if kind == "lost":
            return self._drop(environ)
        start(status, headers)
        return self._half(environ, answer) if kind == "cut" else [answer]

    def _served(self, environ: dict[str, Any], method: str) -> tuple[str, list[tuple[str, str]], bytes]:
        told: list[Any] = []
        with self.writing if method in ("PUT", "POST", "DELETE") else contextlib.nullcontext():
            answer = b"".join(self.application(environ, lambda *arguments: told.extend(arguments[:2])))
        return told[0], told[1], answer

    def _half(self, environ: dict[str, Any], answer: bytes) -> Iterator[bytes]:
        yield answer[: len(answer) // 2]
        self._drop(environ)

    def _drop(self, environ: dict[str, Any]) -> list[bytes]:
        """End the connection with a reset."""
        connection = environ["werkzeug.socket"]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        os.close(connection.detach())
        raise ConnectionResetError

    def _control(self, what: str, environ: dict[str, Any], start: Any) -> list[bytes]:
        asked = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self.lock:
            if what == "fault":
                self.faults.append(asked)
            elif what == "clear":
                self.faults, self.done, self.begun = [], [], []
            answer = json.dumps({"requests": self.done, "begun": self.begun}.get(what)).encode()
        start("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]


def serve() -> None:
    import logging

    os.environ["S3_UPLOAD_PART_MIN_SIZE"] = str(1 << 18)  # 5 MB of S3 would make the tests long; read by moto's import
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    layer = _Layer(DomainDispatcherApplication(create_backend_app))
    running = make_server("127.0.0.1", 0, layer, threaded=True, request_handler=MotoRequestHandler)
    print(running.server_address[1], flush=True)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - werkzeug prints a traceback for each connection that is cut
    running.serve_forever()


if __name__ == "__main__":
    serve()
