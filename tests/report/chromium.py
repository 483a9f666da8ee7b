"""A headless Chromium over its DevTools protocol on pipes: real mouse and keys, what it logs and what it fetches."""

import base64
import fcntl
import json
import os
import select
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

BINARY = next((b for n in ("chromium", "chromium-browser", "google-chrome") if (b := shutil.which(n))), None)
_TIMEOUT_S = 60.0


class Chromium:
    """A browser with one page. A context manager."""

    def __init__(self):
        assert BINARY is not None
        self._profile = tempfile.TemporaryDirectory(prefix="forebay-chromium-", ignore_cleanup_errors=True)
        read, self._write = _pipe()
        self._read, write = _pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--no-first-run",
            f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        actions = [
            (os.POSIX_SPAWN_DUP2, read, 3),
            (os.POSIX_SPAWN_DUP2, write, 4),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        self._process = os.posix_spawn(BINARY, [BINARY, *flags], dict(os.environ), file_actions=actions)
        os.close(read)
        os.close(write)
        self._buffer, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        """Whatever the page reported: console calls, exceptions, requests."""
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: Any) -> None:
        self._session = None
        self.call("Browser.close")
        os.close(self._write)
        os.close(self._read)
        os.waitpid(self._process, 0)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def open(
        self, file: Path, *, width: int = 1280, height: int = 800, dark: bool = False, mobile: bool = False
    ) -> None:
        """Opens a file in a window of that many CSS pixels; forgets earlier events."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        self.wait_for("document.readyState === 'complete'")
        self.settle()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        start = time.monotonic()
        while not self.evaluate(expression):
            assert time.monotonic() < start + _TIMEOUT_S, expression
            time.sleep(0.05)

    def settle(self) -> None:
        """Waits until what was asked to be drawn is."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """`kind` is Moved, Pressed, Released or Wheel; places are CSS pixels of the window."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)
        self.settle()

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def screenshot(self, file: Path, **parameters: Any) -> None:
        image = self.call("Page.captureScreenshot", format=file.suffix[1:], **parameters)
        file.write_bytes(base64.b64decode(image["data"]))

    def complaints(self) -> list[Any]:
        """Exceptions, what was logged, what a policy refused."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [e["params"] for e in self.events if e.get("method") in kinds]

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _TIMEOUT_S)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are out of the way of 3 and 4, which the browser takes."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
