"""Tiny configs of mlx-lm's architectures, by name."""

from pathlib import Path
from typing import Any

import yaml


def _read() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("configs.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)["architectures"]
    return {name: {"model_type": name, **entry} for name, entry in entries.items()}


VOCAB_SIZE = 320
"""Of every one of them."""

CONFIGS = _read()
