"""Prompts with images where more is going on: steps that are lost, K and V in fewer bits, attention
that reads blocks in place, and a draft model.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine.core.step import StepLost, StorageLost
from engine.mlx_backend.gpu.paged import PagedAttention
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.images import Features
from engine.mlx_backend.vision.families import Grid, Tower
from engine.values.settings import KVFormat
from tests.golden.compiling import ROUNDED_TOLERANCES, compile_at_once
from tests.golden.conftest import as_served
from tests.golden.imaging import ROOM, Bench, load_with_images, prompts_of, request_of
from tests.golden.test_chosen_attention import ALWAYS, Watched, chosen
from tests.golden.test_failures import from_another_thread
from tests.golden.test_lost_steps import LosesAtCollect
from tests.offline import OfflineDaemon, Room

pytest.importorskip("mlx_vlm", reason="the packages for images are not installed")

Benches = Callable[[str], Bench]

NARROW = replace(ROOM, step_tokens=24)
"""Images are encoded, and prompts computed, in many steps."""


def serve(daemon: OfflineDaemon, bench: Bench, turn: str = "cold") -> None:
    """All prompts at once; each answer is the whole model's."""
    prompts = {f"{turn} {name}": prompt for name, prompt in prompts_of(bench).items()}
    said = daemon.serve(*(request_of(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        bench.expect(prompt, said[name, 0], daemon.logprobs[name, 0])


@pytest.mark.parametrize("loss", [StepLost, StorageLost])
@pytest.mark.parametrize("left", [1, 2, 3, 5, 9, 14])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_steps_that_are_lost(
    bench_of: Benches, family: str, left: int, loss: type[StepLost]
) -> None:
    """While an image is encoded, while its tokens are computed, and later."""
    bench, attention = bench_of(family), chosen(Watched(), ALWAYS)
    daemon = OfflineDaemon(
        bench.served,
        attention,
        NARROW,
        watch=lambda runner: LosesAtCollect(runner, left, loss),
    )
    serve(daemon, bench)
    assert attention.problem
    serve(daemon, bench, "warm")  # from what is cached since


def raises(pixels: mx.array) -> mx.array:
    raise RuntimeError("[malloc] Unable to allocate 137438953472 bytes.")


def overflows(array: mx.array) -> mx.array:
    return array * mx.inf


def fails_on_the_device(array: mx.array) -> mx.array:
    return array + from_another_thread()


@pytest.mark.parametrize("fault", [raises, fails_on_the_device, overflows])
@pytest.mark.parametrize("place", ["pixels", "features"])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_an_image_that_cannot_be_encoded_ends_its_requests_alone(
    bench_of: Benches,
    family: str,
    place: str,
    fault: Callable[[mx.array], mx.array],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the tower's first layer or its last, before the device computes or while it does. The
    other requests of the step, one of which waits for the image after it, go on. Once the fault
    is gone, the image is encoded.
    """
    bench = bench_of(family)
    prompts, lost = prompts_of(bench), bench.scene.image(50)
    doomed = bench.scene.prompt(bench.text(9, 51), lost, bench.text(4, 52))
    encoder = bench.served.encoder
    assert encoder is not None
    encoder.forget_all()  # what another daemon has encoded
    pixels, kind = mx.array(np.load(lost.image.file)), type(encoder.tower)
    compute = kind.__call__

    def broken(tower: Tower, given: mx.array, grid: Grid) -> Features:
        is_lost = given.shape == pixels.shape and bool(mx.allclose(given, pixels))
        if not is_lost:
            return compute(tower, given, grid)
        if place == "pixels":
            return compute(tower, fault(given), grid)
        found = compute(tower, given, grid)
        return found._replace(embeddings=fault(found.embeddings))

    daemon = bench.daemon(NARROW)
    said, errors = defaultdict[tuple[str, int], list[int]](list), dict[str, str]()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", broken)
        daemon.add(request_of("text", prompts["text"]))
        daemon.step(3, said)
        for name, prompt in {"lost": doomed, "twin": doomed, **prompts}.items():
            if name != "text":
                daemon.add(request_of(name, prompt))
        while not daemon.loop.is_idle:
            for event in daemon.turn():
                if event.error is not None:
                    errors[event.request_id] = event.error
                said[event.request_id, 0] += event.token_ids
                daemon.logprobs[event.request_id, 0] += event.logprobs
    assert errors.keys() == {"lost", "twin"}
    for error in errors.values():
        assert error.startswith("an image of the prompt cannot be encoded: ")
    for name, prompt in prompts.items():
        bench.expect(prompt, said[name, 0], daemon.logprobs[name, 0])
    again = daemon.serve(request_of("again", doomed))
    bench.expect(doomed, again["again", 0], daemon.logprobs["again", 0])
    assert daemon.loop.metrics.contradictions == 0


@pytest.mark.parametrize("family", ["qwen3_vl", "pixtral", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("compiles", [True, False])
def test_attention_that_reads_blocks_in_place(
    bench_of: Benches, family: str, compiles: bool
) -> None:
    bench = bench_of(family)
    daemon = OfflineDaemon(
        bench.served,
        PagedAttention(Attention(), as_served, min_saved_blocks=1),
        ROOM,
        decode=compile_at_once if compiles else None,
    )
    serve(daemon, bench)
    serve(daemon, bench, "warm")


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma4"])
@pytest.mark.parametrize("kv_format", [KVFormat.Q8, KVFormat.K8V4])
def test_kv_in_fewer_bits(bench_of: Benches, family: str, kv_format: KVFormat) -> None:
    """The whole model, too, attends to K and V as they are stored: cold, from the cache and in
    chunks.
    """
    scene = bench_of(family).scene
    bench = Bench(scene, load_with_images(scene.checkpoint, kv_format))
    bench.whole.store_in_format(bench.served.layout)
    prompts = prompts_of(bench)
    for room in (ROOM, NARROW):
        daemon = bench.daemon(room)
        for turn in ("cold", "warm"):
            requests = [request_of(f"{turn} {name}", each) for name, each in prompts.items()]
            said = daemon.serve(*requests)
            for name, prompt in prompts.items():
                key = f"{turn} {name}", 0
                error = bench.error(prompt, said[key], daemon.logprobs[key])
                assert error < ROUNDED_TOLERANCES[kv_format], (room, key)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_draft_model_drafts_for_texts_alone(bench_of: Benches, family: str) -> None:
    """It would read placeholders for what an image shows."""
    bench = bench_of(family)
    daemon = OfflineDaemon(
        bench.served,
        bench.served.execution.attention,
        ROOM,
        clock=lambda: 0.0,
        draft=(bench.served, Room(64)),
    )
    serve(daemon, bench)
    accepted = {name: usage.accepted_draft_tokens for name, usage in daemon.usage.items()}
    assert accepted.pop("cold text") > 2
    assert not any(accepted.values())
