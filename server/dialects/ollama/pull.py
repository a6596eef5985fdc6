"""A model that is fetched from Hugging Face, and the lines that report how far it is."""

from collections.abc import AsyncIterator

from anyio import move_on_after

from server.dialects.dialect import wire_json
from server.dialects.ollama.errors import ollama_error
from server.downloads import Download
from server.errors import SERVER, ApiError
from server.schemas.ollama.models import OllamaProgress
from server.transport.sse import json_line

LINE_SECONDS = 0.25  # between two lines

SUCCESS = OllamaProgress(status="success")


async def pulled(download: Download | None) -> None:
    """Wait for the end; None: there is nothing to fetch. Raises ApiError (500), as Ollama does,
    with what went wrong.
    """
    if download is None:
        return
    await download.ended.wait()
    if download.error:
        raise ApiError(500, download.error, type=SERVER, code="pull_failed")


async def pull_lines(download: Download | None) -> AsyncIterator[bytes]:
    """Lines up to `success`, or to the error. None: there is nothing to fetch."""
    yield json_line(wire_json(OllamaProgress(status="pulling manifest")))
    sent = (0, 0)
    while download is not None and not download.ended.is_set():
        with move_on_after(LINE_SECONDS):
            await download.ended.wait()
        progress = download.done_bytes, download.total_bytes
        if progress != sent and not download.ended.is_set():
            sent = progress
            yield _line(download)
    try:
        await pulled(download)
    except ApiError as error:
        yield json_line(wire_json(ollama_error(error)))
    else:
        yield json_line(wire_json(SUCCESS))


def _line(download: Download) -> bytes:
    line = OllamaProgress(
        status=f"pulling {download.repository}",
        digest=download.repository,
        total=download.total_bytes,
        completed=download.done_bytes,
    )
    return json_line(wire_json(line))
