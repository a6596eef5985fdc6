"""An Engine without a model: one token for each byte, scripted answers, and a record of aborts."""

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from anyio import create_task_group, move_on_after
from anyio.abc import TaskGroup
from blake3 import blake3

from engine.api import EngineError, EngineStopped, EventSink, InvalidImage
from engine.remote.engine import RequestCounters
from engine.values.images import Detail, Image, ImageInput, PreparedImage
from engine.values.model import NO_REPLAYS, Embedder, ModelCard, RenderedChat, Replay
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from engine.values.request import Pooling, Request, WaitReason
from engine.values.stats import (
    ALL_TIERS,
    CacheStats,
    CacheTier,
    Cleared,
    DecodeStats,
    DiskCacheStats,
    DraftCounts,
    DraftModelStats,
    DraftSource,
    EngineStats,
    ImageStats,
    KVEventStats,
    Latencies,
    Latency,
    MemoryStats,
    ModelMemory,
    Probed,
    RankStats,
    RecentHits,
    RequestInfo,
    no_latencies,
)
from engine.values.tokens import PackedTokens
from engine.values.tree import (
    HiddenNodes,
    HiddenRequests,
    NodeTokens,
    TreeAdoption,
    TreeArena,
    TreeChanges,
    TreeCounters,
    TreeGroup,
    TreeNamespace,
    TreeNode,
    TreeSnapshot,
)
from kvstore.slots import GroupStats

END_OF_TEXT = 256
PLACEHOLDER = 0
IMAGE = b"GIF89a"
DIMENSIONS = 8  # of what is pooled
VOCAB_SIZE = 257

CARD = ModelCard(
    name="test/bytes",
    fingerprint="fp_bytes",
    vocab_size=VOCAB_SIZE,
    model_context_tokens=512,
    max_context_tokens=512,
    eos_token_ids=frozenset({END_OF_TEXT}),
    kv_bytes_per_token=1024,
    arena_tokens=4096,
    block_size=32,
    device="cpu",
    dtype="float32",
    blas="",
    embedder=Embedder(Pooling.LAST, DIMENSIONS, prompts={"query": "Q: "}),
)

SEEING = replace(CARD, images=ImageInput(PLACEHOLDER, 64, 1, 8, 1 << 20))
"""The card of a model that takes images."""

RECENT_HITS = (RecentHits(60, 0, 0), RecentHits(300, 40, 10), RecentHits(900, 120, 20))
DECODE = DecodeStats("compiled: a compiled step takes less time", steps=40, compiled_steps=25)
MEMORY = MemoryStats(
    ModelMemory(
        50 << 20, 4 << 20, 1 << 20, 69 << 20, process_bytes=300 << 20, total_bytes=300 << 20
    ),
    active=60 << 20,
    cached=1 << 20,
    peak=90 << 20,
)
STATES = GroupStats("recurrent", 16, 9, 4, 3, saved=0, evictions=5, unresumable_tokens=11)

DRAFTS = {
    **dict.fromkeys(DraftSource, DraftCounts()),
    DraftSource.TREE: DraftCounts(drafts=5, drafted_tokens=30, accepted_tokens=24),
    DraftSource.OWN: DraftCounts(drafts=2, drafted_tokens=4, accepted_tokens=1),
}

DISK = DiskCacheStats(
    entries=40,
    used_bytes=5_242_880,
    shared_bytes=7_340_032,
    limit_bytes=1 << 30,
    buffered_bytes=65_536,
    read_bytes=1_048_576,
    written_bytes=4_194_304,
    hits=3,
    loaded_tokens=900,
    load_seconds=0.25,
    given_up_loads=2,
    evicted_entries=11,
    refused_entries=5,
    failures={"checksum": 1, "io": 0},
    write_fault=None,
    is_day_spent=False,
    ended_threads=(),
)


def observed(latency: Latency, *durations_seconds: float) -> Latencies:
    """The latencies of an engine that has measured these durations alone."""
    latencies = no_latencies()
    for seconds in durations_seconds:
        latencies[latency].observe(seconds)
    return latencies


