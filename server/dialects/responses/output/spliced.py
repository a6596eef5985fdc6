"""JSON of what tells of text. The logprobs in it are rendered when they come, and once: a stream's
last events repeat those of the whole answer four times.
"""

from collections.abc import Iterator

from pydantic import BaseModel

from server.schemas.responses.events import ItemEvent, PartEvent
from server.schemas.responses.output import OutputMessage, Told
from server.schemas.responses.response import ResponseNews

BLANK = b'"logprobs":[]'
"""With quotes of its own, so that no text can be taken for it."""


def spliced_json(model: BaseModel) -> bytes:
    """Keys that were not set are left out; nulls that were set are sent."""
    first, *rest = model.model_dump_json(exclude_unset=True).encode().split(BLANK)
    pieces = [first]
    for told, piece in zip(_told(model), rest, strict=True):
        pieces += (BLANK[:-1], told, b"]", piece)
    return b"".join(pieces)


def _told(model: BaseModel) -> Iterator[bytes]:
    """What goes into the blanks."""
    match model:
        case Told():
            yield model.rendered
        case PartEvent():
            yield from _told(model.part)
        case ItemEvent():
            yield from _told(model.item)
        case OutputMessage():
            for part in model.content:
                yield from _told(part)
        case ResponseNews():
            for item in model.output:
                yield from _told(item)
