"""`GET /health`, `/version` and `/load`."""

from typing import Literal

from pydantic import BaseModel


class Health(BaseModel):
    status: Literal["ok", "degraded"]
    reason: str | None = None  # why it is degraded; left out where it is not


class Version(BaseModel):
    version: str


class Load(BaseModel):
    """In sequences: a request with `n: 4` is four."""

    server_load: int  # asked for and not over yet; vLLM's name
    running: int  # computed in the present step
    waiting: int  # queued now
