"""A headless chromium steered over a pipe by its debugging protocol: just enough to open a page, ask it and click."""

import json
import os
import selectors
import subprocess
import time
from pathlib import Path

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
    "--remote-debugging-pipe",
)


class Browser:
    """One process; ``open`` gives a page in a tab of its own."""

    def __init__(self, program: str, profile: Path):
        ours_in, self._write = os.pipe()
        self._read, ours_out = os.pipe()
        # the protocol is read from descriptor 3 and written to 4
        shell = f'exec "$0" "$@" 3<&{ours_in} 4>&{ours_out}'
        command = ["bash", "-c", shell, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(ours_in, ours_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(ours_in)
        os.close(ours_out)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self._buffer = b""
        self._number = 0
        self.events: list[dict] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            self.ask("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._selector.close()

    def ask(self, method: str, session: str | None = None, /, **params) -> dict:
        """Sends a command and waits for its answer; events that arrive meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self, until: float) -> dict:
        while b"\0" not in self._buffer:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                raise TimeoutError("chromium did not answer in time")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise OSError("chromium ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path) -> "Page":
        """Loads a file and waits until its script has drawn everything."""
        self.events.clear()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable", session)
        page = Page(self, session, target)
        page.screen()
        self.ask("Page.navigate", session, url=path.as_uri())
        page.wait("document.documentElement?.dataset.ready === 'yes'")
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target: str):
        self._browser = browser
        self._session = session
        self._target = target

    def run(self, script: str):
        """The value of an expression in the page."""
        answer = self._browser.ask(
            "Runtime.evaluate", self._session, expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition} did not come true; {self.problems()}")
            time.sleep(0.05)

    def screen(self, *, width: int = 1300, height: int = 1000, dark: bool = False) -> None:
        """Changes the size of the window and the colours the reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._browser.ask("Emulation.setDeviceMetricsOverride", self._session, **size)
        self._browser.ask("Emulation.setEmulatedMedia", self._session, features=[scheme])

    def hover(self, x: float, y: float) -> None:
        self.run(f"window.scrollTo(0, {y} - innerHeight / 2)")
        y -= self.run("scrollY")
        for shift in (-3, 0):
            self._browser.ask("Input.dispatchMouseEvent", self._session, type="mouseMoved", x=x + shift, y=y)

    def requests(self) -> list[str]:
        """Every address the page asked for."""
        return [
            e["params"]["request"]["url"] for e in self._browser.events if e["method"] == "Network.requestWillBeSent"
        ]

    def problems(self) -> list[str]:
        """Uncaught exceptions and errors on the console."""
        thrown = [
            e["params"]["exceptionDetails"] for e in self._browser.events if e["method"] == "Runtime.exceptionThrown"
        ]
        logged = [e["params"]["entry"] for e in self._browser.events if e["method"] == "Log.entryAdded"]
        errors = [f"{entry['text']} {entry.get('url', '')}" for entry in logged if entry["level"] == "error"]
        return [str(details.get("exception", details)) for details in thrown] + errors

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)
