"""JSON of models with logprobs. Logprobs are rendered once, when they come: the last events of a
stream repeat those of the whole answer four times.
"""

from collections.abc import Iterator

from pydantic import BaseModel

from server.schemas.responses.events import ItemEvent, PartEvent
from server.schemas.responses.output import HasLogprobs, OutputMessage
from server.schemas.responses.response import ResponseState

BLANK = b'"logprobs":[]'
"""It contains quotes, so no text in JSON can equal it."""


def rendered_json(model: BaseModel) -> bytes:
    """As `wire_json`, with the rendered logprobs put in."""
    first, *rest = model.model_dump_json(exclude_unset=True).encode().split(BLANK)
    pieces = [first]
    for logprobs, piece in zip(_logprobs(model), rest, strict=True):
        pieces += (BLANK[:-1], logprobs, b"]", piece)
    return b"".join(pieces)


def _logprobs(model: BaseModel) -> Iterator[bytes]:
    """What replaces the blanks, in their order."""
    match model:
        case HasLogprobs():
            yield model.rendered_logprobs
        case PartEvent():
            yield from _logprobs(model.part)
        case ItemEvent():
            yield from _logprobs(model.item)
        case OutputMessage():
            for part in model.content:
                yield from _logprobs(part)
        case ResponseState():
            for item in model.output:
                yield from _logprobs(item)
