"""What becomes of the sequences of a step that has raised: they end, or are computed again."""

from collections.abc import Mapping

from engine.core.admission import Admission
from engine.core.commit import Commit
from engine.core.drafting import DraftPolicy
from engine.core.images import ImageFeatures, uncomputed_images
from engine.core.metrics import Metrics
from engine.core.sequence import LiveSequence, LiveSequences, Status, Step
from engine.disk_cache.cache import DiskCache
from engine.values.output import FinishReason
from kvstore.store import KVStore


class FailedSteps:
    """Nothing of a failed step is published. Sequences that have been preempted since it was
    planned are not affected.
    """

    def __init__(
        self,
        store: KVStore,
        sequences: LiveSequences,
        admission: Admission,
        commit: Commit,
        metrics: Metrics,
        disk: DiskCache | None,
        drafts: DraftPolicy | None,
        images: ImageFeatures | None,
    ) -> None:
        self._store = store
        self._sequences = sequences
        self._admission = admission
        self._commit = commit
        self._metrics = metrics
        self._disk = disk
        self._drafts = drafts
        self._images = images

    def fail(self, step: Step, message: str) -> None:
        """End the sequences of a step, and those that wait for images in it, with an error."""
        sequences = self._withdraw(step)
        if self._images is not None:
            sequences += self._images.fail(step)
        for sequence in dict.fromkeys(sequences):
            self._commit.fail(sequence, message)

    def recompute(self, step: Step, not_encoded: Mapping[bytes, str]) -> None:
        """Send the sequences of a step back to the queue. They are computed again from tokens, and
        images from pixels. Those that were to compute one of the images that cannot be encoded,
        which have the reasons by digest, end with an error.
        """
        waiting = [] if self._images is None else self._images.fail(step)
        withdrawn = self._withdraw(step)
        for sequence in dict.fromkeys(withdrawn + waiting):
            why = [
                not_encoded[image.digest]
                for image in uncomputed_images(sequence)
                if image.digest in not_encoded
            ]
            if why:
                self._commit.fail(sequence, why[0])
            elif sequence in withdrawn:
                self._send_back(sequence)

    def recompute_all(self) -> None:
        """Send all running sequences back to the queue: the storage holds nothing of theirs."""
        for sequence in tuple(self._sequences.running):
            self._send_back(sequence)
        self._store.take_ops()  # on slots and blocks that nobody has any more
        if self._images is not None:
            self._images.forget_all()

    def _withdraw(self, step: Step) -> list[LiveSequence]:
        """Cache nothing that rests on a step. Returns the sequences that it computed for."""
        self._store.revoke(step.plan.ops)
        if self._disk is not None:
            self._disk.fail(step.plan.number)
        if self._drafts is not None and self._drafts.model is not None:
            self._drafts.model.fail(step)
        rowless = [sequence for sequence, lease in step.rowless if sequence.lease is lease]
        return [planned.sequence for planned in step.rows if planned.is_current] + rowless

    def _send_back(self, sequence: LiveSequence) -> None:
        """Preempt a sequence whose KV is undefined, or end it if it is being aborted."""
        if sequence.status is Status.ABORTING:
            self._commit.drop(sequence, FinishReason.ABORT)
            return
        if self._drafts is not None:
            self._drafts.leave(sequence)
        self._store.release(self._sequences.preempt(sequence))
        self._admission.add(sequence)
        self._metrics.recomputed_sequences += 1
