"""Prompts with images that are drawn at random: where the images stand, how the text is long, where
one prompt forks off another, and which ids of images stand in the text, sent or generated. Each
answer is that of one forward of the family's whole model.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import pytest

from engine.core.inbox import Inbox
from engine.values.images import PreparedImage
from tests.golden.imaging import (
    GREEDY,
    N_TOKENS,
    ROOM,
    Bench,
    Prompt,
    encoded,
    request_of,
    serve,
)
from tests.golden.test_restarts import disk_cache
from tests.offline import OfflineDaemon
from tests.vision_checkpoints import VISION_FAMILIES

pytest.importorskip("mlx_vlm", reason="the packages for images are not installed")

FAST = ("qwen3_vl", "pixtral", "gemma3")
SEEDS = range(2)

Part: TypeAlias = list[int] | PreparedImage


@pytest.fixture(
    params=[
        pytest.param((name, seed), id=f"{name}-{seed}", marks=marks)
        for number, name in enumerate(VISION_FAMILIES)
        for seed in (SEEDS if name in FAST else (number % len(SEEDS),))
        for marks in [() if name in FAST and not seed else pytest.mark.slow]
    ]
)
def scene(request: pytest.FixtureRequest, bench_of: Callable[[str], Bench]) -> "Drawn":
    family, seed = request.param
    return Drawn(bench_of(family), random.Random(seed))


@dataclass(frozen=True)
class Drawn:
    """Draws the parts of prompts."""

    bench: Bench
    draw: random.Random

    def text(self, least: int = 1, most: int = 14) -> list[int]:
        return self.bench.text(self.draw.randint(least, most), self.draw.randrange(1 << 30))

    def image(self, *, like: PreparedImage | None = None) -> PreparedImage:
        """Any image, or another one of the same size as one of these."""
        while True:
            rows, columns = self.draw.choice([(2, 3), (3, 2), (2, 2), (3, 3)])
            found = self.bench.scene.image(self.draw.randrange(1 << 30), rows, columns)
            if like is None or found.image.grid == like.image.grid:
                return found

    def trunk(self) -> list[Part]:
        """One image or several, at the beginning, within and right before the end."""
        parts: list[Part] = [self.text(0)]
        for _ in range(self.draw.randint(1, 3)):
            parts += [self.image(), self.text(0)]
        return [*parts, self.text()]

    def forks(self, trunk: Sequence[Part]) -> Iterator[list[Part]]:
        """Prompts that begin as the trunk does: each leaves it at another of its images or within
        another of its texts, and one goes on after it.
        """
        for at, part in enumerate(trunk):
            if isinstance(part, PreparedImage):
                other: list[Part] = [self.image(like=part)]
            elif part:
                other = [[*part[: self.draw.randrange(len(part))], *self.text()]]
            else:
                continue
            yield [*trunk[:at], *other, *trunk[at + 1 :], self.text()]
        yield [*trunk, self.text(), self.image(), self.text()]

    def prompts(self) -> dict[str, Prompt]:
        trunk = self.trunk()
        prompts = {"trunk": self.bench.scene.prompt(*trunk)}
        for number, parts in enumerate(self.forks(trunk)):
            prompts[f"fork {number}"] = self.bench.scene.prompt(*parts)
        return prompts

    def impostor(self) -> list[int]:
        """Text with the ids that stand for images and around them, some as an image has them."""
        layout, config = self.bench.scene.layout, self.bench.scene.config
        ids = {layout.placeholder, layout.part, *layout.before, *layout.after, *layout.row_end}
        ids |= {config[name] for name in config.keys() & set(_AROUND)}
        found = list[int]()
        for _ in range(self.draw.randint(2, 5)):
            found += self.text()
            found += self.draw.choices(sorted(ids), k=self.draw.randint(1, 9))
            found += self.image().tokens if self.draw.random() < 0.5 else ()
        return [*found, *self.text()]


_AROUND = "vision_start_token_id", "vision_end_token_id", "video_token_id"


def named(prompt: Prompt) -> list[object]:
    """What each token is: its id, or which part of which image."""
    tokens, images = prompt
    names: list[object] = list(tokens)
    for image in images:
        part = 0
        for first, n_tokens in image.runs:
            for at in range(first, first + n_tokens):
                names[at] = image.digest, part
                part += 1
    return names


class Sharing:
    """What a daemon has computed, and so what it may find of a prompt."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._known = list[list[object]]()
        self._needed = set[bytes]()
        layout = bench.served.layout
        self._is_exact = not layout.windows and not layout.states

    def check(self, daemon: OfflineDaemon, name: str, prompt: Prompt, said: Sequence[int]) -> None:
        """After the prompt was served alone: what is cached is what it shares with others, and an
        image was encoded if some of its tokens were not cached.
        """
        own, cached = named(prompt), daemon.usage[name].cached_tokens
        shared = max((_shared(own, known) for known in self._known), default=0)
        shared = min(shared, len(own) - 1)
        assert cached == shared if self._is_exact else cached <= shared, name
        self._needed |= {image.digest for image in prompt[1] if image.stop > cached}
        assert encoded(daemon) == len(self._needed), name
        self._known.append([*own, *said])


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def test_prompts_that_fork_are_shared_up_to_there(scene: Drawn) -> None:
    """Cold, then from what the ones before have left, and then warm."""
    daemon, sharing, prompts = scene.bench.daemon(), Sharing(scene.bench), scene.prompts()
    for turn in ("cold", "warm"):
        for number, prompt in enumerate(prompts.values()):
            name = f"{turn} {number}"
            said = serve(daemon, scene.bench, {name: prompt})
            sharing.check(daemon, name, prompt, said[name, 0])


