"""Ollama's requests as they are read."""

import json
import math
from pathlib import Path

import pytest

from server.dialects.ollama.conversation import chat_messages
from server.dialects.ollama.models import described_unloaded
from server.schemas.ollama.request import OllamaChatRequest, OllamaMessageParam


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (0, 0),
        (300, 300),
        (1.5, 1.5),
        ("0", 0),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1m0.5s", 60.5),
        ("250ms", 0.25),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (1e300, math.inf),
    ],
)
def test_a_model_is_kept_for_as_long_as_is_said(written: float | str, seconds: float) -> None:
    body = OllamaChatRequest.model_validate({"keep_alive": written})
    assert body.keep_alive == pytest.approx(seconds)


@pytest.mark.parametrize("written", ["", "m", "5x", "5m3", "five", [], {}, True, "9" * 99])
def test_what_is_no_time_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="keep_alive"):
        OllamaChatRequest.model_validate({"keep_alive": written})


def call(name: str, id: str = "") -> dict[str, object]:
    return {"id": id, "function": {"name": name, "arguments": {}}}


def message(role: str, **fields: object) -> OllamaMessageParam:
    return OllamaMessageParam.model_validate({"role": role, **fields})


def test_results_find_their_calls() -> None:
    """By id, else by the tool's name, else in order, and each call has one result."""
    messages = chat_messages(
        [
            message("assistant", tool_calls=[call("f"), call("g"), call("f"), call("h", "mine")]),
            message("tool", tool_call_id="mine"),
            message("tool", tool_name="f"),
            message("tool", tool_name="f"),
            message("tool"),
            message("tool", tool_name="nobody"),
        ]
    )
    ids = [call.id for call in messages[0].calls]
    assert len(set(ids)) == 4
    first, second, third, mine = ids
    assert mine == "mine"
    assert [answer.tool_call_id for answer in messages[1:]] == [mine, first, third, second, None]


@pytest.mark.parametrize(
    ("config", "context_tokens"),
    [
        ({"max_position_embeddings": 64, "text_config": None}, 64),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        ({"text_config": None}, 0),
    ],
)
def test_a_model_that_is_not_loaded_is_described_from_its_files(
    config: dict[str, object], context_tokens: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    described = described_unloaded("name", str(tmp_path))
    assert described.model_info["qwen3.context_length"] == context_tokens
