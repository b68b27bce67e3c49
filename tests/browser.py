"""A headless Chromium for tests, driven over its DevTools protocol through a pipe. Standard library only."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 30


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page. `problems` are errors and warnings of its console; `requests` what it asked the network for."""

    def __init__(self, program: str, profile: Path):
        to_browser, self._write = (_high(fd) for fd in os.pipe())
        self._read, from_browser = (_high(fd) for fd in os.pipe())

        def connect() -> None:
            os.dup2(to_browser, 3)  # what --remote-debugging-pipe reads from and writes to
            os.dup2(from_browser, 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        flags += ["--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [program, *flags, "about:blank"],
            close_fds=False,
            preexec_fn=connect,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._read)
        os.close(self._write)

    # --- the protocol -------------------------------------------------------------------------------------------------

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; returns its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(SECONDS)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]

    def _next(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        raw, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    # --- what a person does -------------------------------------------------------------------------------------------

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size and wait until it is there."""
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self._loaded = False
        self.send("Page.navigate", url=file.resolve().as_uri())
        while not self._loaded:
            self._next(SECONDS)

    def run(self, script: str) -> Any:
        """The value of an expression in the page (awaited, where it is a promise)."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click in the middle of an element."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(f"{element}.getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        """A key, with the code that Windows gives it (that is what Chromium goes by)."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, file: Path, whole: bool = True) -> None:
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])


def _high(fd: int) -> int:
    """The same pipe under a number that is out of the way of 3 and 4."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(fd)
    return moved
