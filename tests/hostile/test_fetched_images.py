"""Hostile web sites from which images are fetched: redirects to where nothing may be fetched, names
that change their address, hosts that are slow or send without end.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.images import fetch
from server.images.fetch import AT_ONCE, EACH_AT_ONCE
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import SEEING, FakeEngine
from tests.contract.image_site import HOST, SERVED, Names, Site, running_site
from tests.contract.wire import posted
from tests.hostile.image_bodies import CHAT, DIALECTS, OLLAMA, Dialect, chat, refusal
from tests.polling import WAIT_SECONDS, until

KEPT_BYTES = 300_000
"""What Python may keep of some dozen fetches: connections, log records and remembered URLs."""

SLOW_SECONDS = 0.3
PATHS = {
    "elsewhere": "not fetched from the host 'other.example.org'",
    "inside": "has an address that is not public",
    "address": "not fetched from the host '127.0.0.1'",
    "file": "none of http or https",
    "around": "redirects more than 3 times",
    "declared": "larger than 20 MiB",
    "endless": "larger than 20 MiB",
    "slow": f"took more than {SLOW_SECONDS:g} seconds",
    "gone": "status 404",
}
BY_URL = [dialect for dialect in DIALECTS if dialect.path != OLLAMA]
"""The dialects in which an image may be named by a URL."""

OTHERS = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6")
"""Addresses of other clients."""


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    names.decide(monkeypatch)
    return names


@pytest.fixture
def site() -> Iterator[str]:
    with running_site() as url:
        yield url


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = Settings(port=0, fetch_images=(HOST, f"*.{HOST}"))
    with running(FakeEngine(card=SEEING), settings) as url:
        yield url


def client(url: str, address: str = SERVED) -> httpx.Client:
    """A client that comes from this address."""
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(base_url=url, timeout=WAIT_SECONDS, transport=transport)


def test_hostile_sites(
    daemon: str,
    site: str,
    names: Names,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    traced: Callable[[], int],
) -> None:
    """In every dialect, in messages of users and in results of tools: nothing is kept of them, in
    memory or on the disk.
    """
    n_bytes = list[int]()
    with client(daemon) as http:
        for _ in range(3):
            for at, (path, words) in enumerate(PATHS.items()):
                in_result = at % 2 == 1
                seconds = SLOW_SECONDS if path == "slow" else WAIT_SECONDS
                monkeypatch.setattr(fetch, "FETCH_SECONDS", seconds)
                for dialect in BY_URL:
                    said = refused(http, dialect, f"{site}/{path}", in_result=in_result)
                    assert words in said
            n_bytes.append(traced())
        assert http.get("/health").status_code == 200
    assert n_bytes[-1] - n_bytes[0] < KEPT_BYTES
    assert [file.name for file in tmp_path.glob("rootstock/images/*/*")] == ["lock"]


def refused(http: httpx.Client, dialect: Dialect, url: str, *, in_result: bool) -> str:
    """The words of the 400 for an image that is named by a URL."""
    body = _by_url((dialect.nested if in_result else dialect.body)(url))
    place = dialect.nested_place if in_result else dialect.place
    return refusal(http.post(dialect.path, json=body), place)


def _by_url(value: Any) -> Any:
    """The value, with sources of Messages that have a URL."""
    match value:
        case {"type": "base64", "data": url}:
            return {"type": "url", "url": url}
        case dict():
            return {key: _by_url(each) for key, each in value.items()}
        case list():
            return [_by_url(each) for each in value]
    return value


def test_a_name_that_changes_its_address_between_redirects(
    daemon: str, site: str, names: Names
) -> None:
    """Each connection goes to an address that was checked, and none to the one that was not."""
    names.addresses[HOST] = [[SERVED], [SERVED], ["127.0.0.2"]]
    with client(daemon) as http:
        said = refusal(http.post(CHAT, json=chat(f"{site}/thrice/3")), DIALECTS[0].place)
    assert "not public" in said
    assert names.looked_up == [HOST] * 3
    assert len(Site.hosts) == 2


def test_slow_hosts_hold_up_their_own_client_alone(daemon: str, site: str, names: Names) -> None:
    """One client holds some of all slots. Others fetch images, and are answered, meanwhile."""
    with client(daemon) as slow, ThreadPoolExecutor(AT_ONCE) as threads:
        asked = [
            threads.submit(slow.post, CHAT, json=chat(f"{site}/held/{number}"))
            for number in range(AT_ONCE)
        ]
        for _ in range(EACH_AT_ONCE):
            Site.reached.get(timeout=WAIT_SECONDS)
        for address in OTHERS:
            with client(daemon, address) as http:
                assert http.post(CHAT, json=chat(f"{site}/cat/{address}")).status_code == 200
                text = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
                assert "[DONE]" in http.post(CHAT, json=text).text
        assert Site.reached.empty()
        assert not any(each.done() for each in asked)
        Site.opened.set()
        assert {each.result().status_code for each in asked} == {200}


def test_clients_that_leave_while_their_images_are_fetched(
    daemon: str, site: str, names: Names, tmp_path: Path
) -> None:
    """Their slots are free again at once, and their files are gone."""
    for number in range(3 * AT_ONCE):
        with posted(daemon, CHAT, chat(f"{site}/held/{number}")):
            Site.reached.get(timeout=WAIT_SECONDS)
    with client(daemon) as http:
        assert http.post(CHAT, json=chat(f"{site}/cat/after")).status_code == 200
    folder = tmp_path / "rootstock" / "images"
    until(lambda: not [*folder.glob("*/new-*")])
