"""The YAML file of the settings, and the log level."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field


class GeneralSettings(BaseModel):
    config: Path | None = Field(None, description="A YAML file with any of these settings.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least that is worth a line in the log."
    )
