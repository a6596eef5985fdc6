"""Everything that can happen to a disk cache, before a daemon opens it or while it runs."""

import asyncio
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvstore.disk.folder import folders
from tests.restart import damage
from tests.restart.damage import Damage
from tests.restart.kills import answered, put_all
from tests.restart.living import MIB, Daemon, DiskWatch, checkpoint, disk_flags, living
from tests.restart.questions import Load, Question

LIMIT_BYTES = 96 * MIB
"""All that is asked has room."""

SMALL_DISK = 128 * MIB


@dataclass(frozen=True, slots=True)
class Scene:
    """`orders` are those of `faulty_daemon`, `counted` what the daemon must have noticed."""

    name: str
    before: Damage = damage.nothing
    during: Damage = damage.nothing
    healed: Damage = damage.nothing
    orders: str = ""
    counted: tuple[str, ...] = ()
    limit_bytes: int = LIMIT_BYTES
    on_a_disk_of_its_own: bool = False
    has_foreign_folder: bool = False


class NotHereError(Exception):
    """This machine, or this user, cannot do that."""


def read_only(directory: Path, randomness: random.Random) -> None:
    """For root, too."""
    sh(*(("chmod", "-R", "a-w") if os.geteuid() else ("chattr", "-R", "+i")), str(directory))


def writable(directory: Path, randomness: random.Random) -> None:
    sh(*(("chmod", "-R", "u+w") if os.geteuid() else ("chattr", "-R", "-i")), str(directory))


def full(directory: Path, randomness: random.Random) -> None:
    """Somebody else's file takes all that was free."""
    with (directory.parent / "other").open("wb") as other:
        try:
            while True:
                other.write(bytes(MIB))
        except OSError:
            return


SCENES = (
    Scene("nothing"),
    Scene("flipped bits", before=damage.flipped_bits, counted=("checksum",)),
    Scene("truncated extents", before=damage.truncated, counted=("short_read",)),
    Scene("missing extents", before=damage.missing),
    Scene("flipped bits of headers", before=damage.headers_have_flipped_bits, counted=("header",)),
    Scene("nonsense in place of files", before=damage.nonsense, counted=("header",)),
    Scene("headers change places", before=damage.headers_change_places),
    Scene("another model's folder", has_foreign_folder=True),
    Scene(
        "another model's folder with our name",
        before=damage.called_as_ours,
        has_foreign_folder=True,
    ),
    Scene("a limit of half of what is there", limit_bytes=16 * MIB),
    Scene("flipped bits, running", during=damage.flipped_bits, counted=("checksum",)),
    Scene("truncated extents, running", during=damage.truncated, counted=("short_read",)),
    Scene("missing extents, running", during=damage.missing),
    Scene("all files are cut, running", during=damage.all_cut, counted=("short_read",)),
    Scene("EIO of reads", orders="read EIO", counted=("io",)),
    Scene("EIO of writes", orders="write EIO", counted=("io",)),
    Scene("EIO of the folder", orders="scan EIO", counted=("io",)),
    Scene("EIO of all", orders="read EIO\nwrite EIO\nscan EIO\nremove EIO\ndisk EIO"),
    Scene("ENOSPC of writes", orders="write ENOSPC", counted=("no_space",)),
    Scene("EROFS", orders="write EROFS\nremove EROFS", counted=("read_only",)),
    Scene("EMFILE of reads", orders="read EMFILE", counted=("resources",)),
    Scene("read-only", during=read_only, healed=writable, counted=("read_only",)),
    Scene("a full disk", during=full, on_a_disk_of_its_own=True),
)


def run(family: str, seed: int, load: Load, scenes: Sequence[Scene] = SCENES) -> None:
    """AssertionError of the first wrong answer, failed request, or byte too many."""
    with TemporaryDirectory(prefix="faults-") as scratch:
        stage = Stage(family, Path(scratch), seed, load)
        for scene in scenes:
            print(f"{family}, seed {seed}, {scene.name}: {stage.play(scene)}", flush=True)


class Stage:
    """A directory that has been written, of which every scene has a copy."""

    def __init__(self, family: str, folder: Path, seed: int, load: Load) -> None:
        self._folder = folder
        self._log = folder / "log"
        self._orders = folder / "orders"
        self._random = random.Random(seed)
        self._model = checkpoint(family, folder)
        self._questions = asyncio.run(answered(self._model, self._log, load, seed))
        self._written, self._both = folder / "written", folder / "both"
        other = checkpoint(family, folder, seed=seed + 1)
        self._fill(other, asyncio.run(answered(other, self._log, load, seed + 1)))
        self._fill(self._model, self._questions)
        shutil.copytree(self._both, self._written)
        shutil.rmtree(folders(self._written)[0])

    def play(self, scene: Scene) -> str:
        """What came of it, for people."""
        copied = self._both if scene.has_foreign_folder else self._written
        try:
            with self._place(scene) as place:
                shutil.copytree(copied, place / "kv")
                scene.before(place / "kv", self._random)
                return asyncio.run(self._live(scene, place / "kv"))
        except NotHereError as error:
            return f"left out: {error}"

    async def _live(self, scene: Scene, directory: Path) -> str:
        flags = disk_flags(directory, scene.limit_bytes, write="all")
        program = ("-m", "tests.restart.faulty_daemon", str(self._orders))
        first = self._questions[::2]
        with (
            living(self._model, self._log, *flags, program=program) as daemon,
            DiskWatch(directory, scene.limit_bytes) as watch,
        ):
            self._orders.write_text("")
            await put_all(daemon, first, self._random)
            self._orders.write_text(scene.orders)
            scene.during(directory, self._random)
            await self._again(daemon)
            disk = daemon.disk()
            self._orders.write_text("")
            scene.healed(directory, self._random)
            await self._again(daemon)
        with living(self._model, self._log, *flags) as daemon:
            await put_all(daemon, self._questions, self._random)
            after = daemon.disk()["loaded_tokens"]
        failures = disk["failures"]
        assert set(scene.counted) <= failures.keys(), failures
        return (
            f"{disk['loaded_tokens']} tokens loaded, {after} in the next life, "
            f"{failures}, du {watch.most_bytes:,} at most"
        )

    async def _again(self, daemon: Daemon) -> None:
        daemon.clear_memory()
        await put_all(daemon, self._questions, self._random)

    def _fill(self, model: Path, questions: Sequence[Question]) -> None:
        """Two of three are written."""
        flags = disk_flags(self._both, LIMIT_BYTES, write="all")
        written = [each for number, each in enumerate(questions) if number % 3]
        with living(model, self._log, *flags) as daemon:
            asyncio.run(put_all(daemon, written, self._random))

    @contextmanager
    def _place(self, scene: Scene) -> Iterator[Path]:
        """Where the scene's directory is to be."""
        with TemporaryDirectory(dir=self._folder) as place:
            if not scene.on_a_disk_of_its_own:
                yield Path(place)
                return
            sh("mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", place)
            try:
                yield Path(place)
            finally:
                sh("umount", place)


def sh(*command: str) -> None:
    """Raises NotHereError."""
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise NotHereError(f"there is no {command[0]}") from error
    except subprocess.CalledProcessError as error:
        raise NotHereError(error.stderr.decode().strip()) from error
