"""The engine's end: images are prepared in processes, and one bad image ends at most its own."""

# ruff: noqa: ASYNC240 - files are small here

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.api import EngineStopped, ImagesBusy, InvalidImage
from engine.images import queue as queue_module
from engine.images.decode import UnreadableImage, decode
from engine.images.layout import image_layout
from engine.images.processors import Processor
from engine.images.queue import ImageQueue, start_worker
from engine.process.child import start_child
from engine.values.images import Detail, PreparedImage
from tests.hosting import hosted
from tests.unit.images.checkpoint import write_settings
from tests.unit.images.files import PICTURES, SIGNATURE, chunk, header, noise
from tests.unit.threaded_harness import Letters, Parts

pytestmark = pytest.mark.process

FAULTY = "tests.unit.images.faulty_worker"
"""Does what the first bytes of a file say, in place of decoding it."""


class Images:
    """A queue of images of a checkpoint, and a folder with files. The processor of kimi_vl is there
    at once; transformers' are imported for some seconds.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir()
        self.checkpoint = write_settings(options.pop("name", "kimi_vl"), checkpoint)
        self.folder = folder / "images"
        self.folder.mkdir()
        self.pids: list[int] = []
        layout = image_layout(self.checkpoint)
        assert layout is not None
        start = options.pop("start", start_worker)
        options.setdefault("n_processes", 1)
        self.queue = ImageQueue(
            self.checkpoint, layout, start=partial(self._start, start), **options
        )

    def _start(self, start: Callable[[Path], Any], checkpoint: Path) -> Any:
        connection, process = start(checkpoint)
        self.pids.append(process.pid)
        return connection, process

    def write(self, name: str, encoded: bytes) -> str:
        (self.folder / name).write_bytes(encoded)
        return str(self.folder / name)

    async def prepare(self, source: str, detail: Detail = Detail.FULL) -> PreparedImage:
        async with asyncio.timeout(120):
            return await self.queue.prepare(source, str(self.folder), detail)


def faulty(checkpoint: Path) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    return start_child(FAULTY, str(checkpoint))


@pytest.fixture
async def images(tmp_path: Path) -> AsyncIterator[Images]:
    made = Images(tmp_path)
    yield made
    await made.queue.close()


@pytest.fixture
async def faults(tmp_path: Path) -> AsyncIterator[Images]:
    made = Images(tmp_path, start=faulty, image_seconds=3.0, max_waiting=3)
    yield made
    await made.queue.close()


@pytest.mark.parametrize("name", ["qwen3_vl", "kimi_vl"])
async def test_images_of_all_kinds_are_prepared_as_in_this_process(
    tmp_path: Path, name: str
) -> None:
    images = Images(tmp_path, name=name)
    processor = Processor(images.checkpoint)
    for seed in range(12):
        picture = PICTURES[seed % 2](Random(seed))
        source = images.write(str(seed), picture.encoded)
        for detail in Detail:
            try:
                wanted = processor.pixels(decode(picture.encoded), detail)
            except UnreadableImage as error:
                with pytest.raises(InvalidImage, match=re.escape(str(error))):
                    await images.prepare(source, detail)
                continue
            prepared = await images.prepare(source, detail)
            found = np.load(prepared.image.file)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, wanted.array)
            assert prepared.image.grid == wanted.grid
            assert prepared.image.digest == processor.digest(wanted)
            assert Path(prepared.image.file).name == f"{prepared.image.digest.hex()}.npy"
            assert len(prepared.tokens) == prepared.image.n_tokens
    assert len(images.pids) == 1
    assert not list(images.folder.glob(".*.part")), "unfinished files"
    await images.queue.close()


async def test_hostile_images_harm_no_other(images: Images) -> None:
    hostile = [
        SIGNATURE + header(50_000, 50_000) + chunk(b"IDAT", b"x"),
        b"<svg/>",
        b"%PDF-1.4",
        noise(30, 30)[:500],
        *(SIGNATURE + Random(seed).randbytes(1_000) for seed in range(10)),
    ]
    sources = [images.write(f"bad{at}", encoded) for at, encoded in enumerate(hostile)]
    good = [images.write(f"good{at}", noise(20 + at, 30)) for at in range(10)]
    results = await asyncio.gather(*map(images.prepare, [*sources, *good]), return_exceptions=True)
    assert all(isinstance(result, InvalidImage) for result in results[: len(sources)])
    assert all(isinstance(result, PreparedImage) for result in results[len(sources) :])
    assert len(images.pids) == 1


async def test_an_array_is_not_written_again(images: Images) -> None:
    source = images.write("a", noise(30, 30))
    file = Path((await images.prepare(source)).image.file)
    state = file.stat()
    same = images.write("b", noise(30, 30))
    assert (await images.prepare(same)).image.file == str(file)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (state.st_ino, state.st_mtime_ns)
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    await images.prepare(images.write("c", noise(30, 30)))
    assert file.read_bytes() == whole


async def test_an_image_that_comes_again_is_not_decoded_again(images: Images) -> None:
    source = images.write("a", noise(30, 30))
    first = await images.prepare(source)
    os.kill(images.pids[0], signal.SIGKILL)
    assert await images.prepare(source) == first
    assert len(images.pids) == 1
    Path(first.image.file).unlink()
    assert await images.prepare(source) == first
    assert Path(first.image.file).exists()
    images.write("a", noise(30, 40))
    assert await images.prepare(source) != first


async def test_files_outside_of_the_folder_are_not_read(images: Images, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(noise(8, 8))
    link = images.folder / "link"
    link.symlink_to(outside)
    for source in (outside, link, images.folder / ".." / "outside", images.folder, "none"):
        with pytest.raises(InvalidImage, match="no longer stored"):
            await images.prepare(str(source))
    assert not images.pids


async def test_a_process_that_is_killed_from_outside_is_replaced(images: Images) -> None:
    await images.prepare(images.write("a", noise(30, 30)))
    os.kill(images.pids[0], signal.SIGKILL)
    await images.prepare(images.write("b", noise(31, 30)))
    assert len(images.pids) == 2


async def test_the_engine_grows_by_little_however_large_images_are(images: Images) -> None:
    encoded = BytesIO()
    Image.new("RGB", (8_000, 5_000), (1, 2, 3)).save(encoded, "PNG")
    source = images.write("large", encoded.getvalue())
    await images.prepare(images.write("small", noise(9, 9)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await images.prepare(source)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20_000  # kB on Linux


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (b"exit 3", "exit status 3"),
        (b"signal 11", "SIGSEGV"),
        (b"signal 9", "twice"),
        (b"signal 24", "processor time"),
        (b"spin", "processor time"),
        (b"sleep", "over 3 s"),
        (b"memory", "memory"),
        (b"nonsense", "nonsense"),
        (b"grid", "no such image"),
        (b"digest", "no such image"),
    ],
)
async def test_an_image_that_ends_its_process_is_refused_and_others_are_served(
    faults: Images, fault: bytes, words: str
) -> None:
    faults.queue._image_seconds = 60.0 if fault == b"spin" else 3.0
    bad = asyncio.create_task(faults.prepare(faults.write("bad", fault)))
    good = [
        asyncio.create_task(faults.prepare(faults.write(f"good{at}", noise(9, 9 + at))))
        for at in range(2)
    ]
    with pytest.raises(InvalidImage, match=words):
        await bad
    for task in good:
        assert (await task).tokens
    assert not [file for file in faults.folder.iterdir() if file.name.endswith(".part")]


async def test_a_full_queue_says_when_there_is_room(faults: Images) -> None:
    waiting = [
        asyncio.create_task(faults.prepare(faults.write(f"{at}", b"sleep" + bytes([at]))))
        for at in range(4)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ImagesBusy) as busy:
        await faults.prepare(faults.write("more", noise(9, 9)))
    assert busy.value.retry_after_seconds >= 1
    for task in waiting[1:]:
        task.cancel()
    await asyncio.wait(waiting[1:])
    assert not faults.queue._waiting
    with pytest.raises(InvalidImage):
        await waiting[0]
    assert (await faults.prepare(faults.write("more", noise(9, 9)))).tokens
    assert len(faults.pids) == 2, "those that were cancelled were never begun"


async def test_callers_of_one_image_share_its_preparation(images: Images) -> None:
    source = images.write("a", noise(30, 30))
    first, second, third = (asyncio.create_task(images.prepare(source)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == await third
    assert len(images.queue._results) == 1
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_processes_that_do_not_start_are_no_fault_of_an_image(tmp_path: Path) -> None:
    def broken(checkpoint: Path) -> Any:
        raise OSError("no more processes")

    images = Images(tmp_path, start=broken)
    with pytest.raises(ImagesBusy, match="no more processes"):
        await images.prepare(images.write("a", noise(9, 9)))
    ending = partial(start_child, "json.tool")
    images.queue._start = ending
    with pytest.raises(ImagesBusy, match="does not start"):
        await images.prepare(images.write("a", noise(9, 9)))


async def test_processes_end_when_no_images_come(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "IDLE_SECONDS", 0.05)
    await images.prepare(images.write("a", noise(9, 9)))
    for _ in range(500):
        if not images.queue._idle and not images.queue._kills:
            break
        await asyncio.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(images.pids[0], 0)
    await images.prepare(images.write("b", noise(9, 10)))


async def test_a_closed_queue_lets_nobody_wait(faults: Images) -> None:
    tasks = [
        asyncio.create_task(faults.prepare(faults.write(f"{at}", b"sleep" + bytes([at]))))
        for at in range(3)
    ]
    await asyncio.sleep(0.1)
    await faults.queue.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineStopped) for result in results)
    with pytest.raises(EngineStopped):
        await faults.prepare(faults.write("a", noise(9, 9)))


@pytest.mark.parametrize("name", ["qwen3_vl", "pixtral", "gemma3"])
async def test_an_engine_prepares_images_for_its_server(tmp_path: Path, name: str) -> None:
    images = Images(tmp_path, name=name)
    parts = Parts()
    parts.images = images.queue
    engine = hosted(parts.build, Letters())
    try:
        source = images.write("a", noise(30, 20))
        prepared = await engine.prepare_image(source, str(images.folder), Detail.FULL)
        layout = image_layout(images.checkpoint)
        assert layout is not None
        assert prepared == layout.prepared(
            prepared.image.digest, prepared.image.grid, prepared.image.file
        )
        assert np.load(prepared.image.file).dtype == np.float32
        with pytest.raises(InvalidImage, match="SVG"):
            await engine.prepare_image(images.write("b", b"<svg/>"), str(images.folder), Detail.LOW)
    finally:
        parts.runner.open()
        await engine.drain(1.0)


async def test_an_engine_without_images_says_so(tmp_path: Path) -> None:
    parts = Parts()
    engine = hosted(parts.build, Letters())
    try:
        with pytest.raises(InvalidImage, match="takes no images"):
            await engine.prepare_image(str(tmp_path / "a"), str(tmp_path), Detail.FULL)
    finally:
        parts.runner.open()
        await engine.drain(1.0)
