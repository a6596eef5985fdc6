"""Decides when the images of prompts are encoded, and keeps account of their features.

A chunk of a prompt that reaches an image stops before it until the image is encoded. Encoding is
work of the step's budget: each step has as many stages of the vision tower as it has time for. Of
an image whose KV is cached no chunk has a token, so it is never encoded.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.sequence import LiveSequence, Step
from engine.core.step import Encode, StepResult
from engine.values.images import Image, ImageInput
from engine.values.stats import ImageStats
from kvstore.lease import Lease
from kvstore.types import Finding


class _Reader(NamedTuple):
    """A sequence that computes an image's tokens, of which the last is before position `stop`."""

    sequence: LiveSequence
    stop: int


@dataclass(eq=False, slots=True)
class _Features:
    """The features of an image, of which `n_stages` stages are planned.

    `readers` have the leases that have reached the image since its features were made. `n_steps`
    counts the steps in flight that compute or read the features. `is_encoded`: a step with the last
    stage has been computed.
    """

    image: Image
    n_bytes: int
    n_stages: int = 0
    is_encoded: bool = False
    n_steps: int = 0
    readers: dict[Lease, _Reader] = field(default_factory=dict)

    def waiting(self) -> list[LiveSequence]:
        """The sequences that have reached the image and still have the lease that did."""
        readers = self.readers.items()
        return [of.sequence for lease, of in readers if of.sequence.lease is lease]


