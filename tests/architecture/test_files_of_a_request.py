"""How many of the project's files a reader has to open to follow one chat request.

A streamed chat is served by the embedded model, with the engine on a thread in place of its
process; every call of a function is recorded by its file. What runs at regular intervals does not
run meanwhile, or its files would count as soon as a chat took longer than the interval. Of the
engine's own thread, which also does what is left to do while it is idle, only what leads to the
scheduler counts as the way there.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import httpx
import pytest

from engine.core import idle_recount
from engine.core.scheduler import Scheduler
from engine.remote import connection, host
from engine.values.settings import EngineConfig
from server.admin import activity
from server.models import registry
from server.settings import Settings
from tests.contract.daemon import running
from tests.hosting import loaded
from tests.polling import until

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(str(ROOT / name) for name in ("server", "engine", "kvstore"))
MOST_FILES_TO_THE_SCHEDULER = 45
MOST_FILES_THERE_AND_BACK = 90
TRIES = 3
"""Files that all of them cross count: some depend on when a thread gets its turn."""
NEVER_SECONDS = 1e6
QUIET_SECONDS = 1.0
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 8,
    "temperature": 0,
    "stream": True,
}


class Recorder:
    """Records the files of the functions that are called, in all threads that begin meanwhile."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was recorded."""
        self._called_seconds = time.monotonic()
        self._files: defaultdict[int, set[str]] = defaultdict(set)  # by thread
        self.files_to_the_scheduler: set[str] | None = None

    @property
    def files(self) -> set[str]:
        return set().union(*self._files.values())

    def wait_until_quiet(self) -> None:
        """Until nothing is called: a server has work left after the end of an answer."""
        until(lambda: time.monotonic() - self._called_seconds > QUIET_SECONDS)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES):
            thread = threading.get_ident()
            self._called_seconds = time.monotonic()
            if code is Scheduler.add.__code__ and self.files_to_the_scheduler is None:
                others = (files for other, files in self._files.items() if other != thread)
                self.files_to_the_scheduler = set(_stack(frame)).union(*others)
            self._files[thread].add(str(Path(code.co_filename).relative_to(ROOT)))


def _stack(frame: FrameType | None) -> Iterator[str]:
    """The project's files of the frame and its callers."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGES):
            yield str(Path(frame.f_code.co_filename).relative_to(ROOT))
        frame = frame.f_back


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    threading.setprofile(recorder)
    try:
        yield recorder
    finally:
        threading.setprofile(None)


@pytest.fixture(scope="module")
def base_url(recorder: Recorder) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(activity, "INTERVAL_SECONDS", NEVER_SECONDS)
        patches.setattr(registry, "CORRECTION_SECONDS", NEVER_SECONDS)
        patches.setattr(host, "HEARTBEAT_SECONDS", NEVER_SECONDS)
        patches.setattr(connection, "SILENT_SECONDS", NEVER_SECONDS)
        patches.setattr(idle_recount, "IDLE_SECONDS", NEVER_SECONDS)
        # Whether steps are compiled depends on what this machine has built before.
        engine = loaded(EngineConfig(model="", kv_cache_bytes=16 << 20, decode="eager"))
        with running(engine, Settings(port=0)) as url:
            yield url


def chat(base_url: str) -> None:
    with httpx.stream("POST", f"{base_url}/v1/chat/completions", json=CHAT) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["choices"]


def test_a_chat_request_crosses_few_files(recorder: Recorder, base_url: str) -> None:
    for _ in range(3):  # the first ones also cross what is made once
        chat(base_url)
        recorder.wait_until_quiet()
    there, whole = list[set[str]](), list[set[str]]()
    for _ in range(TRIES):
        recorder.begin()
        chat(base_url)
        recorder.wait_until_quiet()
        assert recorder.files_to_the_scheduler is not None
        there.append(recorder.files_to_the_scheduler)
        whole.append(recorder.files)
    crossed_there, crossed = set.intersection(*there), set.intersection(*whole)
    assert len(crossed_there) <= MOST_FILES_TO_THE_SCHEDULER, " ".join(sorted(crossed_there))
    assert len(crossed) <= MOST_FILES_THERE_AND_BACK, " ".join(sorted(crossed))
