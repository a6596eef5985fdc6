"""A browser, daemons for it to visit, and pages that must not complain."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from engine.api import Engine
from server.settings import Settings
from tests.browser.chromium import MISSING, chromium, executable
from tests.browser.demo import DESKTOP, demo_daemon
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine

PATIENCE_MS = 60_000  # on a busy machine; what is fast is fast

Visit = Callable[..., Page]
"""Opens the page at a URL. `expected` is a pattern of what the browser may complain of."""

Serve = Callable[[Engine, Settings], str]
"""Starts a daemon, and says where."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_there = executable() is not None
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.browser)
            if not is_there:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="module")  # playwright's loop must not run beside those of other tests
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def demo() -> Iterator[httpx.Client]:
    with demo_daemon() as client:
        yield client


@pytest.fixture
def daemon(demo: httpx.Client) -> httpx.Client:
    """A client of the embedded model's daemon, its cache empty."""
    demo.post("/admin/cache/clear").raise_for_status()
    return demo


@pytest.fixture
def demo_url(demo: httpx.Client) -> str:
    return str(demo.base_url).rstrip("/")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def daemons() -> Iterator[ExitStack]:
    """What a test serves ends after the pages that visit it are closed."""
    with ExitStack() as daemons:
        yield daemons


@pytest.fixture
def serve(daemons: ExitStack) -> Serve:
    return lambda engine, settings: daemons.enter_context(running(engine, settings))


@pytest.fixture
def scripted_url(serve: Serve, engine: FakeEngine) -> str:
    """A daemon that says what the test wants."""
    return serve(engine, Settings(port=0))


@pytest.fixture
def visit(browser: Browser, daemons: ExitStack) -> Iterator[Visit]:
    with visiting(browser) as visit:
        yield visit


@pytest.fixture(scope="module")
def lasting_page(browser: Browser) -> Iterator[Page]:
    """Where the page's modules are imported and asked, and the page itself is left as it is."""
    with running(FakeEngine(), Settings(port=0)) as url, visiting(browser) as visit:
        yield visit(url)


@contextmanager
def visiting(browser: Browser) -> Iterator[Visit]:
    """Pages that ask nobody else for anything, break no policy, and put no error on the console."""
    contexts, problems = [], []

    def opened(url: str, expected: str = "(?!)", **options: Any) -> Page:
        options = {"viewport": DESKTOP, "reduced_motion": "reduce", **options}
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)

        def complain(text: str) -> None:
            if not re.search(expected, text):
                problems.append(text)

        def heard(message: ConsoleMessage) -> None:
            if message.type in {"error", "warning"}:
                complain(f"console: {message.text}")

        def asked(request: Request) -> None:
            if not request.url.startswith(f"{url}/"):
                complain(f"elsewhere: {request.url}")

        page = context.new_page()
        page.on("console", heard)
        page.on("pageerror", lambda error: complain(f"exception: {error}"))
        page.on("request", asked)
        page.goto(f"{url}/")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems
