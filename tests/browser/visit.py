"""Page object for browser tests; elements are found by their ``elem_id``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from playwright.sync_api import Dialog, Download, Locator, Page, expect

PATIENCE_S = 200.0
"""For what happens within seconds, unless the machine is busy."""

TYPED = 3
"""Number of characters that are typed key by key; the rest is filled in at once, because each key costs a request."""

WATCH = """
window.seen = [];
const look = () => {
    const picture = document.querySelector('#picture img');
    const now = {
        picture: picture ? picture.currentSrc || picture.src : '',
        caption: (document.querySelector('#caption') || {}).textContent || '',
        gallery: document.querySelectorAll('#gallery .thumbnail-item img, #gallery .grid-wrap img').length,
        stop: [...document.querySelectorAll('#stop')].some(button => button.offsetParent !== null),
    };
    const last = window.seen[window.seen.length - 1];
    if (JSON.stringify(last) !== JSON.stringify(now)) window.seen.push(now);
};
const all = { subtree: true, childList: true, characterData: true, attributes: true };
new MutationObserver(look).observe(document, all);
"""
"""Writes down whatever the picture, its caption and the gallery ever showed: nothing that flashes by is missed."""


class Visit:
    """An open page in a browser, with the hosts that it requested and its errors."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.hosts: set[str] = set()
        self.errors: list[str] = []
        page.context.on("request", lambda request: self._note(request.url))
        page.on("websocket", lambda socket: self._note(socket.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._refuse)
        page.add_init_script(WATCH)

    def open(self, url: str, *, is_ready: bool = True) -> None:
        """Open the page and wait until it is usable, with its models listed if ``is_ready``."""
        self.page.goto(url)
        if not is_ready:
            return expect(self.field("prompt")).to_be_editable()
        self.expect_ready()

    def expect_ready(self) -> None:
        """Check that the page lists its models and is usable."""
        expect(self.part("about")).to_contain_text(re.compile(r"\w+ on \w+"))
        expect(self.part("quality")).to_contain_text("steps")
        expect(self.field("prompt")).to_be_editable()
        expect(self.part("generate")).to_be_enabled()

    def part(self, name: str) -> Locator:
        return self.page.locator(f"#{name}")

    def field(self, name: str) -> Locator:
        """Return the text input of ``name``."""
        part = self.part(name)
        inside = part.locator("textarea, input:not([type=range]):not([type=file])")
        return inside.or_(self.page.locator(f"textarea#{name}, input#{name}")).first

    def write(self, name: str, text: str | int | float) -> None:
        """Type into a field, the last part key by key, and leave the field.

        Text that is typed while Gradio still mounts the field may be lost, so the input is repeated then.
        """
        self.reveal(name)
        field, text = self.field(name), str(text)
        for _ in range(3):
            field.fill(text[:-TYPED])
            field.press_sequentially(text[-TYPED:])
            field.blur()
            if field.input_value() == text:
                break

    def choose(self, name: str, choice: str) -> None:
        """Select the radio button whose label begins with this text."""
        self.reveal(name)
        label = re.compile(rf"^\s*{re.escape(choice)}", re.IGNORECASE)
        self.part(name).locator("label:has(input)").filter(has_text=label).locator("input").check()

    def pick(self, name: str, *choices: str) -> None:
        """Select exactly ``choices`` in a multiselect, each typed and confirmed with Enter."""
        field, taken = self.field(name), self.part(name).locator(".token")
        field.click()
        while (num_taken := taken.count()) > 0:
            field.press("Backspace")
            expect(taken).to_have_count(num_taken - 1)
        for choice in choices:
            field.fill(choice)
            field.press("Enter")
        expect(taken).to_have_count(len(choices))
        field.blur()

    def press(self, name: str) -> None:
        self.reveal(name)
        self.part(name).click()

    def reveal(self, name: str) -> None:
        """Show the group of settings with ``name`` if another one is shown."""
        self.page.evaluate(
            """name => {
                const group = document.getElementById(name)?.closest('.group');
                if (group && !group.offsetParent) document.querySelector(`#groups input[value=${group.id}]`).click();
            }""",
            name,
        )

    def set_advanced(self, **fields: str | float) -> None:
        """Fill in settings; underscores stand for the dashes of their names."""
        for name, value in fields.items():
            self.write(name.replace("_", "-"), value)

    def upload(self, name: str, file: Path) -> None:
        """Upload ``file`` with the button ``name``, through the browser's file dialog."""
        with self.page.expect_file_chooser() as choosing:
            self.press(name)
        choosing.value.set_files(file)

    def paint(self) -> None:
        """Press Generate and wait until the caption reports the result without a progress bar."""
        num_seen = len(self.recorded_states())
        self.press("generate")
        self.until(
            """from => window.seen.slice(from).some(each => each.caption !== window.seen[from - 1].caption)
                && !document.querySelector('#caption .bar')""",
            num_seen,
        )
        self.until_rested()

    def caption(self) -> str:
        return self.part("caption").inner_text()

    def expect_caption(self, pattern: str) -> None:
        self.expect_text("caption", pattern)

    def expect_text(self, name: str, pattern: str) -> None:
        expect(self.part(name)).to_contain_text(re.compile(pattern, re.IGNORECASE | re.DOTALL))

    def slow_down(self, latency_ms: float) -> None:
        """Delay each request of the page from now on."""
        session = self.page.context.new_cdp_session(self.page)
        limits = {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
        session.send("Network.enable")
        session.send("Network.emulateNetworkConditions", {**limits, "latency": latency_ms})

    def delay_next_response(self, delay_ms: float) -> None:
        """Deliver the response of the next short event late, so that later ones overtake it."""
        self.page.evaluate(
            """delay_ms => {
                const original = window.fetch;
                window.fetch = async (...request) => {
                    const isEvent = String(request[0]).includes('/run/predict');
                    if (isEvent) window.fetch = original;
                    const response = await original(...request);
                    if (isEvent) await new Promise(resolve => setTimeout(resolve, delay_ms));
                    return response;
                };
            }""",
            delay_ms,
        )

    def until(self, condition: str, argument: Any = None) -> None:
        """Wait until a JavaScript function of ``argument`` is true."""
        self.page.wait_for_function(condition, arg=argument, timeout=PATIENCE_S * 1000)

    def until_painting(self) -> None:
        """Wait until the caption counts steps or the share of several images."""
        self.expect_caption(r"step [1-9]|[1-9]\d* % done")

    def until_rested(self) -> None:
        """Wait until Generate is visible again."""
        expect(self.part("stop")).to_be_hidden()
        expect(self.part("generate")).to_be_visible()
        expect(self.part("generate")).to_be_enabled()

    def gallery(self) -> Locator:
        return self.part("gallery").locator(".thumbnail-item img, .grid-wrap img")

    def recorded_states(self) -> list[dict[str, Any]]:
        """Return the recorded states of the page in order.

        Each has the image, the caption, the gallery size, and whether Stop was visible.
        """
        shown: list[dict[str, Any]] = self.page.evaluate("window.seen")
        return shown

    def download(self, name: str) -> Download:
        with self.page.expect_download(timeout=PATIENCE_S * 1000) as waiting:
            self.press(name)
        return waiting.value

    def save(self, name: str, folder: Path) -> Path:
        """Return the download of the button ``name`` under its suggested name."""
        download = self.download(name)
        path = folder / download.suggested_filename
        download.save_as(path)
        return path

    def strangers(self) -> set[str]:
        """Hosts other than this machine that received requests."""
        return {host for host in self.hosts if host not in ("127.0.0.1", "localhost")}

    def _refuse(self, dialog: Dialog) -> None:
        self.errors.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _note(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "about"):
            self.hosts.add(parts.hostname or url)


Screenshot = Callable[[Visit, str], None]


class Visitor(Protocol):
    """A function that opens the page in a new tab, or with ``context`` in another browser context."""

    def __call__(self, url: str | None = None, *, is_ready: bool = True, **context: Any) -> Visit: ...
