"""A real engine thread over the hash model, whose steps wait until a test lets them through."""

import asyncio
import threading
from collections.abc import Collection, Mapping
from types import MappingProxyType

from engine.core.inbox import Inbox
from engine.core.loop import Deliver, EngineLoop
from engine.core.step import StepMasks, StepPlan, StepResult
from engine.grammar.answers import Trials
from engine.grammar.pool import GrammarPool
from engine.grammar.process import GrammarProcess, GrammarProcesses
from engine.images.queue import ImageQueue
from engine.thread import EngineParts
from engine.values.model import ModelCard, RenderedChat
from engine.values.output import OutputEvent
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from kvstore.sizes import StorageBytes
from tests.hosting import hosted
from tests.simulation.daemon import NO_DECODE, NO_MEMORY, LetterDetokenizer
from tests.unit.engine_harness import VOCAB_SIZE, Harness, prompt
from tools.events import events_of

CARD = ModelCard(
    name="hashes",
    fingerprint="fp",
    vocab_size=VOCAB_SIZE,
    model_context_tokens=200,
    max_context_tokens=200,
    eos_token_ids=frozenset(),
    kv_bytes_per_token=8,
    arena_tokens=252,
    block_size=4,
    device="none",
    dtype="int",
    blas="",
)


class Letters:
    """A tokenizer for tokens that are letters."""

    chat_template = ""
    added_tokens: Mapping[str, int] = MappingProxyType({})
    special_tokens: Collection[str] = ()

    def encode_beginning(
        self, text: str, most_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        raise NotImplementedError

    def encode_pair(self, first: str, second: str) -> list[int]:
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) - ord("a") for character in text]

    def decode(self, token_ids: object) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return LetterDetokenizer().add(token_id).encode()

    def apply_chat_template(
        self, messages: object, replays: object = None, /, **template_arguments: object
    ) -> list[int]:
        return [1]

    @property
    def image_stand_in(self) -> str:
        return ""

    def render_with_images(
        self, messages: object, images: object, replays: object = None, /, **arguments: object
    ) -> RenderedChat:
        raise NotImplementedError


class GatedRunner:
    """Lets a step be collected only when it is let through. `begun` is set while one waits."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.gate = threading.Semaphore(0)
        self.passed = threading.Semaphore(0)
        self.begun = threading.Event()
        self.steps = 0

    def submit(self, plan: StepPlan) -> None:
        self._harness.runner.submit(plan)

    def launch(self) -> None:
        self._harness.runner.launch()

    def draw(self, masks: StepMasks) -> None:
        self._harness.runner.draw(masks)

    def collect(self) -> StepResult:
        self.begun.set()
        self.gate.acquire()
        self.begun.clear()
        self.passed.release()
        self.steps += 1
        return self._harness.runner.collect()

    def open(self) -> None:
        for _ in range(100_000):
            self.gate.release()


class NoProcesses(GrammarProcesses):
    """For engines that are asked for no grammar."""

    def __init__(self) -> None: ...

    def start(self) -> GrammarProcess:
        raise AssertionError("a grammar that nobody has asked for")


class Parts:
    """What an engine thread on the hash model is built of, with handles to what is inside."""

    inbox: Inbox
    loop: EngineLoop
    images: ImageQueue | None = None

    def __init__(self, **limits: int) -> None:
        self.now = 0.0
        self.harness = Harness(clock=lambda: self.now, **limits)  # type: ignore[arg-type]
        self.runner = GatedRunner(self.harness)

    def build(self, inbox: Inbox, deliver: Deliver) -> EngineParts:
        self.inbox = inbox
        sizes = StorageBytes(block=32, slots=(), arenas=2016)
        loop = EngineLoop(self.harness.scheduler, self.runner, inbox, deliver, sizes)
        self.loop = loop
        return EngineParts(
            loop=loop,
            card=CARD,
            limits=self.harness.limits,
            trials=Trials(GrammarPool(NoProcesses(), 1)),
            memory=lambda: NO_MEMORY,
            decode=lambda: NO_DECODE,
            release_unused=lambda: None,
            release_thread=lambda: None,
            images=self.images,
        )


class Setup(Parts):
    """An engine of them."""

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits)
        self.engine = hosted(self.build, Letters())

    async def collect(self, request: Request) -> list[OutputEvent]:
        return [event async for event in events_of(self.engine, request)]

    async def asked(self, n_calls: int) -> None:
        """So many calls wait for the end of the step."""
        while self.inbox.n_calls < n_calls:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def begun(self) -> None:
        """A step waits in the runner."""
        await asyncio.to_thread(self.runner.begun.wait)

    async def step(self) -> None:
        """Let the step that waits be computed; the next one waits in the runner then."""
        self.runner.gate.release()
        await asyncio.to_thread(self.runner.passed.acquire)
        await self.begun()


def request(name: str, n_tokens: int = 10, max_tokens: int = 4, n: int = 1) -> Request:
    return Request(name, pack(prompt(1, n_tokens)), max_tokens, SamplingParams(seed=3), n=n)
