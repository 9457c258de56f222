"""A real browser for tests: Chromium without a window, driven through the two pipes of its DevTools protocol.

TEST_BROWSER names the program; `.ci/browser` installs Debian's and says where it is. Without it the tests
that need one are skipped, because the others need nothing but Python; with it they run, and fail where it
cannot be started.
"""

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

ENVIRON = "TEST_BROWSER"
WITHOUT = f"no browser: `.ci/browser` installs Chromium, {ENVIRON}=PROGRAM has the tests use it"
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WITHIN_S = 60.0
"""How long a page may take to show something. A busy machine takes seconds for what takes none."""

_SHELL = 'exec "$@" 3<&"$FROM" 4>&"$TO"'  # the browser reads commands from 3, and writes to 4
_CLICK = """(selector) => {
  const one = document.querySelector(selector);
  one?.scrollIntoView({ block: "center", behavior: "instant" });
  const box = one?.getBoundingClientRect();
  const hit = box?.width ? document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) : null;
  if (!hit || !one.contains(hit)) return false;
  hit.closest("a, button, input")?.focus();
  hit.click();
  return true;
}"""
_KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    " ": ("Space", 32, " "),
}


def described() -> str:
    """Return what the browser is, for the report's header."""
    program = os.environ.get(ENVIRON)
    return f"browser: {program}" if program else WITHOUT


class Page:
    """One open page.

    Attributes:
        requested: Every URL that it asked for.
        complaints: What it logged as an error, threw, or was refused.
    """

    def __init__(self, sending: int, receiving: int) -> None:
        self._sending = sending
        self._receiving = receiving
        self._number = 0
        self._session = ""
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._heard = anyio.Event()
        self.requested: list[str] = []
        self.complaints: list[str] = []

    async def command(self, method: str, **params: Any) -> Mapping[str, Any]:
        """Return the result of a DevTools command."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        await anyio.to_thread.run_sync(os.write, self._sending, data)
        with anyio.fail_after(WITHIN_S):
            while number not in self._answers:
                await self._heard.wait()
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: Mapping[str, Any] = answer["result"]
        return result

    async def listen(self) -> None:
        """Take in what the browser says, until cancelled."""
        held = b""
        while True:
            await anyio.wait_readable(self._receiving)
            part = os.read(self._receiving, 1 << 20)
            assert part, "the browser has ended"
            *messages, held = (held + part).split(b"\0")
            for message in messages:
                self._take(json.loads(message))

    def _take(self, message: Mapping[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            self._heard.set()
            self._heard = anyio.Event()
            return
        params = message["params"]
        match message["method"]:
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
                self.complaints.append(json.dumps(params["entry"]))

    async def attach(self) -> None:
        """Open a page."""
        target = await self.command("Target.createTarget", url="about:blank")
        found = await self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.command(f"{domain}.enable")

    async def look_like(self, scheme: str, width: int = 1280, height: int = 900) -> None:
        """Prefer `light` or `dark`, in a window of that size."""
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.command("Emulation.setEmulatedMedia", features=wanted)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.command("Emulation.setDeviceMetricsOverride", **size)

    @asynccontextmanager
    async def behind(self) -> AsyncIterator[None]:
        """Have another tab before this one, which is hidden then: it draws no frames."""
        target = await self.command("Target.createTarget", url="about:blank")
        try:
            yield
        finally:
            await self.command("Target.closeTarget", targetId=target["targetId"])

    async def go(self, url: str) -> None:
        """Load a page."""
        await self.command("Page.navigate", url=url)

    async def js(self, expression: str) -> Any:
        """Return what an expression comes to, awaited."""
        found = await self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Return what an expression comes to, as soon as that is true; it is asked at every frame."""
        wait = f"new Promise((done) => {{ const look = () => {{ const found = ({expression}); \
found ? done(found) : requestAnimationFrame(look); }}; look(); }})"
        with anyio.move_on_after(WITHIN_S / 2):
            return await self.js(wait)
        raise AssertionError(f"not within {WITHIN_S / 2:g} s: {expression}\n{self.complaints}")

    async def key(self, name: str, modifiers: int = 0) -> None:
        """Press a key. Modifiers: 2 is Control, 8 is Shift."""
        code, number, text = _KEYS[name]
        fields = {"key": name, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        down = {"type": "keyDown", "text": text} if text and not modifiers else {"type": "rawKeyDown"}
        await self.command("Input.dispatchKeyEvent", **fields, **down)
        await self.command("Input.dispatchKeyEvent", **fields, type="keyUp")

    async def write(self, text: str) -> None:
        """Type text into what is focused."""
        await self.command("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        """Click what is seen in the middle of an element, in one step: a page moves what is in it."""
        await self.until(f"({_CLICK})({json.dumps(selector)})")


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """Run a browser with a profile of its own in `folder`, and yield a page; skipped where there is none."""
    program = os.environ.get(ENVIRON)
    if not program:
        pytest.skip(WITHOUT)
    with _running(program, folder) as page:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(page.listen)
            await page.attach()
            yield page
            tasks.cancel_scope.cancel()


@contextmanager
def _running(program: str, folder: Path) -> Iterator[Page]:
    assert Path(program).is_file(), f"{ENVIRON} names no program: {program}"
    from_us, to_browser = os.pipe()
    to_us, from_browser = os.pipe()
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            ["bash", "-c", _SHELL, "bash", program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            env={**os.environ, "FROM": str(from_us), "TO": str(from_browser), "HOME": str(folder)},
            pass_fds=(from_us, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    os.close(from_us)
    os.close(from_browser)
    try:
        yield Page(to_browser, to_us)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser)
        os.close(to_us)
