"""Chat completions of a server, as typed events."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from server.terminal.client.events import Event, Finish
from server.terminal.client.http import PATIENT, Endpoint, answer, connection, shown
from server.terminal.client.models import models_of
from server.terminal.client.sse import EventStream
from server.terminal.client.wire import chunk_events
from server.terminal.errors import TerminalError

DONE = b"[DONE]"

Message = Mapping[str, str]
Parameters = Mapping[str, float]  # of sampling, by their names in the API


@dataclass(frozen=True, slots=True)
class ChatClient:
    """A client of one model of one server."""

    http: httpx.Client
    model: str
    parameters: Parameters

    @property
    def base_url(self) -> str:
        return shown(self.http.base_url)

    def answer(self, messages: Sequence[Message]) -> Generator[Event, None, None]:
        """Yield an answer's events as they come. Closing the generator closes the connection,
        which aborts the request at the server.

        Raises TerminalError.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.parameters,
        }
        with answer(self.http, "POST", "chat/completions", body) as response:
            yield from _events(response)


@contextmanager
def connected(
    endpoint: Endpoint, model: str | None, parameters: Parameters
) -> Iterator[ChatClient]:
    """A client for the model, or for the first one that the server lists.

    Raises TerminalError.
    """
    with connection(endpoint, PATIENT) as http:
        yield ChatClient(http, model or models_of(http)[0].name, parameters)


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
        raise TerminalError("the stream ended before the answer did")