STAND_IN = "\0image\0"


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as token ids. The chat template refuses the role `function`.

    It writes no tools; `chat_template` alone tells the server which format the model has.
    """

    chat_template: str = ""
    added_tokens: Mapping[str, int] = field(default_factory=lambda: {"<|end|>": END_OF_TEXT})
    special_tokens: Collection[str] = frozenset({"<|end|>"})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def encode_beginning(
        self, text: str, most_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        return list(text.encode())[:most_tokens]

    def encode_pair(self, first: str, second: str) -> list[int]:
        return [*first.encode(), END_OF_TEXT, *second.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<|end|>" if token_id == END_OF_TEXT else bytes([token_id])

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        if any(message.get("name") == "nobody" for message in messages):
            raise ValueError("this template takes no message from nobody")
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        turn = "<assistant>" if template_arguments.get("add_generation_prompt", True) else ""
        return list((text + turn).encode())

    @property
    def image_stand_in(self) -> str:
        return STAND_IN

    def render_with_images(
        self,
        messages: Sequence[Mapping[str, object]],
        images: Sequence[Sequence[int]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> RenderedChat:
        """Parts of type `image` are images, except in tool results."""
        shown = [{**message, "content": self._shown(message)} for message in messages]
        text = self.decode(self.apply_chat_template(shown, replays, **template_arguments))
        pieces = text.split(STAND_IN)
        if len(pieces) != len(images) + 1:
            raise ValueError(f"there are {len(pieces) - 1} of {len(images)} images")
        tokens, positions = list(pieces[0].encode()), list[int]()
        for image, piece in zip(images, pieces[1:], strict=True):
            positions.append(len(tokens))
            tokens += [*image, *piece.encode()]
        return RenderedChat(tokens, positions)

    def _shown(self, message: Mapping[str, object]) -> object:
        content = message["content"]
        if not isinstance(content, list):
            return content
        image = "" if message["role"] == "tool" else STAND_IN
        return "".join(image if part["type"] == "image" else part["text"] for part in content)


PICTURE = TreeSnapshot(
    version=1,
    time=1763770000.25,
    seconds=100.0,
    block_tokens=32,
    arena=TreeArena(128, 100, 20, 8, 393_216, 32_768),
    groups=(TreeGroup("window", 64, 16, 3), TreeGroup("recurrent", None, 8, 1)),
    nodes=(
        TreeNode(1, None, "0", 0, 64, 64, 2, 0, 1, None, (), ((0, 32),), None, None),
        TreeNode(2, 1, "0", 64, 40, 32, 2, 8, 0, 95.8, (96, 104), (), 1, HiddenNodes(1, 32, 1)),
    ),
    disk=DISK,
    hidden=HiddenNodes(),
    namespaces=(TreeNamespace("0", "default", 3, 136),),
    requests=(RequestInfo("r", 0, None, 70, 64, 70, 2, blocks=3, node=1),),
    hidden_requests=HiddenRequests(0, 3),
    adoptions=(TreeAdoption(1, 60, 1.25),),
    recent_hits=RECENT_HITS,
    counters=TreeCounters(200, 120, 30, 6, 9, 8, 1.5),
)


class Gate:
    """Closed until a test opens it; waited for on the server's event loop."""

    def __init__(self) -> None:
        self._opened: Future[None] = Future()

    @property
    def is_open(self) -> bool:
        return self._opened.done()

    def open(self) -> None:
        """Once for all; again it does nothing."""
        if not self._opened.done():
            self._opened.set_result(None)

    async def passed(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._opened))

    def wait(self) -> None:
        """Likewise, on another thread."""
        self._opened.result()


@dataclass(frozen=True)
class HeldTokenizer(ByteTokenizer):
    """Encodes prompts only once its gate is open."""

    gate: Gate = field(default_factory=Gate)
    encoding: "queue.Queue[str]" = field(default_factory=queue.Queue)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoding.put(text)
        self.gate.wait()
        return super().encode(text, add_special_tokens=add_special_tokens)


