"""A client of any server that speaks OpenAI's chat completions.

An answer streams as `Chunk`s, and `Answer` collects them. JSON is read leniently: only the fields
that are needed here. Every failure is a TerminalError.
"""

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import AliasChoices, AliasPath, BaseModel, Field, ValidationError

from server.http.listening import is_loopback
from server.settings import CLIENT_KEY_VARIABLE
from server.terminal.console import (
    KeyRefused,
    NotFound,
    NotLoaded,
    Starting,
    TerminalError,
)

UNLIMITED = httpx.Timeout(None, connect=10.0)  # an answer may wait in a queue
BRIEF = httpx.Timeout(2.0)
HOST_AND_PORT = re.compile(r"[^\s/@]+:\d+(/.*)?")
MAX_BODY_BYTES = 16 * 2**20  # of a response that is no stream: lists and errors are much shorter
MAX_LINE_BYTES = 16 * 2**20  # of a stream
MAX_ERROR_CHARACTERS = 500
DONE = b"[DONE]"
OWNER = "rootstock"  # of every model that this project serves, in the list of models

Parameters = Mapping[str, float]  # of sampling, by their names in the API


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's base URL, as OpenAI's clients have it (it mostly ends in /v1), and API key."""

    base_url: str
    api_key: str = ""


class ServedModel(BaseModel):
    """A model that a server lists. `context_tokens` is None where the server does not report it;
    the field's name in JSON is vLLM's. `images`: whether it takes images, None where that is not
    known.
    """

    name: str = Field(validation_alias="id")
    owned_by: str | None = None
    context_tokens: int | None = Field(None, validation_alias="max_model_len")
    images: bool | None = None
    images_refused: str | None = None

    @property
    def no_images(self) -> str:
        """Why it takes no images; "" where it takes them, or the server does not say."""
        if self.images is not False:
            return ""
        reason = f": {self.images_refused}" if self.images_refused else ""
        return f"{self.name} takes no images{reason}"


class _ModelList(BaseModel):
    data: list[ServedModel] = Field(min_length=1)


class TokenCounts(BaseModel):
    """The server's token counts. `cached_tokens` is None where the server does not report it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = Field(
        None, validation_alias=AliasPath("prompt_tokens_details", "cached_tokens")
    )


class _Delta(BaseModel):
    content: str | None = None
    reasoning: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )


class _Choice(BaseModel):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class PromptProgress(BaseModel):
    """How much of a prompt is read; see server.generation.progress."""

    total: int
    cache: int
    processed: int
    time_ms: int

    @property
    def share(self) -> float:
        """The part of the prompt that is read, from 0 to 1."""
        return min(self.processed / self.total, 1.0) if self.total else 1.0

    @property
    def seconds_left(self) -> float | None:
        """How long reading takes yet, at its pace so far; None where nothing is read yet."""
        computed = self.processed - self.cache
        if computed <= 0:
            return None
        return self.time_ms / 1000 * max(self.total - self.processed, 0) / computed


class Chunk(BaseModel):
    """A chunk of a streamed chat completion. Any of its parts may be empty."""

    choices: list[_Choice] = []
    prompt_progress: PromptProgress | None = None
    usage: TokenCounts | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """A piece of the answer."""
        return "".join(choice.delta.content or "" for choice in self.choices)

    @property
    def reasoning(self) -> str:
        """A piece of the model's reasoning, which is not part of the conversation."""
        return "".join(choice.delta.reasoning or "" for choice in self.choices)

    @property
    def finish_reason(self) -> str:
        """The server's word for why the answer has ended ("stop", "length"), "" before its end."""
        return next((choice.finish_reason for choice in self.choices if choice.finish_reason), "")


