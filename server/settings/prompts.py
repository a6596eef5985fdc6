"""The file of prompts that `warm_prompts` names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

MOST_PROMPTS = 1000
MOST_BYTES = 64 * 1024**2


class PromptFileError(Exception):
    """The file cannot be read, or has something else than prompts."""


def read_prompts(path: Path) -> Sequence[Mapping[str, object]]:
    """The prompts of a file: a list in JSON or YAML, or a prompt on each line of a `.jsonl` file.
    Each is a mapping with `messages` or with `prompt`; a text stands for its `prompt`.

    Raises PromptFileError, whose message names the prompt at fault.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise PromptFileError(f"{path} has more than {MOST_BYTES >> 20} MiB")
        text = path.read_text("utf-8")
    except OSError as error:
        raise PromptFileError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path} is not UTF-8") from error
    try:
        if path.suffix == ".jsonl":
            found: object = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            found = yaml.safe_load(text)  # of which JSON is a part
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON lines" if path.suffix == ".jsonl" else "JSON or YAML"
        reason = " ".join(str(error).split())
        raise PromptFileError(f"{path} cannot be read as {kind}: {reason}") from error
    if not isinstance(found, list):
        raise PromptFileError(f"{path} must be a list of prompts")
    if len(found) > MOST_PROMPTS:
        raise PromptFileError(f"{path} has {len(found):,} prompts; at most {MOST_PROMPTS:,}")
    return [_prompt(each, f"{path}, prompt {number}") for number, each in enumerate(found, 1)]


def _prompt(found: object, where: str) -> Mapping[str, object]:
    prompt = {"prompt": found} if isinstance(found, str) else found
    if not isinstance(prompt, dict) or ("messages" in prompt) == ("prompt" in prompt):
        raise PromptFileError(f"{where}: must have either messages or prompt")
    if unknown := sorted(set(map(str, prompt)) - _FIELDS):
        fields = ", ".join(sorted(_FIELDS))
        raise PromptFileError(f"{where}: there is no field {unknown[0]}; there are {fields}")
    return prompt


_FIELDS = {
    *("messages", "tools", "prompt", "pin"),
    *("chat_template_kwargs", "reasoning_effort", "cache_salt"),
}
