"""`GET /version` and `/load`."""

from pydantic import BaseModel


class Version(BaseModel):
    version: str


class Load(BaseModel):
    """In sequences: a request with `n: 4` is four."""

    server_load: int  # asked for and not over yet; vLLM's name
    running: int  # computed in the step that the engine published last
    waiting: int  # queued then
