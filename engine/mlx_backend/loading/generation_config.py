"""What a checkpoint's generation_config.json says of sampling.

The format is transformers' GenerationConfig. `do_sample` counts for nothing, as in vLLM: there its
default is false, which says nothing about how a model is best served. Greedy is a temperature of 0.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from reprlib import repr as short
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from engine.api import Report
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.loading.checkpoint_files import GENERATION_CONFIG
from engine.values.model import SamplingDefaults


def sampling_defaults(checkpoint: Path, report: Report) -> SamplingDefaults:
    """What the file says; a value that no request could have is reported and left out."""
    given: dict[str, Any] = {}
    content = _content(checkpoint / GENERATION_CONFIG, report)
    for name, kind in get_type_hints(SamplingDefaults, include_extras=True).items():
        if content.get(name) is None:
            continue
        try:
            given[name] = TypeAdapter(kind).validate_python(content[name], strict=True)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]["msg"]
            report(f"{GENERATION_CONFIG}: {name} is ignored: {fault}, not {short(content[name])}")
    defaults = SamplingDefaults(**given)
    if given:
        values = ", ".join(f"{name} {value:g}" for name, value in asdict(defaults).items())
        report(f"sampling defaults: {values}")
    return defaults


def _content(file: Path, report: Report) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        report(f"{GENERATION_CONFIG} is ignored: {one_line(error)}")
        return {}
    return content if isinstance(content, dict) else {}
