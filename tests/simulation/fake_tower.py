"""A vision tower that only counts: which stages of which images have been computed and are kept."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count

from engine.core.step import StepPlan
from engine.values.images import Image, ImageInput


class FakeTower:
    """Asserts what a plan promises: stages in their order, features that are there where a chunk
    reads them and take no more bytes than they may, and images that are not cut.
    """

    def __init__(self, images: ImageInput | None, fault: Callable[[], bool]) -> None:
        """`fault`: whether the next stages of an image cannot be computed."""
        self._images = images
        self.fault = fault
        self._kept: dict[bytes, tuple[int, int]] = {}  # tokens, and stages computed
        self._failed = set[bytes]()  # until they are forgotten
        self.encoded = Counter[bytes]()  # times that an image's last stage was computed
        self.n_stages: list[int] = []  # of each piece of work
        self.n_lost = 0  # images that a lost step has named
        self._latest: list[bytes] = []  # the images of the last step
        self._losses = count()

    def run(self, plan: StepPlan) -> dict[bytes, str]:
        """Forget and encode what the plan says. Returns what could not be encoded, and why."""
        for digest in plan.forget:
            self._kept.pop(digest, None)
            self._failed.discard(digest)
        self._latest = [image.digest for image, *_ in plan.encode]
        not_encoded = dict[bytes, str]()
        for image, first_stage, n_stages in plan.encode:
            assert self._images is not None
            digest = image.digest
            if digest in self._failed or self.fault():
                self._failed.add(digest)
                self._kept.pop(digest, None)
                not_encoded[digest] = "injected"
                continue
            _, done = self._kept.get(digest, (0, 0))
            assert n_stages > 0
            assert done == first_stage, "stages out of order"
            done += n_stages
            assert done <= self._images.n_stages, "more stages than there are"
            self._kept[digest] = image.n_tokens, done
            self.encoded[digest] += done == self._images.n_stages
            self.n_stages.append(n_stages)
            n_bytes = sum(n for n, _ in self._kept.values()) * self._images.bytes_per_token
            assert n_bytes <= self._images.feature_bytes, "features take more than they may"
        return not_encoded

    def lacks(self, images: Iterable[Image], start: int, n_tokens: int) -> bool:
        """Whether a chunk has a part of an image that could not be encoded."""
        end = start + n_tokens
        for image in images:
            if image.stop <= start or end <= image.start:
                continue
            if image.is_whole:
                assert start <= image.start < image.stop <= end, "an image is cut"
            if image.digest in self._failed:
                return True
            assert self._images is not None
            _, done = self._kept.get(image.digest, (0, 0))
            assert done == self._images.n_stages, "a chunk reads features that are not there"
        return False

    def lose(self) -> dict[bytes, str]:
        """A step is lost. Returns what cannot be encoded, and why: every other time the images of
        the last step, so that steps are also lost for other reasons.
        """
        lost = self._latest if next(self._losses) % 2 else []
        for digest in lost:
            self._kept.pop(digest, None)
        self.n_lost += len(lost)
        return dict.fromkeys(lost, "injected")

    def clear(self) -> None:
        """All features are lost."""
        self._kept.clear()
        self._failed.clear()
