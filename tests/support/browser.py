"""A headless Chromium, driven by the DevTools protocol through two pipes.

It resolves no name and reaches this machine alone. What a page logs, and every URL that it asks for, is kept.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_SECONDS = 120.0


def find_browser() -> str | None:
    """Return the path of the browser; None if there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.logged: list[str] = []  # errors and warnings: of scripts, of the network, of the security policy
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        """Keep an event of the tab."""
        match method:
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
            case "Log.entryAdded":
                entry = parameters["entry"]
                if entry["level"] in ("error", "warning"):
                    self.logged.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
            case "Runtime.exceptionThrown":
                self.logged.append(f"exception: {parameters['exceptionDetails']}")
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.logged.append(f"console: {[one.get('value') for one in parameters['args']]}")

    def goto(self, url: str) -> None:
        """Open a page, and wait until it is loaded with its scripts."""
        self.evaluate("window.beforeThis = true")
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.wait_for("!window.beforeThis && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Wait until an expression is true, across navigations, and return its value."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(BrowserError):  # the page is being replaced
                if found := self.evaluate(script):
                    return found
            if time.monotonic() > deadline:
                raise AssertionError(f"not in time: {script}\n{self.text()[:2000]}\n{self.logged}")
            time.sleep(0.05)

    def text(self, selector: str = "body") -> str:
        """Return the text that a reader sees of an element."""
        element = f"document.querySelector({json.dumps(selector)})"
        return str(self.evaluate(f"{element}?.innerText ?? {element}?.textContent ?? ''"))

    def count(self, selector: str) -> int:
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def click(self, selector: str) -> None:
        """Click as a person does: at the middle of the element, wherever it is."""
        element = json.dumps(selector)
        self.wait_for(f"document.querySelector({element}) !== null")
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({element}); e.scrollIntoView({{block: 'center'}}); "
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def set_look(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def set_scripts(self, *, on: bool) -> None:
        """Let pages run scripts, or not, as from the next page on."""
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def screenshot(self, path: Path) -> None:
        """Save what a person sees as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._browser.close_page(self._session)


class BrowserError(Exception):
    """The browser refused a call."""


class Browser:
    """The process. A message is JSON that ends with a zero byte."""

    def __init__(self, program: str, folder: Path) -> None:
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        arguments = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-extensions", "--disable-domain-reliability", "--no-default-browser-check", "--mute-audio",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--lang=en-GB", "--force-color-profile=srgb",
            "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank",
        ]  # fmt: skip
        redirect = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "browser", str(commands), str(events), *arguments],
            pass_fds=(commands, events),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder), "TZ": "UTC"},
        )
        os.close(commands)
        os.close(events)
        self._number = 0
        self._lock = threading.Lock()
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._targets: dict[str, str] = {}
        threading.Thread(target=self._listen, name="browser", daemon=True).start()

    def __enter__(self) -> Browser:
        self.call("Browser.getVersion", {})
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)

    def open(self) -> Page:
        """Open a tab in a context of its own: it shares no cookies with others."""
        context = self.call("Target.createBrowserContext", {})["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._targets[session] = target
        self._pages[session] = page = Page(self, session)
        return page

    def close_page(self, session: str) -> None:
        self._pages.pop(session, None)
        self.call("Target.closeTarget", {"targetId": self._targets.pop(session)})

    def call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        with self._lock:
            self._number += 1
            number = self._number
            answers = self._answers[number] = queue.Queue()
            message = {"id": number, "method": method, "params": parameters}
            data = json.dumps({**message, "sessionId": session} if session else message).encode() + b"\0"
            while data:
                data = data[os.write(self._commands, data) :]
        try:
            answer = answers.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            raise BrowserError(f"no answer to {method}") from None
        finally:
            del self._answers[number]
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _listen(self) -> None:
        with open(self._events, "rb", buffering=0) as events:
            for message in _messages(events):
                if "id" in message:
                    waiting = self._answers.get(message["id"])
                    if waiting is not None:
                        waiting.put(message)
                elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                    page.note(message["method"], message["params"])


def _messages(events: Any) -> Iterator[dict[str, Any]]:
    rest = b""
    while data := events.read(1 << 16):
        *whole, rest = (rest + data).split(b"\0")
        for one in whole:
            yield json.loads(one)
