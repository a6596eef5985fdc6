"""Files in messages of OpenAI's clients: text is read, as a text document of Messages is."""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.errors import UNSUPPORTED
from server.json_model import RequestModel

TEXTUAL = (
    *("text/", "application/json", "application/xml", "application/yaml", "application/x-yaml"),
    *("application/toml", "application/javascript", "application/x-sh", "application/sql"),
)
"""How the media types of texts begin."""


class FileFields(RequestModel):
    """A file: its data as a data URL, or in base64. Only text is served."""

    filename: str = Field("", max_length=1024)
    file_data: str = ""
    file_id: SkipJsonSchema[str] = ""
    file_url: SkipJsonSchema[str] = ""

    @property
    def text(self) -> str | None:
        """Its name and its text; None for a file that is none, or is elsewhere."""
        data = self._bytes() if self.file_data else None
        if data is None:
            return None
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        return "\n".join(filter(None, (self.filename, text)))

    def required_text(self) -> str:
        """Its name and its text. Raises PydanticCustomError where there is none."""
        text = self.text
        if text is None:
            message = "this file is not supported: the model reads text alone, as file_data"
            raise PydanticCustomError(UNSUPPORTED, message)
        return text

    def _bytes(self) -> bytes | None:
        """The file's content; None where its media type is no text's, or the data are broken."""
        head, comma, data = self.file_data.partition(",")
        kind = head.removeprefix("data:").lower()
        if not comma or kind == head.lower():
            kind, data = ";base64", self.file_data
        elif not kind.startswith((*TEXTUAL, ";")):
            return None
        if not kind.endswith(";base64"):
            return unquote_to_bytes(data)
        try:
            return base64.b64decode(data.encode(), validate=True)
        except (binascii.Error, ValueError):
            return None
