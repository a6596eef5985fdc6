"""Ollama's error object: a text alone. The status says the rest."""

from server.errors import ApiError, ModelNotFound
from server.schemas.ollama.answer import OllamaError

FIELDS = {"stop": "options.stop", "response_format": "format"}
"""Fields of a chat, or of a completion, with another name in Ollama's requests."""


def ollama_error(error: ApiError) -> OllamaError:
    if isinstance(error, ModelNotFound):
        return OllamaError(error=f"model '{error.name}' not found")  # the CLI looks for these words
    text = str(error)
    if error.param in FIELDS and text.startswith(error.param):
        text = FIELDS[error.param] + text.removeprefix(error.param)
    return OllamaError(error=text)
