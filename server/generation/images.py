"""Images of conversations: found in a worker, prepared outside of it, and known to the next."""

from collections.abc import Sequence
from dataclasses import replace

from engine.api import Engine
from server.errors import UNSUPPORTED, InvalidField
from server.generation.conversation import Conversation, ImagePart, Part
from server.record import RequestRecord


class UnpreparedImages(Exception):
    """The images of a request are to be prepared before its prompt can be made. A worker raises it,
    and is called again when they are in the request's record.
    """

    def __init__(self, images: Sequence[ImagePart], engine: Engine) -> None:
        super().__init__(f"{len(images)} images are not prepared")
        self.images = images
        self.engine = engine


def with_images(conversation: Conversation, engine: Engine, record: RequestRecord) -> Conversation:
    """The conversation with its images as the model takes them. Raises UnpreparedImages, and
    ApiError (400) where the model takes none.
    """
    images = conversation.images
    if not images:
        return conversation
    card = engine.card
    if card.images is None:
        reason = f": {card.images_refused}" if card.images_refused else ""
        raise InvalidField(images[0].place, f"this model takes no images{reason}", UNSUPPORTED)
    unknown = [part for part in images if (part.source, part.detail) not in record.images]
    if unknown:
        raise UnpreparedImages(unknown, engine)
    messages = [
        replace(message, parts=[_known(part, record) for part in message.parts])
        if message.images
        else message
        for message in conversation.messages
    ]
    return replace(conversation, messages=messages)


def _known(part: Part, record: RequestRecord) -> Part:
    if not isinstance(part, ImagePart):
        return part
    known = record.images[part.source, part.detail]
    return replace(part, original=known.original, prepared=known.prepared)
