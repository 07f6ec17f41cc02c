"""A headless Chromium, driven over the DevTools protocol: what tests of the report's page open it with.

    async with Browser() as browser:
        page = await browser.open(path, width=390, dark=True)

A page's console messages, exceptions and requests are recorded from before it loads.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find() -> str | None:
    """The browser to use: R3_CHROMIUM, or the first of NAMES on PATH."""
    given = os.environ.get("R3_CHROMIUM")
    return given or next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.console: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
                continue
            method, values = data["method"], data["params"]
            if method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                self.console.append(str([each.get("value", each.get("description")) for each in values["args"]]))
            elif method == "Runtime.exceptionThrown":
                self.console.append(str(values["exceptionDetails"]))
            elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                self.console.append(values["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])

    async def call(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": values})
        answer = await asyncio.wait_for(future, 60)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = 60) -> None:
        for _ in range(int(seconds * 10)):
            if await self.run(script):
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"never true: {script}; console: {self.console}")

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1} if whole else None
        options = {"clip": clip, "captureBeyondViewport": True} if clip else {}
        answer = await self.call("Page.captureScreenshot", format="png", **options)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await self._socket.close()


class Browser:
    """One process with a fresh profile, ended with the block."""

    async def __aenter__(self) -> Browser:
        binary = find()
        assert binary is not None
        self._profile = tempfile.mkdtemp(prefix="r3-chromium-")
        self._process = subprocess.Popen(
            [binary, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._session = aiohttp.ClientSession(trust_env=False)
        self._pages: list[Page] = []
        try:
            self._url = f"http://127.0.0.1:{await self._port()}"
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _port(self) -> str:
        file = Path(self._profile) / "DevToolsActivePort"
        for _ in range(600):
            if file.is_file() and len(lines := file.read_text().splitlines()) == 2:
                return lines[0]
            assert self._process.poll() is None, "the browser ended while starting"
            await asyncio.sleep(0.1)
        raise TimeoutError("the browser does not say where it listens")

    async def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> Page:
        """A file of this disk, loaded."""
        async with self._session.put(f"{self._url}/json/new?about:blank") as response:
            target = await response.json()
        page = Page(await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0))
        self._pages.append(page)
        for domain in ("Runtime", "Log", "Network", "Page"):
            await page.call(f"{domain}.enable")
        mobile = width < 600
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.call("Emulation.setEmulatedMedia", features=[scheme])
        await page.call("Page.navigate", url=path.resolve().as_uri())
        return page

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for page in self._pages:
            await page.close()
        with contextlib.suppress(aiohttp.ClientError, AttributeError):  # it may not have come as far as a URL
            async with self._session.get(f"{self._url}/json/version") as response:
                version = await response.json()
            async with self._session.ws_connect(version["webSocketDebuggerUrl"]) as socket:
                await socket.send_json({"id": 1, "method": "Browser.close"})
        await self._session.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)
