"""What a step computes, in the counts by which its time is predicted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes."""

    forwards: int = 0  # one for all decodes, one for each chunk of a prompt
    decode_rows: int = 0
    decode_keys: int = 0  # positions that the decodes attend to, over all rows
    prompt_tokens: int = 0
    prompt_keys: int = 0  # positions that the prompts' tokens attend to, over all tokens
    gathered_keys: int = 0  # positions up to the end of each chunk, however few its tokens are

    def __add__(self, more: "StepWork") -> "StepWork":
        return StepWork(*(own + its for own, its in zip(self.counts, more.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Of each kind, in the order of the fields."""
        return (
            self.forwards,
            self.decode_rows,
            self.decode_keys,
            self.prompt_tokens,
            self.prompt_keys,
            self.gathered_keys,
        )


def chunk_work(start: int, n_tokens: int) -> StepWork:
    """Positions [start, start + n_tokens) of a prompt, computed in a forward of their own."""
    attended = n_tokens * start + n_tokens * (n_tokens + 1) // 2
    return StepWork(1, 0, 0, n_tokens, attended, start + n_tokens)


def chunk_beginning(start: int) -> StepWork:
    """What a chunk from that position on is for however few tokens."""
    return StepWork(forwards=1, gathered_keys=start)