def test_prompts_that_fork_at_once(scene: Drawn) -> None:
    """Crowded, cold and warm, in steps of any width."""
    prompts = scene.prompts()
    least = 19 if scene.bench.scene.layout.is_whole else 8
    daemon = scene.bench.daemon(replace(ROOM, step_tokens=scene.draw.randint(least, 40)))
    for turn in ("cold", "warm"):
        serve(daemon, scene.bench, {f"{turn} {name}": each for name, each in prompts.items()})


def test_preempted(scene: Drawn) -> None:
    """With ever more blocks, from those of the longest prompt on, until some were preempted."""
    prompts, n_preempted = scene.prompts(), 0
    longest = max(len(tokens) for tokens, _ in prompts.values()) + N_TOKENS
    for n_blocks in range(-(-longest // 4) + 1, ROOM.n_blocks):
        daemon = scene.bench.daemon(replace(ROOM, n_blocks=n_blocks, block_size=4))
        serve(daemon, scene.bench, prompts)
        n_preempted += daemon.scheduler.metrics.preemptions
        if n_preempted > 2:
            return
    raise AssertionError("nothing was preempted")


def test_every_width_of_a_chunk(scene: Drawn) -> None:
    """From one token, or one image that is computed as a whole, to the prompt."""
    one, other = scene.image(), scene.image()
    prompt = scene.bench.scene.prompt(
        scene.text(0, 4), one, scene.text(0, 3), other, scene.text(2, 4)
    )
    least = 1
    if scene.bench.scene.layout.is_whole:
        least = max(image.n_tokens for image in prompt[1])
    for width in range(least, len(prompt[0]) + 1):
        serve(
            scene.bench.daemon(replace(ROOM, step_tokens=width, max_running=1)),
            scene.bench,
            {f"{width}": prompt},
        )


def lives(bench: Bench, folder: Path, n_lives: int) -> Iterator[OfflineDaemon]:
    """Daemons that have one disk, one after the other."""
    for _ in range(n_lives):
        inbox = Inbox()
        attention, disk = bench.served.execution.attention, disk_cache(folder, inbox)
        daemon = OfflineDaemon(bench.served, attention, ROOM, disk=disk, inbox=inbox)
        yield daemon
        daemon.loop.stop()
        daemon.loop.run()


def test_restarts(scene: Drawn, tmp_path: Path) -> None:
    """Each life finds on disk what those before have computed, and computes the rest."""
    prompts = list(scene.prompts().items())
    prompts.insert(0, ("long", _long(scene)))
    scene.draw.shuffle(prompts)
    n_cached = 0
    for life, daemon in enumerate(lives(scene.bench, tmp_path, 3)):
        for name, prompt in prompts[: (life + 1) * len(prompts) // 3]:
            serve(daemon, scene.bench, {name: prompt})
            shared = max(
                _shared(named(prompt), named(other)) for _, other in prompts if other != prompt
            )
            assert daemon.usage[name].cached_tokens <= max(shared, len(prompt[0]) - 1)
        n_cached += sum(usage.cached_tokens for usage in daemon.usage.values())
    assert n_cached


def _long(scene: Drawn) -> Prompt:
    """A prompt that is worth its space on a disk."""
    return scene.bench.scene.prompt(
        scene.text(33, 40), scene.image(), scene.text(33, 40), scene.image(), scene.text()
    )


def test_sent_ids_of_images_are_tokens(scene: Drawn, tmp_path: Path) -> None:
    """Among images and in place of one, before a restart and after it."""
    bench, before, image = scene.bench, scene.text(34, 40), scene.image()
    real = bench.scene.prompt(before, image, scene.text(34, 40), image, scene.text())
    prompts = {
        "real": real,
        "same ids": (real[0], ()),
        "first alone": (real[0], real[1][:1]),
        "second alone": (real[0], real[1][1:]),
        "text": bench.scene.prompt(scene.impostor()),
        "around": bench.scene.prompt(scene.impostor(), image, scene.impostor()),
    }
    for daemon in lives(bench, tmp_path, 2):
        order = list(prompts.items())
        scene.draw.shuffle(order)
        for name, prompt in order:
            serve(daemon, bench, {name: prompt})
        serve(daemon, bench, {f"crowded {name}": prompt for name, prompt in order})


def test_what_ids_of_images_share(scene: Drawn) -> None:
    """With an image that has the same ids: the text before it, and nothing of it."""
    bench = scene.bench
    real = bench.scene.prompt(scene.text(3), scene.image(), scene.text(), scene.image(), [5])
    prompts = [real, (real[0], ()), (real[0], real[1][:1]), (real[0], real[1][1:])]
    scene.draw.shuffle(prompts)
    daemon, sharing = bench.daemon(), Sharing(bench)
    for number, prompt in enumerate(prompts):
        said = serve(daemon, bench, {f"{number}": prompt})
        sharing.check(daemon, f"{number}", prompt, said[f"{number}", 0])


def test_generated_ids_of_images_are_tokens(scene: Drawn, tmp_path: Path) -> None:
    """A model that says nothing else, and the turns that follow, with images and without."""
    bench, layout = scene.bench, scene.bench.scene.layout
    ids = [layout.part, layout.placeholder, *layout.before, *layout.after, *layout.row_end]
    tokens, images = _long(scene)
    for daemon in lives(bench, tmp_path, 2):
        for number, pair in enumerate(pairwise([*ids, ids[0]])):
            bias = dict.fromkeys(pair, 1e4)
            forced = replace(GREEDY, logit_bias=bias, repetition_penalty=1.3)
            name = f"{number}"
            request = replace(request_of(name, (tokens, images)), sampling=forced)
            said = daemon.serve(request)[name, 0]
            assert set(said) <= bias.keys()
            turn = [*tokens, *said, *scene.text()]
            image = [] if scene.draw.random() < 0.5 else [scene.image()]
            more, added = bench.scene.prompt(*image, scene.text())
            moved = tuple(
                replace(one, runs=tuple((at + len(turn), n) for at, n in one.runs)) for one in added
            )
            follow = {f"next {name}": ([*turn, *more], (*images, *moved))}
            serve(daemon, bench, follow)
            if not bench.served.layout.states:
                assert daemon.usage[f"next {name}"].cached_tokens > images[-1].stop
