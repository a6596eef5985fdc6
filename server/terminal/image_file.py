"""Image files of a chat's questions."""

import base64
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from blake3 import blake3
from pydantic import Field

from server.terminal.console import TerminalError, bytes_text

MAX_IMAGE_BYTES = 20 << 20  # as the daemon has it

_BEGINNINGS: Mapping[str, bytes] = {
    "image/png": rb"\x89PNG\r\n\x1a\n",
    "image/jpeg": rb"\xff\xd8\xff",
    "image/gif": rb"GIF8[79]a",
    "image/webp": rb"RIFF.{4}WEBP",
}


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image as it is sent with each question of a conversation. The conversation's file has its
    path and its digest, not its bytes.
    """

    path: str
    digest: str
    url: Annotated[str, Field(exclude=True)] = ""  # with its data

    @property
    def part(self) -> Mapping[str, object]:
        """The part of a message's content."""
        return {"type": "image_url", "image_url": {"url": self.url}}


def typed_path(text: str) -> Path:
    """The path that a user has typed. Terminals quote the path of a file that is dropped on
    them.
    """
    if not os.path.exists(os.path.expanduser(text)):
        with suppress(ValueError):
            words = shlex.split(text)
            text = words[0] if len(words) == 1 else text
    return Path(os.path.expanduser(text))


def read_image(path: Path) -> tuple[ImageFile, int]:
    """The image in a file, and its size in bytes. Raises TerminalError."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise TerminalError(f"{path} is not a file")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TerminalError(f"cannot read {path} ({reason})") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise TerminalError(f"{path} is larger than {bytes_text(MAX_IMAGE_BYTES)}")
    for media_type, beginning in _BEGINNINGS.items():
        if re.match(beginning, data, re.DOTALL):
            url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
            return ImageFile(str(path.absolute()), blake3(data).hexdigest(), url), len(data)
    raise TerminalError(f"{path} is not a PNG, JPEG, GIF or WebP image")


def read_again(saved: ImageFile) -> ImageFile:
    """The image of a saved conversation, with its data. Raises TerminalError where the file is gone
    or has changed.
    """
    try:
        image, _ = read_image(Path(saved.path))
    except TerminalError as error:
        raise TerminalError(f"an image of the saved conversation is gone: {error}") from None
    if image.digest != saved.digest:
        raise TerminalError(f"an image of the saved conversation has changed: {saved.path}")
    return image
