"""Checkpoints with a generation_config.json: how their answers are sampled, and where they end."""

import json
from pathlib import Path
from typing import Literal

import pytest

from engine.launch import launch
from engine.mlx_backend.backend import load_backend
from engine.values.model import ModelCard, SamplingDefaults
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Request, SamplingParams
from engine.values.settings import EngineConfig
from engine.values.tokens import pack
from measuring.random_checkpoint import VOCAB_SIZE
from tests.checkpoints import FAMILIES, write_family
from tools.events import events_of

PROMPT = tuple(range(5, 25))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_family(FAMILIES["qwen3"], tmp_path)


def _say(checkpoint: Path, content: object) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(content))


def _config(checkpoint: Path, generation_config: Literal["auto", "none"] = "auto") -> EngineConfig:
    return EngineConfig(
        str(checkpoint), kv_cache_bytes=4 << 20, generation_config=generation_config
    )


def _card(config: EngineConfig) -> ModelCard:
    return load_backend(config, lambda line: None).card


async def _greedy(checkpoint: Path) -> list[OutputEvent]:
    engine = await launch(_config(checkpoint), lambda line: None)
    request = Request("greedy", pack(PROMPT), 12, SamplingParams(temperature=0))
    events = [event async for event in events_of(engine, request)]
    await engine.drain(0.0)
    return events


def test_the_card_has_the_files_defaults_unless_they_are_turned_off(checkpoint: Path) -> None:
    _say(checkpoint, {"temperature": 0.6, "top_k": 20, "eos_token_id": [7, 9]})
    card, plain = _card(_config(checkpoint)), _card(_config(checkpoint, "none"))
    assert card.sampling == SamplingDefaults(temperature=0.6, top_k=20)
    assert plain.sampling == SamplingDefaults()
    assert {7, 9} <= card.eos_token_ids == plain.eos_token_ids


@pytest.mark.slow
async def test_each_end_token_of_the_file_ends_an_answer(checkpoint: Path) -> None:
    free = await _greedy(checkpoint)
    tokens = [token for event in free for token in event.token_ids]
    assert (free[-1].finish_reason, len(tokens)) == (FinishReason.LENGTH, 12)
    end = tokens[-1]
    _say(checkpoint, {"eos_token_id": [VOCAB_SIZE - 1, end]})
    ended = await _greedy(checkpoint)
    assert (ended[-1].finish_reason, ended[-1].stopped_by) == (FinishReason.STOP, end)


def test_the_tokenizers_own_end_stays_one(checkpoint: Path) -> None:
    before = _card(_config(checkpoint)).eos_token_ids
    _say(checkpoint, {"eos_token_id": 7})
    after = _card(_config(checkpoint)).eos_token_ids
    assert 7 in after
    assert len(after) == len(before) + 1


@pytest.mark.parametrize("end", ["</s>", [7, "</s>", -1, VOCAB_SIZE, None], [[7]], 7.5, {"a": 7}])
def test_what_is_no_token_ends_nothing(checkpoint: Path, end: object) -> None:
    before = _card(_config(checkpoint)).eos_token_ids
    _say(checkpoint, {"eos_token_id": end})
    assert _card(_config(checkpoint)).eos_token_ids - before <= {7}


def test_a_file_that_is_cut_short_stops_nobody(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.6, "eos_')
    lines: list[str] = []
    assert load_backend(_config(checkpoint), lines.append).card.sampling == SamplingDefaults()
    assert any(line.startswith("generation_config.json is ignored: ") for line in lines)
