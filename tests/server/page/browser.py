"""A real browser without a window, driven through its own protocol."""

import asyncio
import base64
import json

import choreographer
import pytest

from autoshard.report.images import ImageError, find_browser

_TIMEOUT_S = 60
#: Keys that are no letters, with their codes (Windows' virtual keys) and the text that they type.
_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "Escape": (27, ""), "ArrowDown": (40, "")}

try:
    find_browser()
    NO_BROWSER = ""
except ImageError as error:
    NO_BROWSER = str(error)

needs_browser = pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER)


class Page:
    """One tab.

    Attributes:
        problems: Errors of scripts and of the console, and what the page's policy forbade.
        hosts: Origins of all requests.
    """

    def __init__(self, tab):
        self._tab = tab
        self.problems, self.hosts = [], set()

    async def listen(self):
        """Takes note of problems and requests from now on."""
        for name, take in (
            ("Runtime.exceptionThrown", lambda one: self.problems.append(json.dumps(one)[:600])),
            ("Log.entryAdded", self._log),
            ("Network.requestWillBeSent", self._request),
        ):
            self._tab.subscribe(name, self._taker(take))
        for domain in ("Runtime", "Log", "Network", "Page", "DOM"):
            await self.send(f"{domain}.enable")

    async def open(self, url):
        """Goes to an address."""
        await self.send("Page.navigate", url=url)

    def _taker(self, take):
        async def taken(message):
            take(message["params"])

        return taken

    def _request(self, params):
        url = params["request"]["url"]
        if not url.startswith(("data:", "blob:")):  # these ask nobody
            self.hosts.add("/".join(url.split("/")[:3]))

    def _log(self, params):
        entry = params["entry"]
        if entry["level"] == "error" and entry.get("source") != "network":  # refusals are expected, and shown
            self.problems.append(entry["text"])

    async def send(self, command, **parameters):
        """Sends a command; returns its result."""
        answer = await self._tab.send_command(command, params=parameters)
        assert "error" not in answer, answer
        return answer["result"]

    async def value(self, expression):
        """What an expression of JavaScript is worth."""
        found = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression, seconds=_TIMEOUT_S):
        """Waits until an expression holds; returns its value."""
        for _ in range(int(seconds * 10)):
            found = await self.value(f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()")
            if found:
                return found
            await asyncio.sleep(0.1)
        shown = await self.value("document.body.innerText")
        raise AssertionError(f"{expression} does not become true; {self.problems}; {shown[:2000]}")

    async def shown(self, element):
        """Waits until an element with an id takes up room."""
        await self.until(f"document.getElementById({json.dumps(element)}).offsetHeight > 0")

    async def text(self, element):
        """The text of an element with an id."""
        return await self.value(f"document.getElementById({json.dumps(element)}).textContent")

    async def go(self, view):
        """Goes to a view by its address."""
        await self.value(f"location.hash = {json.dumps(f'#{view}')}")

    async def click(self, selector):
        """Clicks as a user does."""
        await self.value(f"document.querySelector({json.dumps(selector)}).click()")

    async def fill(self, selector, text):
        """Gives a field its text."""
        place = f"document.querySelector({json.dumps(selector)})"
        await self.value(
            f"{place}.value = {json.dumps(text)}; {place}.dispatchEvent(new Event('change', {{ bubbles: true }}))"
        )

    async def press(self, key, times=1):
        """Presses a key: a letter, or one that has a name."""
        code, text = _KEYS.get(key, (ord(key.upper()[0]), key))
        for _ in range(times):
            settings = {"key": key, "windowsVirtualKeyCode": code}
            await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **settings)
            await self.send("Input.dispatchKeyEvent", type="keyUp", **settings)

    async def type(self, text):
        """Types letters, one after the other."""
        for letter in text:
            await self.press(letter)

    async def upload(self, selector, *files):
        """Chooses files at a file input."""
        document = await self.send("DOM.getDocument")
        found = await self.send("DOM.querySelector", nodeId=document["root"]["nodeId"], selector=selector)
        await self.send("DOM.setFileInputFiles", nodeId=found["nodeId"], files=[str(file) for file in files])

    async def resize(self, width=1280, height=900, dark=False):
        """Sets the size of the window in pixels, and its colours."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, file, **window):
        """Writes a picture of the window."""
        await self.resize(**window)
        await asyncio.sleep(0.5)
        image = await self.send("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(image["data"]))


def browse(play):
    """Runs a coroutine function with a page of a new browser."""

    async def run():
        async with choreographer.Browser(headless=True, enable_sandbox=False) as browser:
            page = Page(await browser.create_tab(""))
            await page.listen()
            await page.resize()
            return await play(page)

    return asyncio.run(run())
