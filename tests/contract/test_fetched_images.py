"""Images that requests name by a URL: from where they are fetched, and from where not."""

import time
from collections.abc import Iterator
from ipaddress import ip_address

import httpx
import pytest

from server.images import fetch
from server.images.fetch import is_public
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import IMAGE, SEEING, FakeEngine
from tests.contract.image_site import HOST, SERVED, Names, Site, running_site

SLOW_SECONDS = 0.5

PUBLIC = ("93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8")
PRIVATE = (
    *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
    *(
        "100.64.0.1",
        "192.0.0.8",
        "192.88.99.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
    ),
    *(
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
    ),
    *("64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:1::", "fe80::1", "fc00::1"),
    *("fec0::1", "ff02::1", "2001:db8::1", "100::1"),
)


@pytest.mark.parametrize(
    ("address", "expected"),
    [*((each, True) for each in PUBLIC), *((each, False) for each in PRIVATE)],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(ip_address(address)) is expected


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    names.decide(monkeypatch)
    return names


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with running_site() as url:
        yield url


@pytest.fixture(scope="module")
def seeing() -> FakeEngine:
    return FakeEngine(card=SEEING)


@pytest.fixture(scope="module")
def url(seeing: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        settings = Settings(port=0, fetch_images=(HOST, f"*.{HOST}"))
        with running(seeing, settings) as base_url:
            yield base_url


@pytest.fixture
def http(url: str, seeing: FakeEngine) -> Iterator[httpx.Client]:
    seeing.reset()
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


def ask(http: httpx.Client, image: str) -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": image}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return http.post("/v1/chat/completions", json=body)


def message(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[0]"
    return str(error["message"])


def test_an_image_of_an_allowed_host(
    http: httpx.Client, seeing: FakeEngine, names: Names, site: str
) -> None:
    assert ask(http, f"{site}/cat").status_code == 200
    assert seeing.prepared.get_nowait() == IMAGE + b"cat"
    assert Site.hosts[-1] == site.removeprefix("http://")
    assert names.looked_up == [HOST]
    assert ask(http, f"{site}/cat").status_code == 200  # a later turn of the conversation
    assert names.looked_up == [HOST]


def test_redirects(http: httpx.Client, names: Names, site: str) -> None:
    assert ask(http, f"{site}/thrice/3").status_code == 200
    assert names.looked_up == [HOST] * 4
    assert "redirects more than 3 times" in message(ask(http, f"{site}/thrice/4"))
    assert "redirects more than 3 times" in message(ask(http, f"{site}/around"))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("elsewhere", "not fetched from the host 'other.example.org' (fetch_images)"),
        ("inside", f"the host 'inside.{HOST}' has an address that is not public"),
        ("address", "not fetched from the host '127.0.0.1'"),
        ("file", "none of http or https"),
        ("nothing", "status 404"),
        ("declared", "larger than 20 MiB"),
        ("endless", "larger than 20 MiB"),
    ],
)
def test_what_is_not_fetched(
    http: httpx.Client, names: Names, site: str, path: str, words: str
) -> None:
    assert words in message(ask(http, f"{site}/{path}"))


@pytest.mark.parametrize(
    "image",
    [
        *("http://localhost/a", "http://127.0.0.1/a", "http://[::1]/a", "http://2130706433/a"),
        *(f"http://{HOST}.evil.org/a", f"http://evil{HOST}/a", "https://example.org/a"),
        f"http://example.org#@{HOST}/a",
    ],
)
def test_other_hosts(http: httpx.Client, names: Names, image: str) -> None:
    assert "(fetch_images)" in message(ask(http, image))
    assert not names.looked_up


def test_credentials(http: httpx.Client, names: Names) -> None:
    assert "a user name or a password" in message(ask(http, f"http://me:secret@{HOST}/a"))
    assert not names.looked_up


def test_one_private_address_is_too_many(http: httpx.Client, names: Names, site: str) -> None:
    names.addresses[HOST] = [[SERVED, "10.0.0.1"]]
    assert "not public" in message(ask(http, f"{site}/cat/private"))


def test_a_name_that_changes_its_address(http: httpx.Client, names: Names, site: str) -> None:
    """The connection goes to the address that was checked; the next one is checked again."""
    names.addresses[HOST] = [[SERVED], ["127.0.0.2"]]
    assert ask(http, f"{site}/cat/first").status_code == 200
    assert "not public" in message(ask(http, f"{site}/cat/second"))


def test_a_slow_host(
    http: httpx.Client, names: Names, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FETCH_SECONDS", SLOW_SECONDS)
    began = time.monotonic()
    assert "took more than" in message(ask(http, f"{site}/slow"))
    assert time.monotonic() - began < 20 * SLOW_SECONDS


def test_nothing_is_fetched_unless_a_host_is_allowed(
    seeing: FakeEngine, names: Names, site: str
) -> None:
    with (
        running(FakeEngine(card=SEEING), Settings(port=0)) as url,
        httpx.Client(base_url=url) as http,
    ):
        assert "(fetch_images)" in message(ask(http, f"{site}/cat"))
    assert not names.looked_up