@dataclass(slots=True)
class Answer:
    """One streamed answer: its text, its times, and its summary line. All times are seconds on one
    clock of the caller's.
    """

    asked_at: float
    text: str = ""
    usage: TokenCounts | None = None
    finish_reason: str = ""
    interrupted: bool = False  # by the user
    pieces: int = 0
    first_at: float = 0.0  # the first piece of text or reasoning
    last_at: float = 0.0  # the last piece, or the finish, whose token may have no text

    def add(self, chunk: Chunk, now: float) -> None:
        """Add a chunk that arrived at `now`."""
        self.text += chunk.text
        if chunk.text or chunk.reasoning:
            if self.pieces == 0:
                self.first_at = now
            self.pieces += 1
            self.last_at = now
        if chunk.finish_reason:
            self.finish_reason = chunk.finish_reason
            self.last_at = now
        if chunk.usage is not None:
            self.usage = chunk.usage

    @property
    def first_seconds(self) -> float | None:
        """Seconds from the question to the first piece; None without any piece."""
        return self.first_at - self.asked_at if self.pieces else None

    @property
    def tokens_per_second(self) -> float | None:
        """The decode speed, after the first token. None where it is unknown: all text came in one
        piece, or the server reported no usage.
        """
        decode_seconds = self.last_at - self.first_at
        if self.usage is None or self.pieces < 2 or decode_seconds <= 0:
            return None
        return (self.usage.completion_tokens - 1) / decode_seconds

    def summary(self) -> str:
        """Tokens, speed, and how the answer ended, as far as the server reported them."""
        parts = []
        if self.usage is not None:
            cached = self.usage.cached_tokens
            cached_text = "" if cached is None else f" ({cached:,} cached)"
            parts.append(f"prompt {self.usage.prompt_tokens:,} tokens{cached_text}")
            parts.append(f"answer {self.usage.completion_tokens:,} tokens")
        if self.tokens_per_second is not None:
            n_digits = 0 if self.tokens_per_second >= 100 else 1
            parts.append(f"{self.tokens_per_second:,.{n_digits}f} tokens/s")
        if self.first_seconds is not None:
            parts.append(f"first after {self.first_seconds:.2f} s")
        if self.interrupted:
            parts.append("stopped")
        elif self.finish_reason == "length":
            parts.append("cut off by the token limit")
        elif self.finish_reason not in {"", "stop"}:
            parts.append(f"ended by {self.finish_reason}")
        return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class ChatClient:
    """A client of one model of one server."""

    http: httpx.Client
    model: str
    parameters: Parameters
    tells_progress: bool = False  # other servers may refuse a field that they do not know
    no_images: str = ""  # why the model takes none, where the server says that

    @property
    def base_url(self) -> str:
        """The server's base URL, as users see it."""
        return shown_url(self.http.base_url)

    def stream(self, messages: Sequence[Mapping[str, object]]) -> Generator[Chunk]:
        """Yield the chunks of an answer as they arrive. Closing the generator closes the
        connection, which aborts the request at the server.

        Raises TerminalError, also when the stream ends before the answer.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.parameters,
        }
        if self.tells_progress:
            body["return_progress"] = True
        complete, events = False, EventStream()
        with open_response(self.http, "POST", "chat/completions", body) as response:
            # Read to the body's end, not only to [DONE]: closing the connection first is an abort.
            for data in (data for piece in response.iter_bytes() for data in events.feed(piece)):
                if data == DONE:
                    complete = True
                    continue
                chunk = parse_chunk(data)
                complete = complete or bool(chunk.finish_reason)
                yield chunk
        if not complete:
            raise TerminalError("the stream ended before the answer did")


@contextmanager
def chat_client(
    endpoint: Endpoint, model: str | None, parameters: Parameters
) -> Iterator[ChatClient]:
    """A client for the model, or for the first one that the server lists.

    Raises TerminalError.
    """
    with http_client(endpoint, UNLIMITED) as http:
        models = list[ServedModel]()
        try:
            models = list_models(http)
        except TerminalError:
            if model is None:
                raise
        tells_progress = any(one.owned_by == OWNER for one in models)
        name = model or models[0].name
        no_images = next((one.no_images for one in models if one.name == name), "")
        yield ChatClient(http, name, parameters, tells_progress, no_images)


def served_models(endpoint: Endpoint) -> list[ServedModel]:
    """The models that a server lists, one or more. Raises TerminalError, also when the server does
    not answer within two seconds.
    """
    with http_client(endpoint, BRIEF) as http:
        return list_models(http)


def list_models(http: httpx.Client) -> list[ServedModel]:
    """The models that the server lists, one or more. Raises TerminalError."""
    return parse_models(fetch(http, "GET", "models"))


def http_client(endpoint: Endpoint, timeout: httpx.Timeout) -> httpx.Client:
    """A client whose paths begin at the base URL. It follows no redirects: the key is for the
    host that the user has named.

    Raises TerminalError for an invalid URL or key.
    """
    url, api_key = parse_url(endpoint.base_url), endpoint.api_key
    if not (api_key.isascii() and api_key.isprintable()):
        raise TerminalError("the API key must be printable ASCII")
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=timeout,
        follow_redirects=False,
        trust_env=not is_loopback(url.host),  # no proxy reaches this machine's own loopback
    )


def parse_url(text: str) -> httpx.URL:
    """The base URL. One without a path means /v1, and HOST:PORT means http. Raises TerminalError
    for an invalid URL.
    """
    try:
        url = httpx.URL(f"http://{text}" if HOST_AND_PORT.fullmatch(text) else text)
    except httpx.InvalidURL as error:
        raise TerminalError(f"{text} is not a URL: {error}") from None
    if url.scheme not in {"http", "https"} or not url.host:
        raise TerminalError(f"{text} is not a URL such as http://127.0.0.1:8000/v1")
    return url if url.path.strip("/") else url.copy_with(path="/v1")


def shown_url(url: httpx.URL) -> str:
    """The URL without the slash that httpx ends a base URL with, and without a password."""
    return str(url.copy_with(userinfo=b"")).rstrip("/")


def fetch(http: httpx.Client, method: str, path: str, body: object = None) -> bytes:
    """The body of the server's response. Raises TerminalError."""
    with open_response(http, method, path, body) as response:
        return read_body(response)


