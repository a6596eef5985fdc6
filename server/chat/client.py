"""Asks a server for answers: HTTP in, typed events out."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from server.chat.events import ChatError, Event, Finish, KeyRefused
from server.chat.sse import EventStream
from server.chat.wire import chunk_events, error_message, model_names
from server.settings import is_loopback

PATIENT = httpx.Timeout(None, connect=10.0)  # an answer may take its time: a long prompt, a queue
BRIEF = httpx.Timeout(2.0)
KEY_STATUSES = {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}
DONE = b"[DONE]"

Message = Mapping[str, str]
Parameters = Mapping[str, float]  # of sampling, by their names in the API


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is. `base_url` is what OpenAI's clients call so; it ends in /v1 mostly."""

    base_url: str
    api_key: str = ""


@dataclass(frozen=True, slots=True)
class ChatClient:
    """One model of one server."""

    http: httpx.Client
    model: str
    parameters: Parameters

    @property
    def base_url(self) -> str:
        return _shown(self.http.base_url)

    def answer(self, messages: Sequence[Message]) -> Generator[Event, None, None]:
        """Yield an answer's events as they come. Closing the generator closes the connection,
        which aborts the request at the server.

        Raises ChatError.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.parameters,
        }
        with (
            _told_as_chat_errors(self.http),
            self.http.stream("POST", "chat/completions", json=body) as response,
        ):
            _check(response)
            yield from _events(response)


@contextmanager
def connected(
    endpoint: Endpoint, model: str | None, parameters: Parameters
) -> Iterator[ChatClient]:
    """A client for the model, or for the first one that the server lists. Raises ChatError."""
    with _http(endpoint, PATIENT) as http:
        yield ChatClient(http, model or _listed_models(http)[0], parameters)


def served_models(endpoint: Endpoint) -> list[str]:
    """The models that a server lists. Raises ChatError, also when it does not answer soon."""
    with _http(endpoint, BRIEF) as http:
        return _listed_models(http)


def _http(endpoint: Endpoint, timeout: httpx.Timeout) -> httpx.Client:
    url, api_key = _base_url(endpoint.base_url), endpoint.api_key
    if not (api_key.isascii() and api_key.isprintable()):
        raise ChatError("the API key must be printable ASCII")
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=timeout,
        trust_env=not is_loopback(url.host),  # no proxy reaches this machine's own loopback
    )


def _base_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ChatError(f"{text} is not a URL: {error}") from None
    if url.scheme not in {"http", "https"} or not url.host:
        raise ChatError(f"{text} is not a URL such as http://127.0.0.1:8000/v1")
    return url if url.path.strip("/") else url.copy_with(path="/v1")


def _listed_models(http: httpx.Client) -> list[str]:
    with _told_as_chat_errors(http), http.stream("GET", "models") as response:
        _check(response)
        return model_names(response.read())


def _check(response: httpx.Response) -> None:
    if response.status_code != httpx.codes.OK:
        message = error_message(response.read()) or response.reason_phrase
        kind = KeyRefused if response.status_code in KEY_STATUSES else ChatError
        raise kind(f"HTTP {response.status_code} from {_shown(response.url)}: {message}")


def _events(response: httpx.Response) -> Iterator[Event]:
    """Read to the body's end, not only to [DONE]: a connection closed before is an abort."""
    complete, stream = False, EventStream()
    for data in (data for piece in response.iter_bytes() for data in stream.feed(piece)):
        if data == DONE:
            complete = True
            continue
        for event in chunk_events(data):
            complete = complete or isinstance(event, Finish)
            yield event
    if not complete:
        raise ChatError("the stream ended before the answer did")


def _shown(url: httpx.URL) -> str:
    """Without the slash that httpx ends a base URL with, and without a password in it."""
    return str(url.copy_with(userinfo=b"")).rstrip("/")


@contextmanager
def _told_as_chat_errors(http: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise ChatError(f"cannot connect to {_shown(http.base_url)}: {error}") from error
    except httpx.RequestError as error:
        raise ChatError(f"lost {_shown(http.base_url)}: {error or type(error).__name__}") from error
