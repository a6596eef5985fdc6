"""The disk cache, which outlives evictions and restarts."""

from pathlib import Path
from typing import Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from engine.values.settings import DiskCacheConfig, DiskWrites
from server.settings.engine import EngineSettings

LEAST_BYTES = 16 * 1024**2
"""The tier takes no fewer: its index alone may need a few MiB."""


class DiskCacheSettings(EngineSettings):
    disk_cache: Path | None = Field(
        None,
        description="A directory on a fast disk, for KV that is to outlive evictions and restarts. "
        "It is made where it is missing. All models of a daemon share it, and one daemon at a time "
        "has it. Unset: no such cache.",
    )
    disk_cache_bytes: ByteSize = Field(
        ByteSize(20 * 1024**3),
        ge=LEAST_BYTES,
        description="The most that the directory takes for all models, as du counts it.",
    )
    disk_cache_write: Literal["selective", "all", "exit"] = Field(
        "selective",
        description="What is written: selective, long prefixes that are shared, idle or about to "
        "be evicted; all, every block as soon as it is computed; exit, nothing before the daemon "
        "stops.",
    )
    disk_cache_daily_bytes: ByteSize = Field(
        ByteSize(100 * 1024**3),
        ge=0,
        description="The most that is written in a day (of UTC) for all models, which spares the "
        "SSD. 0: no limit.",
    )
    disk_cache_shutdown_seconds: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Time for writing what is not on disk yet when the daemon stops, after running "
        "requests have ended.",
    )
    disk_cache_salted: bool = Field(
        False,
        description="Write prompts with a cache_salt, too, and those of keys that share nothing.",
    )

    @field_validator("disk_cache")
    @classmethod
    def _home_is_known(cls, directory: Path | None) -> Path | None:
        """A shell knows what ~ is; a YAML file and a unit of systemd do not."""
        try:
            return None if directory is None else directory.expanduser()
        except RuntimeError:
            raise PydanticCustomError("directory", "begins with a home that is not known") from None

    @model_validator(mode="after")
    def _there_are_prefixes_to_keep(self) -> Self:
        if self.disk_cache is not None and not self.prefix_cache:
            raise PydanticCustomError(
                "disk_cache", "disk_cache: keeps what prefix_cache shares, which is turned off"
            )
        return self

    def disk_cache_config(self) -> DiskCacheConfig | None:
        """What engines are told of it; None where there is no such cache."""
        if self.disk_cache is None:
            return None
        return DiskCacheConfig(
            directory=self.disk_cache,
            max_bytes=self.disk_cache_bytes,
            write=DiskWrites(self.disk_cache_write),
            daily_bytes=self.disk_cache_daily_bytes or None,
            shutdown_seconds=self.disk_cache_shutdown_seconds,
            salted=self.disk_cache_salted,
        )