class ImageFeatures:
    """The features that the runner keeps, at most `feature_bytes` of them, the least recently used
    first. Belongs to the engine thread.

    Features are *needed* while a step in flight has to do with them, and until the tokens of the
    image are planned for each lease that has reached it. Others make room for those of an image
    that is reached; room for all of its features is taken before its first stage.

    No two images wait for each other's room. Whoever waits for room has features of all images
    before, so it computes their tokens and needs them no longer. One image at a time is the next to
    get room, so smaller ones do not overtake it for ever.
    """

    def __init__(self, limits: ImageInput, leases: Set[Lease]) -> None:
        """`leases`: those of the store that have not been released."""
        self._limits = limits
        self._leases = leases
        self._kept: dict[bytes, _Features] = {}  # by digest, the least recently used first
        self._bytes = 0
        self._in_flight: dict[int, list[_Features]] = {}  # by the step's number
        self._forgotten: list[bytes] = []  # of which the runner has not been notified
        # The image that gets room next: its digest, the lease that has reached it, and its end.
        self._next: tuple[bytes, Lease, int] | None = None
        self._n_encoded = 0
        self._n_reused = 0

    def stats(self) -> ImageStats:
        """Counters and bytes, on any thread."""
        return ImageStats(self._n_encoded, self._n_reused, self._bytes, self._limits.feature_bytes)

    def chunk_tokens(self, sequence: LiveSequence, lease: Lease, n_tokens: int, step: Step) -> int:
        """How many of the sequence's next `n_tokens` known tokens a chunk has. 0 if it has to wait.

        It stops before an image that is not encoded, of which stages are added to the step, as many
        as it has time for. It has all of an image that is computed as a whole: where that is more
        than `n_tokens`, it is the step's first chunk.
        """
        position = sequence.sampled_position
        most = lease.max_step_tokens(n_tokens, position)
        if not sequence.request.images or not most:
            return most
        n_encoded = len(step.plan.encode)
        most = self._reach(sequence, lease, most, step)
        if len(step.plan.encode) > n_encoded:  # which takes some of the step
            n_tokens = min(n_tokens, step.allow(sequence))
        if 0 < n_tokens < most:
            most = lease.max_step_tokens(n_tokens, position)
        return 0 if most > n_tokens and step.budget.has_prompts else most

    def _reach(self, sequence: LiveSequence, lease: Lease, n_tokens: int, step: Step) -> int:
        """How many of the lease's next `n_tokens` tokens come before the first image that is not
        encoded. Adds stages of the images among them to the step, as many as it has time for.
        """
        start = lease.planned_tokens
        for image in _within(sequence, start, n_tokens):
            if not self._encode(image, sequence, lease, step):
                return max(image.start - start, 0)
        return n_tokens

    def read(self, sequence: LiveSequence, start: int, n_tokens: int, step: Step) -> None:
        """Keep the features that the step's chunk of these tokens reads until it is committed."""
        for image in _within(sequence, start, n_tokens):
            self._hold(self._kept[image.digest], step)

    def take_forgotten(self) -> list[bytes]:
        """The digests of the images that the next step has to forget before it encodes any."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def commit(self, step: Step, result: StepResult) -> list[tuple[LiveSequence, str]]:
        """A step was computed. Returns the sequences for which an image could not be encoded, each
        with the reason.
        """
        failed = list[tuple[LiveSequence, str]]()
        encoded = set[bytes]()
        for encode in step.plan.encode:
            digest = encode.image.digest
            if (why := result.not_encoded.get(digest)) is not None:
                failed += [(sequence, why) for sequence in self._drop(digest)]
            elif encode.first_stage + encode.n_stages == self._limits.n_stages:
                encoded.add(digest)
        self._n_encoded += len(encoded)
        for features in self._in_flight.get(step.plan.number, ()):
            features.is_encoded |= features.image.digest in encoded
        self._release(step)
        return failed

    def fail(self, step: Step) -> list[LiveSequence]:
        """A step has raised: what it was to encode is encoded again. Returns the sequences that
        wait for it.
        """
        self._forgotten += step.plan.forget
        waiting = list[LiveSequence]()
        for encode in step.plan.encode:
            waiting += self._drop(encode.image.digest)
        self._release(step)
        return waiting

    def forget_all(self) -> None:
        """The runner has lost all features."""
        for digest in tuple(self._kept):
            self._drop(digest)

    def forget_unneeded(self) -> None:
        """Forget what no running request needs."""
        for digest, features in tuple(self._kept.items()):
            if not self._is_needed(features):
                self._drop(digest)

    def problems(self) -> Iterator[Finding]:
        """Contradictions while nothing is computed."""
        if self._in_flight:
            yield f"features of images are held for the steps {sorted(self._in_flight)}"
        recounted = sum(features.n_bytes for features in self._kept.values())
        if recounted != self._bytes or self._bytes > self._limits.feature_bytes:
            yield (
                f"features of images take {self._bytes} bytes, recounted {recounted}, of "
                f"{self._limits.feature_bytes}"
            )
        for features in self._kept.values():
            if features.n_steps or any(lease in self._leases for lease in features.readers):
                yield f"features of image {features.image.digest.hex()[:8]} are needed"
        yield None

    def _encode(self, image: Image, sequence: LiveSequence, lease: Lease, step: Step) -> bool:
        """Add stages of an image that is reached. Returns whether these are its last, or it had all
        of them.
        """
        features, n_stages = self._kept.get(image.digest), self._limits.n_stages
        left = n_stages - (0 if features is None else features.n_stages)
        allowed = step.allow_stages(sequence, image, left, n_stages) if left else 0
        if features is None:
            if not allowed or not self._make_room(image, lease):
                return False
            features = _Features(image, image.n_tokens * self._limits.bytes_per_token)
            self._bytes += features.n_bytes
        else:
            del self._kept[image.digest]  # to its place as the most recently used
            self._n_reused += lease not in features.readers
        self._kept[image.digest] = features
        features.readers[lease] = _Reader(sequence, image.stop)
        if allowed:
            step.encode(Encode(image, features.n_stages, allowed), n_stages)
            features.n_stages += allowed
            self._hold(features, step)
        return features.n_stages == n_stages

    def _make_room(self, image: Image, lease: Lease) -> bool:
        """Forget what is not needed, as much as it takes. False if too much is needed, or another
        image gets room first.
        """
        if self._next is not None:
            digest, waiting, stop = self._next
            is_waiting = waiting in self._leases and waiting.planned_tokens < stop
            if is_waiting and waiting is not lease and digest != image.digest:
                return False
        n_missing = image.n_tokens * self._limits.bytes_per_token
        n_missing -= self._limits.feature_bytes - self._bytes
        victims = list[bytes]()
        for digest, features in self._kept.items():
            if n_missing <= 0:
                break
            if not self._is_needed(features):
                victims.append(digest)
                n_missing -= features.n_bytes
        if n_missing > 0:
            self._next = image.digest, lease, image.stop
            return False
        self._next = None
        for digest in victims:
            self._drop(digest)
        return True

    def _is_needed(self, features: _Features) -> bool:
        # Whoever has planned to read what turns out not to be encoded fails with it.
        features.readers = {
            lease: reader
            for lease, reader in features.readers.items()
            if lease in self._leases
            and (lease.planned_tokens < reader.stop or not features.is_encoded)
        }
        return features.n_steps > 0 or bool(features.readers)

    def _drop(self, digest: bytes) -> list[LiveSequence]:
        """Forget an image's features. Returns the sequences that wait for them."""
        features = self._kept.pop(digest, None)
        if features is None:
            return []
        self._bytes -= features.n_bytes
        self._forgotten.append(digest)
        return features.waiting()

    def _hold(self, features: _Features, step: Step) -> None:
        features.n_steps += 1
        self._in_flight.setdefault(step.plan.number, []).append(features)

    def _release(self, step: Step) -> None:
        for features in self._in_flight.pop(step.plan.number, ()):
            features.n_steps -= 1
            self._is_needed(features)  # or they would keep readers that have ended


def _within(sequence: LiveSequence, start: int, n_tokens: int) -> Iterator[Image]:
    """The images that have some of the sequence's `n_tokens` tokens from `start` on."""
    for image in sequence.request.images:
        if start < image.stop and image.start < start + n_tokens:
            yield image


def uncomputed_images(sequence: LiveSequence) -> list[Image]:
    """The images of an admitted sequence's prompt that have tokens without KV."""
    assert sequence.lease is not None
    n_written = sequence.lease.written_tokens
    return [image for image in sequence.request.images if image.stop > n_written]


def whole_images_problem(max_tokens: int, step_tokens: int, *, has_states: bool) -> str:
    """Why a model whose images have tokens that see each other cannot take them, in words for its
    card; "" if it can. `max_tokens` are those of its largest image; `has_states`: some layers are
    recurrent.
    """
    if has_states:
        return (
            "the tokens of its images see each other, and states of recurrent layers cannot be "
            "saved within them"
        )
    if max_tokens > step_tokens:
        return (
            f"an image has up to {max_tokens:,} tokens that see each other, and a step computes "
            f"{step_tokens:,} (step_tokens): raise step_tokens to {max_tokens:,}"
        )
    return ""
