"""Images in the page's chat."""

import base64
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, Request, expect

from engine.api import InvalidImage
from server.settings import Settings
from tests.browser.conftest import Serve, Visit
from tests.browser.seen import grave
from tests.contract.fake_engine import CARD, IMAGE, SEEING, FakeEngine, Script

PUT = """([selector, kind, files, text]) => {
  const data = new DataTransfer();
  for (const [name, type, content] of files) {
    const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  if (text) data.setData("text/plain", text);
  const event = kind === "paste"
    ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  return !document.querySelector(selector).dispatchEvent(event);
}"""
TEXTAREA = ".composer textarea"


def chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return len(data).to_bytes(4) + kind + data + check.to_bytes(4)


def picture(shade: int) -> bytes:
    """A grey PNG of one pixel."""
    header = (1).to_bytes(4) * 2 + bytes((8, 0, 0, 0, 0))
    pixels = zlib.compress(bytes((0, shade)))
    parts = (b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def put(page: Page, kind: str, *files: tuple[str, bytes], text: str = "") -> bool:
    """Paste or drop files. Returns whether the page took them."""
    sent = [(name, "image/png", base64.b64encode(content).decode()) for name, content in files]
    taken: bool = page.evaluate(PUT, [TEXTAREA, kind, sent, text])
    return taken


def named(name: str, content: bytes, media_type: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": media_type, "buffer": content}


def attached(page: Page) -> list[str]:
    return [image.get_attribute("alt") or "" for image in page.locator(".composer img").all()]


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(card=SEEING)


@pytest.fixture
def page(visit: Visit, scripted_url: str) -> Page:
    return visit(scripted_url)


class Sent:
    """The bodies of the chat requests of a page."""

    def __init__(self, page: Page) -> None:
        self.bodies: list[Any] = []
        page.on("request", self._note)

    def _note(self, request: Request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(request.post_data_json)

    def images(self, number: int) -> list[bytes]:
        """What the images of the last message of that request are."""
        content = self.bodies[number]["messages"][-1]["content"]
        urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
        heads, data = zip(*(url.split(",") for url in urls), strict=True)
        assert {*heads} == {"data:image/png;base64"}
        return [base64.b64decode(one) for one in data]


def test_chosen_pasted_and_dropped_images_are_sent_as_they_are(
    visit: Visit, scripted_url: str
) -> None:
    page = visit(scripted_url, expected="400")  # the fake engine knows no PNG
    names = "chosen.png", "pasted.png", "dropped.png"
    files = {name: picture(shade) for shade, name in enumerate(names)}
    sent = Sent(page)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add images").press("Enter")
    chooser.value.set_files([named(names[0], files[names[0]])])
    expect(page.locator(".composer img")).to_have_count(1)
    for count, kind in enumerate(("paste", "drop"), 1):
        assert put(page, kind, (names[count], files[names[count]]))
        expect(page.locator(".composer img")).to_have_count(count + 1)
    assert attached(page) == [*names]
    page.get_by_label("Your message").fill("What is this?")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".composer img")).to_have_count(0)
    shown = page.locator(".message.user").get_by_role("img")
    expect(shown).to_have_count(3)
    for image in shown.all():
        expect(image).to_have_js_property("naturalWidth", 1)  # the policy lets it be shown
    expect(page.locator(".message.assistant")).to_have_attribute("data-state", "failed")
    assert sent.images(0) == [*files.values()]


def test_images_stay_in_the_conversation_and_in_its_branches(
    page: Page, engine: FakeEngine
) -> None:
    put(page, "paste", ("cat.png", IMAGE + b"cat"))
    expect(page.locator(".composer img")).to_have_count(1)
    page.get_by_role("button", name="Send", exact=True).click()  # without a text
    answer = page.locator(".message.assistant")
    expect(answer).to_have_attribute("data-state", "done")
    page.get_by_label("Your message").fill("And now?")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answer.last).to_have_attribute("data-state", "done")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit the message").fill("Look")
    page.get_by_role("button", name="Send as a new branch").click()
    expect(page.locator(".branches").first).to_contain_text("2 of 2")
    expect(answer).to_have_attribute("data-state", "done")
    first, second, branch = (bytes(engine.submitted.get(timeout=10).prompt) for _ in range(3))
    assert first == b"<user>[\0\0\0]\n<assistant>"
    assert second.startswith(first)
    assert branch == b"<user>[\0\0\0]Look\n<assistant>"


def test_an_image_can_be_removed_before_it_is_sent(page: Page, engine: FakeEngine) -> None:
    put(page, "drop", ("a.png", picture(1)), ("b.png", IMAGE + b"b"))
    expect(page.locator(".composer img")).to_have_count(2)
    assert not grave(page)
    page.get_by_role("button", name="Remove a.png").press("Enter")
    assert attached(page) == ["b.png"]
    expect(page.get_by_label("Your message")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_have_attribute("data-state", "done")
    assert len(engine.submitted.get(timeout=10).images) == 1


def test_a_paste_of_text_with_a_picture_of_it_is_text(page: Page) -> None:
    assert not put(page, "paste", ("table.png", picture(1)), text="1\t2")
    expect(page.locator(".composer img")).to_have_count(0)


def test_files_that_are_no_images_or_too_large_are_named(page: Page) -> None:
    files = [
        named("notes.pdf", b"%PDF", "application/pdf"),
        named("large.png", bytes(21 << 20)),
        named("small.png", picture(1)),
    ]
    page.locator("input[type=file]").set_input_files(files)
    alerts = page.locator(".composer").get_by_role("alert")
    expect(alerts).to_have_text(
        [
            "notes.pdf is no PNG, JPEG, WebP or GIF.",
            "large.png has 21 MiB; an image may have 20 MiB.",
        ]
    )
    assert attached(page) == ["small.png"]


def test_what_the_daemon_says_of_an_image_is_shown(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    page = visit(scripted_url, expected="400")
    engine.script = Script(image_refusal=InvalidImage("the image has too many pixels"))
    put(page, "paste", ("cat.png", IMAGE + b"cat"))
    expect(page.locator(".composer img")).to_have_count(1)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("too many pixels")


@pytest.mark.parametrize(
    ("reason", "told"), [("", ""), ("its tower is unknown", ": its tower is unknown")]
)
def test_a_model_without_images(visit: Visit, serve: Serve, reason: str, told: str) -> None:
    card = replace(CARD, images_refused=reason)
    page = visit(serve(FakeEngine(card=card), Settings(port=0)))
    sentence = f"This model takes no images{told or '.'}"
    expect(page.locator(".composer small")).to_have_text([sentence] if reason else [])
    expect(page.get_by_role("button", name="Add images")).to_have_count(0)
    for kind in ("paste", "dragover", "drop"):
        assert put(page, kind, ("cat.png", picture(1)))
    expect(page.get_by_role("alert")).to_have_text(sentence)
    expect(page.locator(".composer img")).to_have_count(0)
