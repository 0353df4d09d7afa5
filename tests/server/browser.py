"""A real browser without a window, driven through its own protocol."""

import asyncio
import base64
import json

import choreographer

_TIMEOUT_S = 60


class Page:
    """One tab.

    Attributes:
        problems: Errors of scripts and of the console, and what the page's policy forbade.
        hosts: Origins of all requests.
    """

    def __init__(self, tab):
        self._tab = tab
        self.problems, self.hosts = [], set()

    async def open(self, url):
        """Goes to an address, and listens."""
        for name, take in (
            ("Runtime.exceptionThrown", lambda one: self.problems.append(json.dumps(one)[:600])),
            ("Log.entryAdded", self._log),
            ("Network.requestWillBeSent", lambda one: self.hosts.add("/".join(one["request"]["url"].split("/")[:3]))),
        ):
            self._tab.subscribe(name, self._taker(take))
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)

    def _taker(self, take):
        async def taken(message):
            take(message["params"])

        return taken

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

    async def click(self, selector):
        """Clicks as a user does."""
        await self.value(f"document.querySelector({json.dumps(selector)}).click()")

    async def fill(self, selector, text):
        """Gives a field its text."""
        place = f"document.querySelector({json.dumps(selector)})"
        await self.value(f"{place}.value = {json.dumps(text)}; {place}.dispatchEvent(new Event('change'))")

    async def picture(self, file, width=1280, height=900, dark=False):
        """Writes a picture of the window."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await asyncio.sleep(0.5)
        image = await self.send("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(image["data"]))


def browse(play):
    """Runs a coroutine function with a page of a new browser."""

    async def run():
        async with choreographer.Browser(headless=True, enable_sandbox=False) as browser:
            page = Page(await browser.create_tab(""))
            return await play(page)

    return asyncio.run(run())