@contextmanager
def open_response(
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


def read_body(response: httpx.Response) -> bytes:
    """The response's body. Raises TerminalError for one of more than MAX_BODY_BYTES."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            limit = f"{MAX_BODY_BYTES >> 20} MiB"
            raise TerminalError(f"{shown_url(response.url)} answers with more than {limit}")
    return bytes(body)


def _refusal(response: httpx.Response) -> TerminalError:
    body = read_body(response)
    message = error_message(body) or response.reason_phrase
    match response.status_code, _json(body):
        case _, {"error": {"code": "model_not_found"}}:
            return TerminalError(message)
        case _, {"error": {"code": "server_starting"}}:
            return Starting(f"{shown_url(response.url.join('/'))}: {message}")
        case httpx.codes.UNAUTHORIZED, {"error": {"code": "invalid_api_key"}}:
            message = f"A valid API key is needed: --api-key KEY, or {CLIENT_KEY_VARIABLE}"
            kind: type[TerminalError] = KeyRefused
        case httpx.codes.UNAUTHORIZED | httpx.codes.FORBIDDEN, _:
            kind = KeyRefused
        case httpx.codes.NOT_FOUND, _:
            kind = NotFound
        case _, {"error": {"code": "model_not_loaded"}}:
            kind = NotLoaded
        case _:
            kind = TerminalError
    return kind(f"{message} (HTTP {response.status_code} from {shown_url(response.url)})")


@contextmanager
def _as_terminal_errors(http: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise _unreachable(http.base_url, error) from error
    except httpx.RequestError as error:
        problem = str(error) or type(error).__name__
        raise TerminalError(f"lost {shown_url(http.base_url)}: {problem}") from error


def _unreachable(url: httpx.URL, error: httpx.ConnectError) -> TerminalError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return TerminalError(f"cannot connect to {shown_url(url)}: {error}")
    return TerminalError(f"nothing listens at {url.netloc.decode()}: has the server been started?")


class EventStream:
    """A decoder of server-sent events from raw bytes, as far as OpenAI's streams use them.

    Comments and fields other than `data` are skipped. An event that the stream's end leaves
    without its blank line is dropped, as the format demands. A lone CR does not end a line here.
    httpx's `iter_lines` will not do: like `str.splitlines` it also breaks lines at U+0085, U+2028
    and others, which JSON may contain as they are.
    Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end has not arrived
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each event that the piece completes.

        Raises TerminalError for a line of more than MAX_LINE_BYTES.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise TerminalError(f"the stream has a line of more than {MAX_LINE_BYTES >> 20} MiB")
        for line in lines:
            yield from self._take(line.removesuffix(b"\r"))

    def _take(self, line: bytes) -> Iterator[bytes]:
        if line == b"":
            if self._data:
                data, self._data = self._data, []
                yield b"\n".join(data)
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))


def parse_chunk(data: bytes) -> Chunk:
    """A chunk of a stream. Raises TerminalError for an error or an invalid chunk."""
    try:
        chunk = Chunk.model_validate_json(data)
    except ValidationError:
        raise TerminalError(f"not a chunk of a chat completion: {shortened(data)}") from None
    if chunk.error is not None:
        raise TerminalError(error_message(data))
    return chunk


def parse_models(body: bytes) -> list[ServedModel]:
    """The models, one or more, in a response to GET /models. Raises TerminalError."""
    try:
        return _ModelList.model_validate_json(body).data
    except ValidationError:
        raise TerminalError(f"not a list of models: {shortened(body)}") from None


def error_message(body: bytes) -> str:
    """The message in OpenAI's error object or a similar one, else the beginning of the body."""
    match _json(body):
        case (
            {"error": {"message": str(message)}}
            | {"error": str(message)}
            | {"message": str(message)}
            | {"detail": str(message)}
        ):
            return shortened(message.encode(errors="replace"))
        case _:
            return shortened(body)


def shortened(text: bytes) -> str:
    """The text's beginning, with its line breaks and indents as spaces."""
    line = " ".join(text.decode(errors="replace").split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else line[:MAX_ERROR_CHARACTERS] + "…"


def _json(body: bytes) -> object:
    """The body as JSON; None where it is not JSON, or nested too deep."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
