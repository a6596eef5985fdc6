"""Generated schemas, on a random checkpoint at temperature 1.

Many more: `python -m tests.schemas generated`.
"""

from pathlib import Path

import pytest

from engine.launch import launch
from engine.values.settings import EngineConfig
from tests.checkpoints import SHALLOW, write_family
from tests.schemas.answers import answers_conform

pytestmark = [pytest.mark.process, pytest.mark.slow]

SCHEMAS = 300


async def test_every_complete_answer_conforms_and_every_other_schema_is_refused(
    tmp_path: Path,
) -> None:
    model = write_family(SHALLOW, tmp_path)
    config = EngineConfig(model=str(model), kv_cache_bytes=16 << 20, max_running=32)
    engine = await launch(config, lambda line: None)
    try:
        ends = await answers_conform(engine, range(SCHEMAS), max_tokens=120)
    finally:
        await engine.drain(0.0)
    assert ends["complete"] > SCHEMAS // 2, ends
    assert ends["refused"] > SCHEMAS // 20, ends
