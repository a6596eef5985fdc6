"""What grammars cost: 8 rows free and 8 held to one schema; 8 free rows beside 8 of either kind; 8
that offer tools and call none.

    python -m load_tests.bench.constraints

In process, on the demonstration model and on a random checkpoint of 151,936 tokens, as Qwen's. The
kinds alternate, so that what else the machine does is the same for all. Ratios are of one round's
throughputs; printed are their medians.
"""

import asyncio
import itertools
import json
import statistics
import string
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.api import Engine
from engine.launch import launch
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.values.request import Constraint, Grammar, GrammarKind, Request, SamplingParams
from engine.values.settings import EngineConfig
from load_tests.events import events_of
from load_tests.shapes import CONFIGS
from measuring.random_checkpoint import SPECIAL_TOKENS, write_checkpoint
from server.parsing.formats.json_calls import HERMES
from server.parsing.lark import Function, calls_grammar

ROWS, TOKENS, ROUNDS = 8, 48, 9
VOCABULARY = 151_936
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "count": {"type": "integer"},
            "kind": {"enum": ["small", "medium", "large"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
}
HELD = Constraint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), "response_format")
CALL = Function("look", {"properties": {"depth": {"type": "integer"}}})
NEVER = 1
"""A token that is kept from coming: it stands for the marker of calls."""
OFFERED = Constraint(
    Grammar(GrammarKind.LARK, calls_grammar(HERMES.syntax, [CALL], {}, many=False)),
    "tools",
    behind=(NEVER,),
    repeats=True,
    weaker=(None,),
)


class Rows:
    """Starts rows on one engine, and times them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = itertools.count()

    async def seconds(self, constraints: list[Constraint | None]) -> float:
        """Until the first ROWS rows, of TOKENS tokens, are through; all of them begin at once."""
        started = time.perf_counter()
        rows = [asyncio.ensure_future(self._run(one)) for one in constraints]
        await asyncio.gather(*rows[:ROWS])
        seconds = time.perf_counter() - started
        await asyncio.gather(*rows)
        return seconds

    async def _run(self, constraint: Constraint | None) -> None:
        name = next(self._names)
        sampling = SamplingParams(seed=name, logit_bias={NEVER: -100.0})
        request = Request(
            str(name), (5, 6, 7), TOKENS, sampling, ignore_eos=True, constraint=constraint
        )
        async for _ in events_of(self._engine, request):
            pass


async def measure(model: Path) -> str:
    config = EngineConfig(model=str(model), kv_cache_bytes=64 << 20, max_running=2 * ROWS)
    engine = await launch(config, lambda line: None)
    rows = Rows(engine)
    free: list[Constraint | None] = [None] * ROWS
    held: list[Constraint | None] = [HELD] * ROWS
    offered: list[Constraint | None] = [OFFERED] * ROWS
    kinds = {
        "free": free,
        "offered": offered,
        "held": held,
        "free, free": free + free,
        "free, held": free + held,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for done in range(-1, ROUNDS):  # the first is not counted
        for kind, constraints in kinds.items():
            taken = await rows.seconds(constraints)
            if done >= 0:
                seconds[kind].append(taken)
    await engine.drain(0.0)
    steps = ", ".join(f"{k} {1e3 * statistics.median(v) / TOKENS:.1f}" for k, v in seconds.items())
    return (
        f"offered / free {_ratio(seconds['free'], seconds['offered'])}, "
        f"held / free {_ratio(seconds['free'], seconds['held'])}, "
        f"free beside held / beside free {_ratio(seconds['free, free'], seconds['free, held'])}; "
        f"ms a step: {steps}"
    )


def _ratio(base: list[float], other: list[float]) -> str:
    return f"{statistics.median(b / o for b, o in zip(base, other, strict=True)):.2f}"


def wide_tokenizer() -> Tokenizer:
    """Byte-level BPE of VOCABULARY tokens: pairs of letters, and pairs of pairs."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    pairs = [(a, b) for a in ("Ġ", *letters) for b in letters]
    fours = [("".join(p), "".join(q)) for p, q in itertools.product(pairs, pairs) if q[0] != "Ġ"]
    merges = [*pairs, *fours][: VOCABULARY - len(bytes_) - len(SPECIAL_TOKENS)]
    entries = bytes_ + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer


def main() -> None:
    print(f"demonstration model: {asyncio.run(measure(DEFAULT_CHECKPOINT))}", flush=True)
    with tempfile.TemporaryDirectory() as parent:
        wide = Path(parent) / "wide"
        config = {**CONFIGS["qwen3"], "vocab_size": VOCABULARY, "tie_word_embeddings": True}
        write_checkpoint(wide, config, 0, wide_tokenizer(), mx.float32)
        print(f"{VOCABULARY} tokens: {asyncio.run(measure(wide))}", flush=True)


if __name__ == "__main__":
    main()
