"""`GET /admin/daemon`: what serves, how it is set, and what that takes."""

from typing import TypeAlias

from pydantic import BaseModel, ConfigDict

from engine.values.model import SamplingDefaults
from server.schemas.cache import MemoryUse, Remembered

SettingValue: TypeAlias = bool | int | float | str | list[str] | dict[str, str] | None


class DaemonModel(BaseModel):
    """The model that is served."""

    model_config = ConfigDict(from_attributes=True)

    name: str  # the directory or repository that it came from
    fingerprint: str
    dtype: str
    device: str
    blas: str  # for Linux CPUs; empty elsewhere
    max_context_tokens: int  # the model's own
    max_sequence_tokens: int  # what that and the KV cache hold of one sequence
    kv_bytes_per_token: int
    sampling: SamplingDefaults


class SettingInForce(BaseModel):
    name: str
    value: SettingValue  # a secret is stars
    is_default: bool
    description: str


class Daemon(BaseModel):
    version: str
    names: list[str]  # that requests may use, the model's own first
    model: DaemonModel | None  # None while it is not loaded
    settings: list[SettingInForce]
    memory: MemoryUse | None  # likewise
    remembered: Remembered
