"""From which web pages a daemon may be asked."""

from collections.abc import Iterator

import httpx
import pytest
from starlette.types import Message

from server.app import create_app
from server.settings import Settings
from tests.contract.access.helpers import CHAT, bearer, refusals
from tests.contract.daemon import registry_of, running
from tests.contract.fake_engine import FakeEngine, Script

KEY = "sk-local-123"
PAGE = "https://chat.example.org"
BODY_BYTES = 1000
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-api-key,x-stainless-os",
}


def test_other_sites_cannot_use_a_visitors_browser(http: httpx.Client) -> None:
    answer = http.post("/admin/cache/clear", headers={"Origin": "http://localhost:1"})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_origin"


def test_own_pages_may_ask(http: httpx.Client, base_url: str) -> None:
    assert http.get("/v1/models", headers={"Origin": base_url}).status_code == 200


def test_a_page_behind_a_proxy_that_ends_tls_may_ask() -> None:
    """With a port in the Host, the proxy must be trusted and name the scheme."""
    proxied = {"X-Forwarded-Proto": "https"}
    plain = {"Origin": "https://chat.localhost", "Host": "chat.localhost"}
    with_port = {"Origin": "https://chat.localhost:8443", "Host": "chat.localhost:8443"}
    downgraded = {"Origin": "http://chat.localhost", "Host": "chat.localhost"}
    with running(FakeEngine(), Settings(port=0)) as url:
        statuses = [
            httpx.get(f"{url}/v1/models", headers=headers).status_code
            for headers in (plain, with_port, with_port | proxied)
        ]
    assert statuses == [200, 403, 403]
    with running(FakeEngine(), Settings(port=0, trusted_proxies=("127.0.0.1",))) as url:
        statuses = [
            httpx.get(f"{url}/v1/models", headers=headers | proxied).status_code
            for headers in (plain, with_port, downgraded)
        ]
    assert statuses == [200, 200, 403]


def test_by_default_no_page_can_read_an_answer() -> None:
    with (
        running(FakeEngine(), Settings(port=0, api_key=KEY)) as url,
        httpx.Client(base_url=url, headers={"Origin": PAGE}) as page,
    ):
        answers = [
            page.get("/v1/models", headers=bearer(KEY)),
            page.get("/v1/models"),
            page.options("/v1/models", headers=PREFLIGHT),
        ]
    assert [answer.status_code for answer in answers] == [200, 401, 401]
    for answer in answers:
        assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def guarded_url(engine: FakeEngine, no_settings_from_outside: None) -> Iterator[str]:
    settings = Settings(
        port=0, api_key=KEY, cors_origin=(PAGE, "app://*"), max_body_bytes=BODY_BYTES
    )
    with running(engine, settings) as url:
        yield url


@pytest.fixture(params=[PAGE, "app://obsidian.md"])
def page(guarded_url: str, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A script in a page that may ask."""
    headers = {"Origin": request.param}
    with httpx.Client(base_url=guarded_url, headers=headers) as client:
        yield client


def check_readable(answer: httpx.Response, page: httpx.Client) -> None:
    assert answer.headers["access-control-allow-origin"] == page.headers["origin"]
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/admin/cache/clear", "/health"])
def test_a_browsers_question_needs_no_key(page: httpx.Client, path: str) -> None:
    answer = page.options(path, headers=PREFLIGHT)
    assert answer.status_code == 200
    check_readable(answer, page)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert (
        answer.headers["access-control-allow-headers"]
        == (PREFLIGHT["Access-Control-Request-Headers"])
    )
    assert answer.headers["x-request-id"]


async def test_a_browsers_question_is_a_request_of_its_connection() -> None:
    """Which else would be closed as one that never sent any."""

    class Said:
        def __init__(self) -> None:
            self.all: list[str] = []

        async def flushed(self) -> None: ...

        def request_began(self) -> None:
            self.all.append("began")

        def request_ended(self) -> None:
            self.all.append("ended")

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        said.all.append(message["type"])

    said = Said()
    headers = {"Origin": PAGE, **PREFLIGHT}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "OPTIONS",
        "path": "/v1/models",
        "raw_path": b"/v1/models",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "state": {"connection": said},
    }
    settings = Settings(cors_origin=(PAGE,))
    app = create_app(registry_of(FakeEngine(), settings), settings)
    await app(scope, receive, send)
    assert said.all == ["began", "http.response.start", "http.response.body", "ended"]


def test_public_pages_may_ask_a_private_network(page: httpx.Client) -> None:
    asked = PREFLIGHT | {"Access-Control-Request-Private-Network": "true"}
    answer = page.options("/v1/models", headers=asked)
    assert answer.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("stream", [False, True])
def test_the_page_reads_answers_with_their_ids(page: httpx.Client, stream: bool) -> None:
    answer = page.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=bearer(KEY))
    assert answer.status_code == 200
    check_readable(answer, page)
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_the_page_reads_errors_wherever_they_come_from(
    page: httpx.Client, engine: FakeEngine
) -> None:
    engine.script = Script(refusal=RuntimeError("a crash"))
    crash = page.post("/v1/chat/completions", json=CHAT, headers=bearer(KEY))
    engine.script = Script()
    answers = {
        401: page.get("/v1/models"),
        404: page.get("/v1/nothing", headers=bearer(KEY)),
        413: page.post("/v1/completions", content=b"x" * (BODY_BYTES + 1), headers=bearer(KEY)),
        400: page.post("/v1/completions", content=b"[", headers=bearer(KEY)),
        500: crash,
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        check_readable(answer, page)


def test_other_pages_are_told_nothing(guarded_url: str) -> None:
    headers = {"Origin": "https://evil.example"}
    with httpx.Client(base_url=guarded_url, headers=headers) as other:
        preflight = other.options("/v1/models", headers=PREFLIGHT)
        assert preflight.status_code == 400
        for answer in (preflight, other.get("/v1/models", headers=bearer(KEY))):
            assert "access-control-allow-origin" not in answer.headers


def test_without_keys_the_allowed_pages_alone_may_ask() -> None:
    with running(FakeEngine(), Settings(port=0, cors_origin=(PAGE,))) as url:
        with httpx.Client(base_url=url) as http:
            allowed = http.get("/v1/models", headers={"Origin": PAGE})
            other = http.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert (allowed.status_code, other.status_code) == (200, 403)
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert refusals(url) == {("foreign_origin", ""): 1}


VISIT = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
IMAGE = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
FRAME = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/tokenizer_info", "/v1/nothing"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_without_keys_pages_of_other_sites_embed_nothing(
    http: httpx.Client, method: str, path: str
) -> None:
    """A browser names no Origin for an image. A link may lead to a page."""
    other = {"Sec-Fetch-Site": "cross-site"}
    for headers in ({}, IMAGE, FRAME):
        assert http.request(method, path, headers=other | headers).status_code == 403
    assert http.request(method, path, headers=other | VISIT).status_code in (200, 404)
    for site in ("none", "same-origin", "same-site"):
        own = http.request(method, path, headers={"Sec-Fetch-Site": site} | IMAGE)
        assert own.status_code in (200, 404)


def test_other_sites_send_no_form_by_a_visit(http: httpx.Client) -> None:
    headers = {"Sec-Fetch-Site": "cross-site"} | VISIT
    assert http.post("/admin/cache/clear", headers=headers).status_code == 403


def test_an_allowed_page_is_another_site_all_the_same() -> None:
    with running(FakeEngine(), Settings(port=0, cors_origin=(PAGE,))) as url:
        headers = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
