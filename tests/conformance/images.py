"""Serves one family's checkpoint with a vision tower: `python -m tests.conformance.images pixtral
empty_directory`.
"""

import sys
import traceback
import warnings
from pathlib import Path

from pydantic import TypeAdapter

from engine.api import one_line
from tests.conformance.outcome import Outcome, Verdict
from tests.golden.imaging import Bench, Scene, load_with_images, prompts_of, request_of
from tests.vision_checkpoints import write_vision_checkpoint

ERROR_TOLERANCE = 1e-3


def attempt(family: str, parent: Path) -> Outcome:
    """Serve prompts with images, all at once and again, and compare them with one forward of the
    family's whole model.
    """
    checkpoint = write_vision_checkpoint(family, parent)
    served = load_with_images(checkpoint)
    if served.images is None:
        return Outcome(family, Verdict.REFUSED, reason=served.execution.images_refused)
    bench, error = Bench(Scene(family, checkpoint), served), 0.0
    prompts, daemon = prompts_of(bench), bench.daemon()
    for turn in ("cold", "warm"):
        named = {f"{turn} {name}": prompt for name, prompt in prompts.items()}
        said = daemon.serve(*(request_of(name, prompt) for name, prompt in named.items()))
        for name, prompt in named.items():
            found = bench.error(prompt, said[name, 0], daemon.logprobs[name, 0])
            error = max(error, found)
    if not error < ERROR_TOLERANCE:
        reason = f"log-probabilities are wrong by {error:.1e}"
        return Outcome(family, Verdict.WRONG, error=error, reason=reason)
    return Outcome(family, Verdict.SERVED, error=error)


def main(family: str, parent: str) -> None:
    """Print the outcome as JSON, the last line of the output."""
    warnings.simplefilter("ignore")
    try:
        outcome = attempt(family, Path(parent))
    except Exception as failure:  # whatever a model raises is what this run is there to find
        traceback.print_exc()
        outcome = Outcome(family, Verdict.WRONG, reason=one_line(failure))
    print(TypeAdapter(Outcome).dump_json(outcome).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
