"""A scenario on the backend of one process, or of several ranks.

    python -m tests.golden.ranking CHECKPOINT RANKS KV_FORMAT DECODE OUTPUT

serves the scenario as rank 0, and writes what it says. DECODE is `eager` or `compiled`.
"""

import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from llguidance import LLTokenizer

from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.metrics import Metrics
from engine.core.request import Namespaces
from engine.core.scheduler import Scheduler
from engine.core.step import Backend, Limits, Masks
from engine.drafts.proposer import Proposer, first_rates
from engine.grammar.answers import Verdict
from engine.grammar.phases import grammar_plan
from engine.grammar.stage import GrammarStage
from engine.mlx_backend.backend import load_backend
from engine.mlx_backend.decode import choice
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import Drawn, Sampler
from engine.output.text import output_factory
from engine.values.output import OutputEvent
from engine.values.request import Constraint, Grammar, GrammarKind, Request, SamplingParams
from engine.values.settings import EngineConfig, KVFormat
from engine.values.tokens import pack
from kvstore import invariants
from kvstore.pool import BlockPool
from kvstore.sizes import StorageBytes, build_groups
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from measuring.random_checkpoint import VOCAB_SIZE, tiny_tokenizer
from tests.checkpoints import FAMILIES, Family
from tests.golden.driving import Logits, random_tokens
from tests.golden.test_late_masks import END, LateAnswers
from tests.grammars import LocalGrammars
from tests.simulation.daemon import LetterDetokenizer
from tests.unit.scripted_drafter import ScriptedDrafter, ScriptedPolicy

BLOCK_SIZE, N_BLOCKS = 8, 26
"""Blocks of the store, so few that sequences are preempted and prefixes are evicted."""

OUTPUT_TOKENS = 24
GREEDY = SamplingParams(temperature=0)
PROMPT = random_tokens(45, seed=1)
SHARED = random_tokens(30, seed=2)
_LLAMA = FAMILIES["llama"].config
SIX_HEADS = Family(
    "six_heads",
    {**_LLAMA, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16}
    | {"intermediate_size": 96},
)
"""Of a llama: two and three ranks divide them."""

COMPILED_RANK = "tests.golden.compiled_rank"


@dataclass
class Said:
    """What the scenario has said: the tokens of each sequence, the logits before each drawn token
    of those without drafts, by seed and place in the output, and how often what has happened.
    """

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    logits: dict[tuple[int, int], Logits] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    preempted: int = 0
    evicted: int = 0
    late: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    compiled: int = 0  # steps


def config_of(
    checkpoint: Path, ranks: int, kv_format: KVFormat = KVFormat.AUTO, decode: str = "eager"
) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint),
        ranks=ranks,
        block_size=BLOCK_SIZE,
        max_running=8,
        step_tokens=32,
        memory_bytes=1 << 30,
        kv_format=kv_format,
        decode="eager" if decode == "eager" else "auto",
    )


def say(checkpoint: Path, ranks: int, kv_format: KVFormat, decode: str) -> Said:
    """Serve the scenario by the parts that serve a daemon."""
    with patch.object(choice, "WINS", np.inf), ExitStack() as stack:
        if ranks > 1 and decode != "eager":
            from engine.mlx_backend.ranks import start  # noqa: PLC0415 - not with one rank

            stack.enter_context(patch.object(start, "RANK_MODULE", COMPILED_RANK))
        backend = load_backend(config_of(checkpoint, ranks, kv_format, decode), lambda line: None)
    try:
        return Scenario(backend).run()
    finally:
        backend.release_thread()


