"""Prompts with images: each answer is that of one forward of the family's whole model, however the
prompt was cut, shared, preempted or crowded.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.inbox import Inbox
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.model.attention import Attention
from engine.values.settings import KVFormat
from tests.golden.compiling import compile_at_once
from tests.golden.imaging import (
    N_TOKENS,
    ROOM,
    Bench,
    encoded,
    load_with_images,
    prompts_of,
    request_of,
    serve,
)
from tests.golden.test_restarts import disk_cache
from tests.offline import OfflineDaemon
from tests.unit.scripted_drafter import ScriptedDrafter
from tests.vision_checkpoints import VISION_FAMILIES

pytest.importorskip("mlx_vlm", reason="the packages for images are not installed")

FAST = ("qwen3_vl", "pixtral", "gemma3")
HALF = 0.2
"""Of log-probabilities where K and V are stored in bfloat16."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in VISION_FAMILIES
    ]
)
def bench(request: pytest.FixtureRequest, bench_of: Callable[[str], Bench]) -> Bench:
    return bench_of(request.param)


def test_alone(bench: Bench) -> None:
    for name, prompt in prompts_of(bench).items():
        serve(bench.daemon(), bench, {name: prompt})


def test_crowded(bench: Bench) -> None:
    serve(bench.daemon(), bench, prompts_of(bench))


def test_resent_and_continued(bench: Bench) -> None:
    """All of a resent prompt but its last token is cached, nothing is encoded again, and another
    image of the same size shares the text before it alone.
    """
    scene = bench.scene
    before, image, after = bench.text(17, 20), scene.image(3), bench.text(9, 21)
    prompt = scene.prompt(before, image, after)
    daemon = bench.daemon()
    serve(daemon, bench, {"first": prompt, "twin": prompt})
    serve(daemon, bench, {"again": prompt})
    assert daemon.usage["again"].cached_tokens == len(prompt[0]) - 1
    serve(daemon, bench, {"more": scene.prompt(before, image, after, bench.text(6, 22))})
    assert encoded(daemon) == 1
    serve(daemon, bench, {"other": scene.prompt(before, scene.image(4), after)})
    assert encoded(daemon) == 2
    assert daemon.usage["other"].cached_tokens <= prompt[1][0].start
    parts = bench.text(5, 23), scene.image(5), bench.text(3, 24)
    serve(daemon, bench, {"forked": scene.prompt(before, image, *parts)})
    assert encoded(daemon) == 3


@pytest.mark.parametrize("step_tokens", [18, 19, 21, 26, 33])
def test_chunks_of_any_width(bench: Bench, step_tokens: int) -> None:
    prompts = {name: prompts_of(bench)[name] for name in ("two", "in a row")}
    if not bench.scene.layout.is_whole:
        step_tokens -= 10
    serve(bench.daemon(replace(ROOM, step_tokens=step_tokens)), bench, prompts)


def test_several_answers_share_their_prompt(bench: Bench) -> None:
    prompt, daemon = prompts_of(bench)["two"], bench.daemon()
    said = daemon.serve(replace(request_of("n", prompt), n=3))
    for index in range(3):
        bench.expect(prompt, said["n", index], daemon.logprobs["n", index])
    assert encoded(daemon) == 2


@pytest.mark.parametrize("attention", [Attention, CascadeAttention])
def test_attentions(bench: Bench, attention: Callable[[], Attention]) -> None:
    scene, before = bench.scene, bench.text(19, 30)
    image, text = scene.image(6), bench.text
    shared = {
        f"{n}": scene.prompt(before, image, text(24, 31), text(3 + n, 32 + n)) for n in range(4)
    }
    daemon = bench.daemon(attention=attention())
    serve(daemon, bench, {"first": scene.prompt(before, image, text(24, 31))})
    serve(daemon, bench, shared)


def test_compiled_decodes(bench: Bench) -> None:
    if bench.served.execution.batching.int_offsets:
        pytest.skip("its steps are not compiled, without images either")
    daemon = OfflineDaemon(
        bench.served, bench.served.execution.attention, ROOM, decode=compile_at_once
    )
    serve(daemon, bench, prompts_of(bench))


def test_file_that_is_gone(bench: Bench, tmp_path: Path) -> None:
    """A prompt whose image cannot be read fails, and others are as they were."""
    prompts = prompts_of(bench)
    tokens, [image] = prompts["middle"]
    lost = replace(image, digest=bytes(32), file=str(tmp_path / "none.npy"))
    daemon = bench.daemon()
    daemon.add(request_of("lost", (tokens, (lost,))))
    daemon.add(request_of("well", prompts["two"]))
    said, errors = list[int](), list[str]()
    while not daemon.loop.is_idle:
        for event in daemon.turn():
            errors += [event.request_id] if event.error is not None else []
            said += event.token_ids if event.request_id == "well" else ()
            daemon.logprobs[event.request_id, 0] += event.logprobs
    assert errors == ["lost"]
    bench.expect(prompts["two"], said, daemon.logprobs["well", 0])


def test_drafts_after_images(bench: Bench) -> None:
    """Rows that verify drafts have the rotary positions of rows that do not."""
    prompts = prompts_of(bench)
    said = bench.daemon().serve(*(request_of(name, prompt) for name, prompt in prompts.items()))
    daemon = OfflineDaemon(bench.served, bench.served.execution.attention, ROOM, clock=lambda: 0.0)
    for number, (name, prompt) in enumerate(prompts.items()):
        daemon.add(request_of(name, prompt))
        script = list(said[name, 0])
        script[number % N_TOKENS] += 1
        daemon.speculate(name, ScriptedDrafter(script))
    found = daemon.serve()
    for name, prompt in prompts.items():
        bench.expect(prompt, found[name, 0], daemon.logprobs[name, 0])
    accepted = sum(daemon.usage[name].accepted_draft_tokens for name in prompts)
    assert accepted or bench.served.layout.states


def test_restart_with_the_disk_tier(bench: Bench, tmp_path: Path) -> None:
    prompt = bench.scene.prompt(
        bench.text(33, 40), bench.scene.image(7), bench.text(40, 41), bench.scene.image(8), [5, 6]
    )
    for life in ("first", "second"):
        inbox = Inbox()
        attention = bench.served.execution.attention
        disk = disk_cache(tmp_path, inbox)
        daemon = OfflineDaemon(bench.served, attention, ROOM, disk=disk, inbox=inbox)
        serve(daemon, bench, {life: prompt})
        daemon.loop.stop()
        daemon.loop.run()
    assert daemon.usage[life].cached_tokens > 32
    assert encoded(daemon) < 2


def test_kv_in_half_precision(bench: Bench) -> None:
    served = load_with_images(bench.scene.checkpoint, KVFormat.BF16)
    daemon = OfflineDaemon(served, served.execution.attention, ROOM)
    prompts = prompts_of(bench)
    said = daemon.serve(*(request_of(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert bench.error(prompt, said[name, 0], daemon.logprobs[name, 0]) < HALF
