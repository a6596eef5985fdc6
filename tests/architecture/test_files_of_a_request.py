"""How many of the project's files a reader has to open to follow one chat request.

A streamed chat is served by the embedded model, with the engine on a thread in place of its
process; every call of a function is recorded by its file. Of the engine's own thread, which also
does what is left to do while it is idle, only what leads to the scheduler counts as the way there.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import httpx
import pytest

from engine.core.scheduler import Scheduler
from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.contract.daemon import running
from tests.hosting import loaded

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(str(ROOT / name) for name in ("server", "engine", "kvstore"))
MOST_FILES_TO_THE_SCHEDULER = 44
MOST_FILES_THERE_AND_BACK = 88
TRIES = 5
"""Files that all of them cross count: some meet what runs once a second."""
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
        self._files: defaultdict[int, set[str]] = defaultdict(set)  # by thread
        self.files_to_the_scheduler: set[str] | None = None

    @property
    def files(self) -> set[str]:
        return set().union(*self._files.values())

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES):
            thread = threading.get_ident()
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
    engine = loaded(EngineConfig(model="", kv_cache_bytes=16 << 20))
    with running(engine, Settings(port=0)) as url:
        yield url


def chat(base_url: str) -> None:
    with httpx.stream("POST", f"{base_url}/v1/chat/completions", json=CHAT) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["choices"]


def test_a_chat_request_crosses_few_files(recorder: Recorder, base_url: str) -> None:
    to_the_scheduler, all_files = [], []
    for _ in range(TRIES):
        recorder.begin()
        chat(base_url)
        assert recorder.files_to_the_scheduler is not None
        to_the_scheduler.append(recorder.files_to_the_scheduler)
        all_files.append(recorder.files)
    there, whole = set.intersection(*to_the_scheduler), set.intersection(*all_files)
    assert len(there) <= MOST_FILES_TO_THE_SCHEDULER, sorted(there)
    assert len(whole) <= MOST_FILES_THERE_AND_BACK, sorted(whole)
