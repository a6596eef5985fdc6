"""A request as the engine thread takes it in: what takes time has been done on another one."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.constraints.guide import FreeGuide, Guide, GuideFactory
from engine.scheduling.validation import Limits, validate
from engine.types.request import Request
from kvstore.digest import Digest
from kvstore.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that can be served. Of prompts and guides each of its n sequences has its own."""

    request: Request
    prompts: tuple[Tokens, ...]
    guides: tuple[Guide, ...]
    names: tuple[Digest, ...] = ()  # of the prompt's blocks, where they may be on disk


def unnamed(request: Request) -> tuple[Digest, ...]:
    """For engines without a disk cache."""
    return ()


def prepare(
    request: Request,
    limits: Limits,
    new_guide: GuideFactory = FreeGuide,
    names: Callable[[Request], tuple[Digest, ...]] = unnamed,
) -> Submission:
    """Takes as long as the client has chosen: prompt and n. Raises InvalidRequest."""
    validate(request, limits)
    packed = Tokens(request.prompt)
    return Submission(
        request,
        prompts=tuple(packed.copy() for _ in range(request.n)),
        guides=tuple(new_guide() for _ in range(request.n)),
        names=names(request),
    )
