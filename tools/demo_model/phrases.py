"""The phrases of one task, from phrases.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_PHRASES: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("phrases.yaml").read_text("utf-8")
)


def phrases(task: str) -> Mapping[str, Any]:
    """Lists of patterns by name."""
    return _PHRASES[task]
