"""A model that is fetched from Hugging Face, and lines that tell how far it is."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from engine.launch import ModelError, fetch_checkpoint, find_checkpoint
from server.dialects.dialect import wire_json
from server.dialects.ollama.errors import ollama_error
from server.errors import SERVER, ApiError
from server.schemas.ollama.models import OllamaProgress
from server.transport.sse import json_line

LINE_SECONDS = 0.25  # between two lines

SUCCESS = OllamaProgress(status="success")


class Pull:
    """Fetches a model's files, if they are not there, in a thread that outlives its client."""

    def __init__(self, name: str, source: str | None) -> None:
        """`source` is where a served model of this name comes from, which may be a directory or the
        embedded model. None: the name is that of a repository, and no directory is looked at.
        """
        self._name = name
        self._source = source
        self._progress = (0, 0)  # bytes that are there, and those that will be

    async def run(self) -> None:
        """Raises ApiError (500), as Ollama does, with what went wrong."""
        await self._fetched()

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines up to `success`, or to the error."""
        yield json_line(wire_json(OllamaProgress(status="pulling manifest")))
        fetched = asyncio.ensure_future(self._fetched())
        said = self._progress
        while not (await asyncio.wait({fetched}, timeout=LINE_SECONDS))[0]:
            if said != self._progress:
                said = self._progress
                yield self._line()
        try:
            fetched.result()
        except ApiError as error:
            yield json_line(wire_json(ollama_error(error)))
        else:
            yield json_line(wire_json(SUCCESS))

    def _line(self) -> bytes:
        completed, total = self._progress
        line = OllamaProgress(
            status=f"pulling {self._name}",
            digest=self._name,
            total=total,
            completed=completed,
        )
        return json_line(wire_json(line))

    async def _fetched(self) -> None:
        fetch = partial(fetch_checkpoint, self._name, self._note)
        if self._source is not None:
            fetch = partial(find_checkpoint, self._source, download=True, progress=self._note)
        try:
            await asyncio.to_thread(fetch)
        except ModelError as error:
            raise ApiError(500, str(error), type=SERVER, code="pull_failed") from error

    def _note(self, completed: int, total: int) -> None:
        self._progress = (completed, total)
