"""The first start of a model on a CPU: kernels are built before it is ready, and not again."""

import asyncio
import os
from pathlib import Path
from shutil import which

import pytest

from engine.api import Engine
from engine.launch import launch
from engine.mlx_backend.loading.compiler import REAL_COMPILER
from engine.values.output import OutputEvent
from engine.values.request import Request, SamplingParams
from engine.values.settings import EngineConfig
from engine.values.tokens import pack
from tests.checkpoints import FAMILIES, write_family
from tests.devices import cpu_attention
from tools.events import events_of

pytestmark = [
    pytest.mark.process,
    cpu_attention,
    pytest.mark.skipif(which("g++") is None, reason="there is no g++"),
]

STREAMS, ROUNDS = 4, 3
SAMPLED = (
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=1, top_k=20, top_p=0.95),
    SamplingParams(seed=1, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.1),
    SamplingParams(temperature=0, top_logprobs=3),
)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that notes the kernels that are built, in a temporary folder without any."""
    programs, notes = tmp_path / "programs", tmp_path / "kernels"
    programs.mkdir()
    notes.touch()
    script = programs / "g++"
    real = os.environ.get(REAL_COMPILER) or which("g++")
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *.so*) echo "$*" >> {notes};; esac\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(REAL_COMPILER, "")
    monkeypatch.delenv(REAL_COMPILER)
    return notes


def number_of(kernels: Path) -> int:
    return len(kernels.read_text().splitlines())


def request(name: str, n_tokens: int, params: SamplingParams) -> Request:
    prompt = tuple(ord(letter) % 32 + 1 for letter in name)
    return Request(name, pack(prompt), n_tokens, params, ignore_eos=True, speculate=False)


async def answer(engine: Engine, asked: Request) -> list[OutputEvent]:
    return [event async for event in events_of(engine, asked)]


async def never_idle(engine: Engine) -> None:
    """Serve streams that overlap: each of their requests ends while others decode."""

    async def stream(index: int) -> None:
        for turn in range(ROUNDS):
            await answer(engine, request(f"s{index}t{turn}", 30 + 7 * index, SAMPLED[0]))

    await asyncio.gather(*map(stream, range(STREAMS)))


@pytest.mark.slow
async def test_all_kernels_are_built_before_the_model_is_ready_and_none_twice(
    kernels: Path, tmp_path: Path
) -> None:
    checkpoint = write_family(FAMILIES["qwen3"], tmp_path)
    config = EngineConfig(str(checkpoint), block_size=8, kv_cache_bytes=4 << 20, max_running=8)
    lines = list[str]()
    engine = await launch(config, lines.append)
    built = number_of(kernels)
    assert built > 0
    assert [line for line in lines if line.startswith("kernels: ")]
    assert any(line.startswith("preparing to sample, ") for line in lines)
    try:
        await never_idle(engine)
        decode = (await engine.stats()).decode
        assert decode is not None
        # Which of the two is faster is the machine's to say.
        assert "a compiled step takes, of an eager one's time" in decode.why
        assert (decode.compiled_steps > 0) == decode.why.startswith("compiled")
        for kind, params in enumerate(SAMPLED):
            for n_rows in (1, 3):
                rows = [request(f"{kind}-{n_rows}-{at}", 40, params) for at in range(n_rows)]
                await asyncio.gather(*(answer(engine, row) for row in rows))
        mixed = [request(f"all-{kind}", 40, params) for kind, params in enumerate(SAMPLED)]
        await asyncio.gather(*(answer(engine, row) for row in mixed))
    finally:
        await engine.drain(0.0)
    assert number_of(kernels) == built
    lines.clear()
    again = await launch(config, lines.append)
    await again.drain(0.0)
    assert number_of(kernels) == built
    assert not [line for line in lines if line.startswith("kernels: ")]