READ_SECONDS = 0.001  # between two parts of a prompt: each is sent by itself


@dataclass
class Script:
    """What the engine does with the requests to come."""

    answers: Sequence[str] = ("Hello, wörld!",)  # of the sequences in turn, over and over
    expected: str = ""  # what is drafted for requests without a prediction
    refusal: Exception | None = None  # raised at the first event
    fails_after_tokens: int | None = None  # then the sequence ends with an error
    gate: Gate | None = None  # where every sequence waits ...
    gate_after_tokens: int = 0  # ... when it has as many tokens
    steps_at_once: int = 1  # before others on the event loop have a turn
    image_refusal: Exception | None = None  # raised instead of preparing an image
    dead: bool = False


@dataclass
class FakeEngine:
    """Implements engine.api.Engine. A test may change `script` while nothing runs."""

    script: Script = field(default_factory=Script)
    submitted: "queue.Queue[Request]" = field(default_factory=queue.Queue)
    at_gate: "queue.Queue[str]" = field(default_factory=queue.Queue)
    aborted: "queue.Queue[str]" = field(default_factory=queue.Queue)
    cleared: "queue.Queue[frozenset[CacheTier]]" = field(default_factory=queue.Queue)
    drained: "queue.Queue[float]" = field(default_factory=queue.Queue)
    card: ModelCard = CARD
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    disk: DiskCacheStats | None = DISK
    decode: DecodeStats | None = DECODE
    kv_events: KVEventStats | None = field(default_factory=lambda: KVEventStats(subscribers=1))
    ranks: RankStats | None = field(default_factory=lambda: RankStats(2, 0.25, 1500))
    n_contradictions: int = 0
    latencies: Latencies = field(default_factory=no_latencies)
    picture: TreeSnapshot = PICTURE  # what is seen of the cache
    node_tokens: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: {1: (72, 105)})
    prepared: "queue.Queue[bytes]" = field(default_factory=queue.Queue)
    preparing: Gate | None = None  # where every image waits
    waits_for: WaitReason | None = None  # what is asked of it
    looks: int = 0  # at the cache
    blocks_of: Callable[[Request], int] = lambda request: 1
    given_back: list[float] = field(default_factory=list)  # the shares that were to be evicted
    memory: MemoryStats = MEMORY
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: Gate = field(default_factory=Gate)
    _how: str = "it was drained"
    _seen: list[tuple[str, Sequence[int]]] = field(default_factory=list)
    _counters: RequestCounters = field(default_factory=RequestCounters)
    _live: dict[str, Request] = field(default_factory=dict)

    def reset(self) -> None:
        """A fresh script, and fresh records of what was asked."""
        blank = FakeEngine()
        for name in (
            "script",
            "submitted",
            "at_gate",
            "aborted",
            "cleared",
            "latencies",
            "prepared",
        ):
            setattr(self, name, getattr(blank, name))

    async def prepare_image(self, source: str, folder: str, detail: Detail) -> PreparedImage:
        """An image is what begins with IMAGE. Each byte after that is a token that stands for it,
        one token in all with low detail.
        """
        data = await asyncio.to_thread(Path(source).read_bytes)
        self.prepared.put(data)
        if self.preparing is not None:
            await self.preparing.passed()
        if self.script.image_refusal is not None:
            raise self.script.image_refusal
        if not data.startswith(IMAGE):
            raise InvalidImage("it is no image that can be read")
        n_tokens = 1 if detail is Detail.LOW else max(len(data) - len(IMAGE), 1)
        digest = blake3(data + detail.encode()).digest()
        file = Path(folder, f"{digest.hex()}.npy")
        await asyncio.to_thread(file.write_bytes, data)
        image = Image(digest, ((1, n_tokens),), (1, n_tokens), str(file))
        return PreparedImage(image, (ord("["), *[PLACEHOLDER] * n_tokens, ord("]")))

    async def check(self, request: Request) -> None:
        if self.script.refusal is not None:
            raise self.script.refusal

    def generate(self, request: Request, sink: EventSink) -> "FakeSubmission":
        return FakeSubmission(asyncio.get_running_loop().create_task(self._run(request, sink)))

    async def _run(self, request: Request, sink: EventSink) -> None:
        try:
            async with aclosing(self.events(request)) as events:
                async for event in events:
                    sink.put(event)
        except asyncio.CancelledError:
            return  # a task that ends cancelled would be in a cycle with its sink
        except Exception as error:
            sink.fail(error)

    async def events(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        """What a sink gets. Tests may override it."""
        self.submitted.put(request)
        self._counters.received(request.n)
        refusal, live = self.script.refusal, set(range(request.n))
        if refusal is not None:
            if isinstance(refusal, EngineError):
                self._counters.refused(refusal, request.n)
            else:
                self._counters.finished(FinishReason.ERROR, request.n)
            raise refusal
        self._live[request.id] = request
        self._idle.clear()
        try:
            async with aclosing(self._events(request, live)) as events:
                async for event in events:
                    if event.finish_reason is not None:
                        live.remove(event.index)
                        self._counters.finished(event.finish_reason)
                    yield event
        finally:
            del self._live[request.id]
            if not self._live:
                self._idle.set()
            if live:
                self._counters.finished(FinishReason.ABORT, len(live))
                self.aborted.put(request.id)

    async def _events(self, request: Request, live: Set[int]) -> AsyncGenerator[OutputEvent, None]:
        for position, events in enumerate(self._steps(request), start=-1):
            if self.script.gate is not None and position == self.script.gate_after_tokens:
                self.at_gate.put(request.id)
                await self._passed_or_stopped(self.script.gate)
            if self._stopped.is_open:
                for index in tuple(live):
                    yield OutputEvent(request.id, index, finish_reason=FinishReason.ABORT)
                return
            if position % self.script.steps_at_once == 0:
                await asyncio.sleep(0)
            for event in events:
                yield event
            if position < 0 and request.reports_progress:
                for event in _reading(request, events):
                    await asyncio.sleep(READ_SECONDS)
                    yield event
        self._seen.append((request.cache_salt, request.prompt))

    async def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._live),
            waiting=0,
            computed_prompt_tokens=100,
            generated_tokens=30,
            preemptions=1,
            client_preemptions=2,
            recomputed_sequences=3,
            late_rows=3,
            contradictions=self.n_contradictions,
            steps=40,
            drafts=DRAFTS,
            kv_events=self.kv_events,
            ranks=self.ranks,
            draft_model=DraftModelStats(drafted_tokens=8, blocks_total=64),
            images=ImageStats(encoded=6, reused=4, feature_bytes=4096, limit_bytes=1 << 20),
            latencies=self.latencies,
            cache=CacheStats(
                block_size=32,
                blocks_total=128,
                blocks_free=100,
                blocks_cached=20,
                blocks_held=8,
                blocks_pinned=3,
                warmed_tokens=7,
                blocks_shared=4,
                blocks_saved=12,
                saved_bytes=393_216,
                arena_bytes=4_194_304,
                nodes=5,
                queried_tokens=120,
                hit_tokens=20,
                evictions=6,
                tail_hit_tokens=9,
                prefix_copies=7,
                fork_copies=3,
                groups=(STATES,),
                recent_hits=RECENT_HITS,
                disk=self.disk,
            ),
            memory=self.memory,
            sequences=self._counters.counts(),
            decode=self.decode,
        )

    async def clear_cache(
        self, namespace_id: str | None = None, tiers: frozenset[CacheTier] = ALL_TIERS
    ) -> Cleared:
        self._check_alive()
        self.cleared.put(frozenset(tiers))
        if namespace_id not in {None, "0"} or CacheTier.MEMORY not in tiers:
            return Cleared(blocks=0, bytes=0)
        self._seen.clear()
        return Cleared(blocks=20, bytes=655_360)

    async def give_back(self, evicted_share: float) -> int:
        self._check_alive()
        self.given_back.append(evicted_share)
        return round(evicted_share * 128)

    async def tree(self, since: int) -> TreeSnapshot | TreeChanges:
        self._check_alive()
        self.looks += 1
        return self.picture

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        self._check_alive()
        token_ids = self.node_tokens.get(node_id)
        if token_ids is None:
            return None
        return NodeTokens(node_id, len(token_ids), token_ids[:most_tokens])

    async def probe(
        self,
        prompt: PackedTokens,
        cache_salt: str,
        adapter: str,
        images: tuple[Image, ...] = (),
    ) -> Probed:
        self._check_alive()
        return Probed(self._cached_tokens(prompt, cache_salt), block_digests=())

    async def requests(self) -> tuple[RequestInfo, ...]:
        self._check_alive()
        return tuple(
            self._info(request, index)
            for request in self._live.values()
            for index in range(request.n)
        )

    def _info(self, request: Request, index: int) -> RequestInfo:
        """As of the gate, up to which all that was drafted was right."""
        accepted = len(drafted(request, self.script)[: self.script.gate_after_tokens])
        prompt_tokens = len(request.prompt)
        blocks = self.blocks_of(request)
        return RequestInfo(
            request.id, index, self.waits_for, prompt_tokens, 0, 0, 0, blocks, accepted
        )

    def is_alive(self) -> bool:
        return not self.script.dead

    async def ended(self) -> str:
        await self._stopped.passed()
        return self._how

    def die(self, how: str) -> None:
        """End by itself, whatever runs."""
        self._how = how
        self._stopped.open()

    async def drain(self, timeout_seconds: float) -> None:
        self.drained.put(timeout_seconds)
        if not self._live:
            self._idle.set()
        with move_on_after(timeout_seconds):
            await self._idle.wait()
        self._stopped.open()

    async def _passed_or_stopped(self, gate: Gate) -> None:
        async with create_task_group() as tasks:
            for waited_for in (gate, self._stopped):
                tasks.start_soon(_first, waited_for, tasks)

    def _check_alive(self) -> None:
        if self.script.dead or self._stopped.is_open:
            raise EngineStopped("the engine has stopped")

    def _cached_tokens(self, prompt: Sequence[int], cache_salt: str) -> int:
        seen = [prompt for salt, prompt in self._seen if salt == cache_salt]
        return max((_common_beginning(prompt[:-1], earlier) for earlier in seen), default=0)

    def _steps(self, request: Request) -> Iterator[list[OutputEvent]]:
        """One event of every live sequence, step by step; their admissions first."""
        cached_tokens = self._cached_tokens(request.prompt, request.cache_salt)
        admission = Usage(len(request.prompt), cached_tokens, 0)
        yield [OutputEvent(request.id, index, admission=admission) for index in range(request.n)]
        sequences = [
            _sequence(request, index, self._answer(request, index), cached_tokens, self.script)
            for index in range(request.n)
        ]
        while events := [event for sequence in sequences for event in _next(sequence)]:
            yield events

    def _answer(self, request: Request, index: int) -> bytes:
        return self.script.answers[index % len(self.script.answers)].encode()