def say_alone(checkpoint: Path, kv_format: KVFormat, decode: str) -> Said:
    """What one process says, on a thread of its own: its arrays go with it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(say, checkpoint, 1, kv_format, decode).result()


def say_in_ranks(
    checkpoint: Path, ranks: int, kv_format: KVFormat, decode: str, output: Path
) -> Said:
    """What ranks say, in a process of its own, since a process is a rank of one group only."""
    arguments = [str(checkpoint), str(ranks), kv_format, decode, str(output)]
    command = [sys.executable, "-m", "tests.golden.ranking", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return Said(**pickle.loads(output.read_bytes()))


class Scenario:
    """The real loop, scheduler and store on a backend. The clock stands still."""

    def __init__(self, backend: Backend) -> None:
        self._said = Said()
        assert backend.sizes.n_blocks >= N_BLOCKS
        sizes = replace(backend.sizes, n_blocks=N_BLOCKS)
        pool = BlockPool(N_BLOCKS)
        groups = build_groups(sizes, BLOCK_SIZE, 32)
        self._store = KVStore(pool, RadixTree(pool, BLOCK_SIZE), BLOCK_SIZE, groups)
        tokenizer = LLTokenizer(tiny_tokenizer().to_str(), n_vocab=VOCAB_SIZE, eos_token=[END])
        answers = LateAnswers(LocalGrammars(tokenizer, frozenset({END})), 0.4, seed=0)
        self._scheduler = Scheduler(
            self._store,
            output_factory(frozenset(), lambda _: LetterDetokenizer()),
            Limits(VOCAB_SIZE, 200, N_BLOCKS * BLOCK_SIZE, 8, 64, 32, pools=True),
            draw_seed=lambda: 0,
            metrics=Metrics(lambda: 0.0),
            namespaces=Namespaces(),
            drafts=ScriptedPolicy(self._store),
        )
        self._events = list[OutputEvent]()
        self._loop = EngineLoop(
            self._scheduler,
            backend.runner,
            Inbox(),
            self._deliver,
            StorageBytes(block=0, slots=(0,) * len(self._store.groups), arenas=0),
            GrammarStage(self._scheduler, answers, lambda: 0.0),
            backend.rest,
            give_back=backend.give_back,
        )
        self._backend = backend

    def run(self) -> Said:
        said = self._said
        sample = Sampler.sample

        def reading(
            sampler: Sampler,
            logits: mx.array,
            rows: Sequence[SamplingRow],
            masks: Masks,
            masked: Sequence[int],
        ) -> Drawn:
            found = np.array(logits.astype(mx.float32))
            for row, own in zip(rows, found, strict=False):
                said.logits[row.seed, row.output_index] = own
            return sample(sampler, logits, rows, masks, masked)

        with patch.object(Sampler, "sample", reading):
            self._share()
            self._fill()
            self._constrain()
            self._give_back()
        self._draft()
        said.preempted = self._scheduler.metrics.preemptions
        said.late = self._scheduler.metrics.late_rows
        said.evicted = self._store.counters.evictions
        said.compiled = self._backend.decode().compiled_steps
        return said

    def _share(self) -> None:
        """A prompt, again, and a conversation that goes on. Scores of a prompt."""
        self._serve(_request("cold", PROMPT, GREEDY))
        self._serve(_request("warm", PROMPT, GREEDY))
        longer = [*PROMPT, *self._said.tokens["cold", 0], *random_tokens(5, seed=3)]
        self._serve(_request("longer", longer, GREEDY))
        scored = _request("scored", random_tokens(20, seed=4), GREEDY)
        self._serve(replace(scored, prompt_logprobs=1))

    def _fill(self) -> None:
        """More than there are blocks for, of shared and of own prefixes, forks among them."""
        requests = [
            _request(f"own{i}", random_tokens(17 + 3 * i, seed=10 + i), GREEDY) for i in range(4)
        ]
        for i in range(4):
            tail = random_tokens(3 + 5 * i, seed=20 + i)
            drawn = SamplingParams(temperature=0.8, top_p=0.9)
            requests.append(_request(f"shared{i}", [*SHARED, *tail], drawn, n=1 + i % 2))
        self._serve(*requests)

    def _constrain(self) -> None:
        """Rows with masks, some of which come late, next to rows without any."""
        patterns = ("[a-z]{40,}", "(yes|no| )*", "a+b?c*")
        held = [Constraint(Grammar(GrammarKind.REGEX, one), "regex") for one in patterns]
        prompt = random_tokens(12, seed=30)
        requests = [
            replace(_request(f"held{i}", prompt, GREEDY), constraint=one)
            for i, one in enumerate(held)
        ]
        self._serve(*requests, _request("free", prompt, GREEDY))

    def _give_back(self) -> None:
        """Memory of the storage is given back, and taken again."""
        first: int | None = 0
        while first is not None:
            first = self._loop.give_back(first)
        self._serve(_request("after", PROMPT, GREEDY))

    def _draft(self) -> None:
        """Drafts, right and wrong ones, next to a sequence without any."""
        truth = self._said.tokens["cold", 0]
        wrong = [(token + 1) % VOCAB_SIZE if i % 5 == 4 else token for i, token in enumerate(truth)]
        for name, script in (("right", truth), ("wrong", wrong)):
            self._add(_request(name, PROMPT, GREEDY))
            sequences = [s for s in self._scheduler.waiting if s.request.id == name]
            for sequence in sequences:
                sequence.proposer = Proposer(ScriptedDrafter(script), first_rates())
        self._serve(_request("plain", random_tokens(9, seed=40), GREEDY))

    def _deliver(self, events: list[OutputEvent]) -> None:
        self._events += events

    def _add(self, request: Request) -> None:
        verdicts = {request.constraint.grammar: Verdict(None, 0.0)} if request.constraint else {}
        plan = grammar_plan(request, verdicts, {END}) if request.constraint else None
        self._scheduler.add(self._scheduler.prepare(request, plan))

    def _serve(self, *requests: Request) -> None:
        for request in requests:
            self._add(request)
        tokens = defaultdict[tuple[str, int], list[int]](list)
        while not self._loop.is_idle:
            self._loop.turn()
            events, self._events = self._events, []
            for event in events:
                assert event.error is None, event.error
                tokens[event.request_id, event.index] += event.token_ids
                for scored in event.prompt_logprobs:
                    if scored is not None:
                        self._said.prompt_logprobs.append(scored.logprob)
                if (usage := event.usage) is not None:
                    self._said.cached += usage.cached_tokens
                    self._said.drafted += usage.accepted_draft_tokens
                    self._said.drafted += usage.rejected_draft_tokens
                    self._said.accepted += usage.accepted_draft_tokens
            invariants.check(self._store)
        self._said.tokens |= tokens


_SEEDS = dict[str, int]()


def _request(name: str, prompt: Sequence[int], sampling: SamplingParams, n: int = 1) -> Request:
    """A request whose sequences have seeds of their own."""
    seed = 10 * _SEEDS.setdefault(name, len(_SEEDS))
    return Request(name, pack(prompt), OUTPUT_TOKENS, replace(sampling, seed=seed), n=n)


if __name__ == "__main__":
    checkpoint, ranks, kv_format, decode, output = sys.argv[1:]
    found = say(Path(checkpoint), int(ranks), KVFormat(kv_format), decode)
    Path(output).write_bytes(pickle.dumps(vars(found)))
