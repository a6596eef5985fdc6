"""Images of prompts: what a model takes, an image as it is prepared, and one of a request."""

from dataclasses import dataclass
from enum import StrEnum


class Detail(StrEnum):
    """With how many tokens an image is shown to the model."""

    FULL = "full"  # as many as the model's processor gives it
    LOW = "low"  # the fewest that the processor allows


@dataclass(frozen=True, slots=True)
class ImageInput:
    """What a model takes of images.

    `placeholder` is the token that the chat template writes once for each image, and `part` the one
    that stands for each part of it. An image has at most `max_tokens` tokens, those around it
    included. The vision tower computes it in `n_stages`,
    one after the other; then its features take `bytes_per_token` for each of its tokens, of
    `feature_bytes` for all images whose features are kept. The largest image fits.
    """

    placeholder: int
    max_tokens: int
    n_stages: int
    bytes_per_token: int
    feature_bytes: int
    part: int | None = None  # None: the placeholder

    def __post_init__(self) -> None:
        if self.max_tokens * self.bytes_per_token > self.feature_bytes:
            raise ValueError(
                f"the features of an image of {self.max_tokens} tokens take more than "
                f"{self.feature_bytes} bytes"
            )

    @property
    def part_id(self) -> int:
        """The token that stands for each part of an image."""
        return self.placeholder if self.part is None else self.part


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a request's prompt.

    `digest` is of the pixels as the vision tower reads them, of the grid and of the settings of the
    preprocessing: 32 bytes. `runs` are the first position and the number of the placeholder tokens
    that stand for its parts, in order; there may be other tokens between them. `grid` has what the
    family's tower and its positions need: times, rows and columns of patches for Qwen's, rows and
    columns of patches otherwise. `file` is the path of a .npy file with the float32 array that the
    tower reads.
    """

    digest: bytes
    runs: tuple[tuple[int, int], ...]
    grid: tuple[int, ...]
    file: str
    is_whole: bool = False  # its tokens see each other, so that they are computed in one step

    @property
    def n_tokens(self) -> int:
        """How many tokens stand for its parts."""
        return sum(n_tokens for _, n_tokens in self.runs)

    @property
    def start(self) -> int:
        """The position of the first token that stands for a part."""
        return self.runs[0][0]

    @property
    def stop(self) -> int:
        """The position after the last token that stands for a part."""
        first, n_tokens = self.runs[-1]
        return first + n_tokens


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as a model's vision tower reads it. `tokens` take the place of the placeholder that
    the template writes; the runs of `image` are counted from the first of them.
    """

    image: Image
    tokens: tuple[int, ...]

    def at(self, position: int) -> Image:
        """The image of a prompt in which its first token has this position."""
        image = self.image
        runs = tuple((first + position, n_tokens) for first, n_tokens in image.runs)
        return Image(image.digest, runs, image.grid, image.file, image.is_whole)