@dataclass
class TryingEngine(FakeEngine):
    """Tries what it is asked until the gate is open."""

    gate: Gate = field(default_factory=Gate)
    tried: "queue.Queue[Request]" = field(default_factory=queue.Queue)

    async def check(self, request: Request) -> None:
        self.tried.put(request)
        await self.gate.passed()


@dataclass(frozen=True)
class FakeSubmission:
    """Implements engine.api.Submission."""

    task: "asyncio.Task[None]"

    def end(self) -> None:
        self.task.cancel()


async def _first(gate: Gate, tasks: TaskGroup) -> None:
    await gate.passed()
    tasks.cancel_scope.cancel()


def _reading(request: Request, admissions: Sequence[OutputEvent]) -> Iterator[OutputEvent]:
    """What is computed of the prompt is read in two parts."""
    (admission, *_) = (event.admission for event in admissions if event.admission)
    computed = admission.prompt_tokens - admission.cached_tokens
    for n_left in (computed // 2, 0):
        read_tokens = admission.prompt_tokens - n_left
        yield OutputEvent(request.id, 0, read_tokens=read_tokens)


def _next(sequence: Iterator[OutputEvent]) -> list[OutputEvent]:
    event = next(sequence, None)
    return [] if event is None else [event]


def drafted(request: Request, script: Script) -> tuple[int, ...]:
    """A prediction is one draft, of the whole answer."""
    if not request.speculate:
        return ()
    return tuple(request.prediction) or tuple(script.expected.encode())


def _common_beginning(left: Sequence[int], right: Sequence[int]) -> int:
    same = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        same += 1
    return same


def _sequence(
    request: Request, index: int, answer: bytes, cached_tokens: int, script: Script
) -> Iterator[OutputEvent]:
    tokens = answer[: request.max_tokens]
    reason = FinishReason.LENGTH if len(tokens) == request.max_tokens else FinishReason.STOP
    prompt_logprobs, half = _prompt_logprobs(request), (len(request.prompt) + 1) // 2
    for part in filter(None, (prompt_logprobs[:half], prompt_logprobs[half:])):
        yield OutputEvent(request.id, index, prompt_logprobs=part)
    held = b""
    for position, token in enumerate(tokens):
        if position == script.fails_after_tokens:
            yield OutputEvent(request.id, index, finish_reason=FinishReason.ERROR, error="it broke")
            return
        held += bytes([token])
        text, held = _whole_characters(held)
        yield OutputEvent(
            request.id,
            index,
            text=text,
            token_ids=(token,),
            logprobs=_logprobs(request, token, index),
        )
    accepted = _common_beginning(tokens, drafts := drafted(request, script))
    usage = Usage(len(request.prompt), cached_tokens, len(tokens), accepted, len(drafts) - accepted)
    yield OutputEvent(
        request.id,
        index,
        text=held.decode(errors="replace"),
        pooled=b"" if request.pooling is None else pooled(request.prompt),
        finish_reason=reason,
        usage=usage,
    )


def pooled(prompt: Sequence[int]) -> bytes:
    """How often each remainder of a token by DIMENSIONS comes."""
    counts = np.bincount([token % DIMENSIONS for token in prompt], minlength=DIMENSIONS)
    return counts.astype("<f4").tobytes()


def _whole_characters(held: bytes) -> tuple[str, bytes]:
    try:
        return held.decode(), b""
    except UnicodeDecodeError:
        return "", held


def _logprobs(request: Request, token: int, index: int) -> tuple[TokenLogprob, ...]:
    """Sequence 0 is the least likely: its tokens have -1, those of sequence k -1 / (k + 1)."""
    if request.sampling.top_logprobs is None:
        return ()
    if listed := request.sampling.logprob_token_ids:
        top = tuple((each, listed_logprob(request.prompt, each)) for each in listed)
        return (TokenLogprob(token, -1.0, top),)
    return (_entry(token, -1.0 / (index + 1), request.sampling.top_logprobs),)


def listed_logprob(prompt: Sequence[int], token: int) -> float:
    """The log-probability that is reported of a token that a request lists: some number of each."""
    return -((31 * sum(prompt) + len(prompt) + 7 * token) % 97) / 16


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...]:
    if request.prompt_logprobs is None:
        return ()
    count = request.prompt_logprobs
    return None, *(_entry(token, -2.0, count) for token in request.prompt[1:])


def _entry(token: int, logprob: float, top: int) -> TokenLogprob:
    best = tuple(((token + rank) % 128, logprob - rank) for rank in range(top))
    return TokenLogprob(token, logprob, best)
