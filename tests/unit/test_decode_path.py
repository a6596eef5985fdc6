"""The choice between compiled and eager decodes at load."""

from collections.abc import Callable, Sequence
from random import Random

import mlx.core as mx
import pytest

from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.decode import choice
from engine.mlx_backend.decode.choice import HALF_TOLERANCE, STEPS, DecodePath, Rehearsal
from engine.mlx_backend.decode.compiled import CompiledDecode
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.loading.selfcheck import tolerance
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.cached_model import CachedModel
from engine.values.stats import DecodeStats
from tests.checkpoints import SHALLOW, write_family
from tests.offline import Room, cached_model, load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CachedModel:
    """Of one layer."""
    served = load(write_family(SHALLOW, tmp_path_factory.mktemp("models")))
    return cached_model(served, Attention(), Room(n_blocks=4))


@pytest.fixture
def compiled_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    race(monkeypatch, {"eager": 0.02, "compiled": 0.01})


def race(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Let each of the rehearsal's steps take this time, by the path."""
    monkeypatch.setattr(choice, "_step_seconds", lambda _, step: [seconds[step.__name__]] * STEPS)


def chosen(model: CachedModel) -> DecodePath:
    path = DecodePath("not chosen yet")
    path.choose(model, lambda line: None)
    return path


@pytest.mark.usefixtures("compiled_is_faster")
def test_right_and_faster(model: CachedModel) -> None:
    path = chosen(model)
    assert path.compiled is not None
    assert path.why.startswith("compiled: a compiled step takes, of an eager one's time, 0.50 at 1")
    assert path.stats() == DecodeStats(path.why, steps=0, compiled_steps=0)


def test_slower(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    race(monkeypatch, {"eager": 0.02, "compiled": 0.03})
    path = chosen(model)
    assert path.compiled is None
    assert path.why.startswith("eager: a compiled step takes, of an eager one's time, 1.50 at 1")


def test_faster_for_one_row_alone(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then steps of several rows are eager."""
    ratio = choice._ratio
    seconds = {"eager": 0.02, "compiled": 0.0}

    def begin(model: CachedModel, n_rows: int) -> float:
        seconds["compiled"] = 0.01 if n_rows == 1 else 0.04
        return ratio(model, n_rows)

    monkeypatch.setattr(choice, "_ratio", begin)
    race(monkeypatch, seconds)
    path = chosen(model)
    assert path.compiled is not None
    assert path.why.startswith("compiled: ")
    rows = [object()] * 2
    assert path.compiled.forward(rows, mx.zeros) is None  # type: ignore[arg-type]
    assert path.compiled.steps == {"eager steps are faster for this number of rows": 1}


def test_an_eager_step_that_takes_long(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's share of it would not be worth the rehearsal."""
    race(monkeypatch, {"eager": 2.0, "compiled": 1.0})
    monkeypatch.setattr(Rehearsal, "compiled", lambda rehearsal: pytest.fail("it compiles"))
    path = chosen(model)
    assert path.compiled is None
    assert path.why == "eager: an eager step takes 2 s, little of it on the host"


def test_an_eager_step_that_takes_long_because_others_use_the_machine(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest step counts: the choice serves as long as the engine runs."""
    seconds = {"eager": [1.5, 0.02, 0.9], "compiled": [0.01] * STEPS}
    monkeypatch.setattr(choice, "_step_seconds", lambda _, step: seconds[step.__name__])
    assert chosen(model).compiled is not None


@pytest.mark.parametrize(("seconds", "path"), [(0.015, "compiled"), (0.025, "eager")])
@pytest.mark.parametrize("seed", range(20))
def test_other_programs_do_not_decide_the_race(
    model: CachedModel, seed: int, seconds: float, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the steps take up to ten times as long as they would on a quiet machine."""
    noise = Random(seed)
    quiet = {"eager": 0.02, "compiled": seconds}
    monkeypatch.setattr(
        choice,
        "_step_seconds",
        lambda _, step: [
            quiet[step.__name__] * noise.choice([1.0, noise.uniform(1.0, 10.0)])
            for _ in range(STEPS)
        ],
    )
    monkeypatch.setattr(Rehearsal, "check", lambda rehearsal: None)
    assert chosen(model).why.startswith(path)


def patch_forward(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[mx.array], mx.array | None]
) -> None:
    """Change the logits of compiled steps."""
    forward = CompiledDecode.forward

    def changed(
        compiled: CompiledDecode, rows: Sequence[BatchRow], tokens: Callable[[int], mx.array]
    ) -> mx.array | None:
        logits = forward(compiled, rows, tokens)
        return None if logits is None else change(logits)

    monkeypatch.setattr(CompiledDecode, "forward", changed)


@pytest.mark.usefixtures("compiled_is_faster")
def test_other_logits(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_forward(monkeypatch, lambda logits: logits * 1.5)
    path = chosen(model)
    assert path.compiled is None
    assert path.why == "eager: its logits are wrong by 50.0% of their size"


@pytest.mark.usefixtures("compiled_is_faster")
def test_in_float32_they_differ_by_no_more_than_the_check_at_load_allows(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times as much is nothing in half precision."""
    patch_forward(monkeypatch, lambda logits: logits * 1.001)
    assert chosen(model).why == "eager: its logits are wrong by 0.1% of their size"


def test_in_half_precision_they_differ_by_more() -> None:
    layout = Layout((), mx.bfloat16, vocab_size=8)
    assert tolerance(layout, HALF_TOLERANCE) == HALF_TOLERANCE > tolerance(layout)


@pytest.mark.usefixtures("compiled_is_faster")
def test_logits_that_are_no_numbers(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_forward(monkeypatch, lambda logits: logits * mx.nan)
    path = chosen(model)
    assert path.compiled is None
    assert path.why.startswith("eager: its logits are wrong")


@pytest.mark.usefixtures("compiled_is_faster")
def test_another_token_is_the_likeliest(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the logits as a whole are hardly wrong."""
    monkeypatch.setattr(choice, "deviation", lambda found, expected: 0.0)
    patch_forward(monkeypatch, lambda logits: -logits)
    path = chosen(model)
    assert path.compiled is None
    assert path.why == "eager: its likeliest tokens are others"


def _no_logits(logits: mx.array) -> mx.array:
    raise ValueError("[multiply] no such thing\nas this")


@pytest.mark.usefixtures("compiled_is_faster")
def test_a_model_that_raises(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_forward(monkeypatch, _no_logits)
    path = chosen(model)
    assert path.compiled is None
    assert path.why.startswith("eager: ValueError: ")
    assert "\n" not in path.why


def test_a_model_that_cannot_be_traced(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that wants a number's value."""

    def fail(*_: object) -> None:
        raise RuntimeError("[eval] attempting to eval an array during a transformation")

    monkeypatch.setattr(mx, "compile", lambda step: fail)
    path = chosen(model)
    assert path.compiled is None
    assert "during a transformation" in path.why


NO_KERNEL = (
    "[Compile::eval_cpu] Failed to compile function AddMultiply: Failed to execute command with "
    'return code 1: "g++ -O3 2>&1", the output is: In file included from here:\n'
    "tmp.cpp:1: fatal error: no space left on device\n"
)
"""What MLX says where g++ fails, in parts."""


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Empty while MLX fuses operations."""
    found = list[bool]()
    monkeypatch.setattr(mx, "disable_compile", lambda: found.append(False))
    return found


def test_a_kernel_that_cannot_be_built_for_the_rehearsal(
    model: CachedModel, fused: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes are eager, and nothing is fused, because eager steps need kernels, too."""

    def fail(rehearsal: Rehearsal) -> mx.array:
        raise RuntimeError(NO_KERNEL)

    monkeypatch.setattr(Rehearsal, "compiled", fail)
    race(monkeypatch, {"eager": 0.02, "compiled": 0.01})
    path = chosen(model)
    assert path.compiled is None
    problem = "g++ fails: tmp.cpp:1: fatal error: no space left on device"
    assert path.stats() == DecodeStats(f"eager: {problem}", 0, 0, problem)
    assert fused == [False]


@pytest.mark.usefixtures("compiled_is_faster")
def test_a_kernel_that_cannot_be_built_for_a_draw(
    model: CachedModel, fused: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(NO_KERNEL)

    path = chosen(model)
    assert path.compiled is not None
    monkeypatch.setattr(choice, "draw", fail)
    choice.compute_draws(path, model.layout, lambda line: None)
    assert path.compiled is None
    assert path.stats().problem == "g++ fails: tmp.cpp:1: fatal error: no space left on device"
    assert fused == [False]
