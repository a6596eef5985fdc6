"""A scenario on a daemon that decodes eagerly, and on one whose steady decodes are compiled."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from engine.core.step import Decode, ModelRunner, Resample, StepMasks, StepPlan, StepResult
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.decode.compiled import CompiledDecode
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.cached_model import CachedModel
from engine.values.output import TokenLogprob
from engine.values.settings import KVFormat
from tests.devices import tolerance
from tests.offline import ChooseDecode, OfflineDaemon, Room, Served

LOGPROB_TOLERANCE = tolerance(1e-4)

ROUNDED_TOLERANCES = {
    KVFormat.F16: 4e-3,
    KVFormat.BF16: 2e-2,
    KVFormat.Q8: 2e-2,
    KVFormat.K8V4: 1e-1,
}
"""How far a few log-probabilities may differ where K and V are stored in fewer bits: a number that
differs in its last bits may be rounded to the next code.
"""

UNFIT = {"llama4": "the model needs positions as Python numbers"}
"""Families whose decodes cannot be compiled, and why."""

Outputs: TypeAlias = Mapping[tuple[str, int], Sequence[int]]
"""Tokens by request id and index."""

Scenario: TypeAlias = Callable[[OfflineDaemon], Outputs]
"""Has a daemon serve some requests."""


def compile_at_once(model: CachedModel) -> DecodePath:
    """A path that has won its rehearsals, and traces a shape when it first comes."""
    path = DecodePath("")
    path.use(CompiledDecode(model, wanted_steps=1))
    return path


def compile_as_served(model: CachedModel) -> DecodePath:
    """A path that has won its rehearsals, and traces a shape when the daemon would."""
    path = DecodePath("")
    path.use(CompiledDecode(model))
    return path


def steps_of(path: DecodePath) -> Counter[str]:
    """The steady steps that the path's compiled decode was given: "" are those that it took, the
    others are by the reason for which they were eager.
    """
    assert path.compiled is not None
    return path.compiled.steps


class OtherRunner:
    """Implements `ModelRunner` by another, so that subclasses can see its calls."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def launch(self) -> None:
        self._runner.launch()

    def draw(self, masks: StepMasks) -> None:
        self._runner.draw(masks)

    def collect(self) -> StepResult:
        return self._runner.collect()


class SteadySteps(OtherRunner):
    """`n` counts the steps that may be compiled: rows decode or resample, and nothing else is
    computed.
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.n = 0

    def submit(self, plan: StepPlan) -> None:
        is_steady = all(isinstance(row, Decode | Resample) for row in plan.rows)
        self.n += is_steady and any(isinstance(row, Decode) for row in plan.rows)
        super().submit(plan)


class Compiled:
    """A daemon whose steady decodes are compiled. Options are those of OfflineDaemon."""

    def __init__(
        self,
        served: Served,
        attention: Attention,
        room: Room,
        decode: ChooseDecode = compile_at_once,
        **options: Any,
    ) -> None:
        self._paths = list[DecodePath]()
        self._counters = list[SteadySteps]()

        def choose(model: CachedModel) -> DecodePath:
            self._paths.append(decode(model))
            return self._paths[-1]

        def count(runner: ModelRunner) -> ModelRunner:
            self._counters.append(SteadySteps(runner))
            return self._counters[-1]

        self.daemon = OfflineDaemon(served, attention, room, watch=count, decode=choose, **options)

    @property
    def path(self) -> DecodePath:
        return self._paths[0]

    @property
    def steps(self) -> Counter[str]:
        """See `steps_of`. All steady steps are among them."""
        steps = steps_of(self.path)
        assert steps.total() == self._counters[0].n
        return steps


@dataclass(frozen=True, slots=True)
class EagerRun:
    """What a daemon that decodes eagerly has said in a scenario."""

    outputs: Outputs
    logprobs: Mapping[tuple[str, int], Sequence[TokenLogprob]]

    @classmethod
    def of(cls, daemon: OfflineDaemon, scenario: Scenario) -> "EagerRun":
        """Have the daemon serve the scenario."""
        return cls(scenario(daemon), daemon.logprobs)


def expect_same_outputs(
    served: Served,
    attention: Attention,
    room: Room,
    scenario: Scenario,
    decode: ChooseDecode = compile_at_once,
    eager: EagerRun | None = None,
    **options: Any,
) -> Compiled:
    """The scenario's tokens do not depend on the path of decodes, nor do their log-probabilities
    but by what stored formats round.

    `eager` is a run of the scenario with which the compiled run is compared; None: one is made.
    Returns the compiled daemon, for what more there is to be said of it.
    """
    if eager is None:
        eager = EagerRun.of(OfflineDaemon(served, attention, room, **options), scenario)
    compiled = Compiled(served, attention, room, decode, **options)
    found = scenario(compiled.daemon)
    assert found == eager.outputs
    assert all(found.values())
    differences = []
    for name, expected_logprobs in eager.logprobs.items():
        for one, other in zip(compiled.daemon.logprobs[name], expected_logprobs, strict=True):
            assert one.token_id == other.token_id
            differences.append(abs(one.logprob - other.logprob))
    if differences:
        formats = [shape.format for shape in served.layout.kv_layers]
        bounds = [ROUNDED_TOLERANCES.get(format, LOGPROB_TOLERANCE) for format in formats]
        assert max(differences) < max(bounds, default=LOGPROB_TOLERANCE)
        assert median(differences) < LOGPROB_TOLERANCE
    return compiled
