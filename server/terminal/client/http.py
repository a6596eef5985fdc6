"""HTTP requests to a server, with its API key, and its errors as TerminalErrors."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import httpx

from server.addresses import is_loopback
from server.terminal.client.wire import error_code, error_message
from server.terminal.errors import KeyRefused, NotFound, TerminalError, UnknownModel, Unreachable

PATIENT = httpx.Timeout(None, connect=10.0)  # an answer may take its time: a long prompt, a queue
BRIEF = httpx.Timeout(2.0)
HOST_AND_PORT = re.compile(r"[^\s/@]+:\d+(/.*)?")
MAX_BODY_BYTES = 16 * 2**20  # of what is no stream: lists and errors are much shorter
KINDS: Mapping[int, type[TerminalError]] = MappingProxyType(
    {
        httpx.codes.UNAUTHORIZED: KeyRefused,
        httpx.codes.FORBIDDEN: KeyRefused,
        httpx.codes.NOT_FOUND: NotFound,
    }
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's base URL, as OpenAI's clients have it (it mostly ends in /v1), and API key."""

    base_url: str
    api_key: str = ""


def connection(endpoint: Endpoint, timeout: httpx.Timeout) -> httpx.Client:
    """A client whose paths begin at the base URL. It follows no redirects: the key is for the
    host that the user has named.

    Raises TerminalError for what is no URL or no key.
    """
    url, api_key = parsed(endpoint.base_url), endpoint.api_key
    if not (api_key.isascii() and api_key.isprintable()):
        raise TerminalError("the API key must be printable ASCII")
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=timeout,
        follow_redirects=False,
        trust_env=not is_loopback(url.host),  # no proxy reaches this machine's own loopback
    )


def parsed(text: str) -> httpx.URL:
    """The base URL. One without a path means /v1, and HOST:PORT means http. Raises TerminalError
    for what is no URL.
    """
    try:
        url = httpx.URL(f"http://{text}" if HOST_AND_PORT.fullmatch(text) else text)
    except httpx.InvalidURL as error:
        raise TerminalError(f"{text} is not a URL: {error}") from None
    if url.scheme not in {"http", "https"} or not url.host:
        raise TerminalError(f"{text} is not a URL such as http://127.0.0.1:8000/v1")
    return url if url.path.strip("/") else url.copy_with(path="/v1")


def ask(http: httpx.Client, method: str, path: str, body: object = None) -> bytes:
    """The body of the server's response. Raises TerminalError."""
    with answer(http, method, path, body) as response:
        return _body(response)


@contextmanager
def answer(
    http: httpx.Client,
    method: str,
    path: str,
    body: object = None,
    timeout: httpx.Timeout | None = None,
) -> Iterator[httpx.Response]:
    """A response with status 200, its body still to be read. `timeout` defaults to the client's.
    Characters of `body` that UTF-8 lacks are sent as `?`.

    Raises TerminalError, also from within the context, when the connection is lost.
    """
    timeout = timeout or http.timeout
    content, headers = None, None
    if body is not None:
        content = json.dumps(body, ensure_ascii=False).encode(errors="replace")
        headers = {"Content-Type": "application/json"}
    with (
        _as_terminal_errors(http),
        http.stream(method, path, content=content, headers=headers, timeout=timeout) as response,
    ):
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        yield response


def _refusal(response: httpx.Response) -> TerminalError:
    body = _body(response)
    message = error_message(body) or response.reason_phrase
    kind = KINDS.get(response.status_code, TerminalError)
    if error_code(body) == "model_not_found":
        kind = UnknownModel
    return kind(f"{message} (HTTP {response.status_code} from {shown(response.url)})")


def _body(response: httpx.Response) -> bytes:
    """Read to its end. Raises TerminalError for one that is longer than any that makes sense."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            limit = f"{MAX_BODY_BYTES >> 20} MiB"
            raise TerminalError(f"{shown(response.url)} answers with more than {limit}")
    return bytes(body)


@contextmanager
def _as_terminal_errors(http: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise Unreachable(f"cannot connect to {shown(http.base_url)}: {error}") from error
    except httpx.RequestError as error:
        problem = str(error) or type(error).__name__
        raise TerminalError(f"lost {shown(http.base_url)}: {problem}") from error


def shown(url: httpx.URL) -> str:
    """Without the slash that httpx ends a base URL with, and without a password in it."""
    return str(url.copy_with(userinfo=b"")).rstrip("/")
