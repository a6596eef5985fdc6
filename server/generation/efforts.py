"""How much a model is to think: what its template is told of an effort, and a share of the answer's
tokens where it has no efforts.
"""

import re
from collections.abc import Mapping

from server.generation.conversation import ReasoningEffort

NEAREST: Mapping[ReasoningEffort, ReasoningEffort] = {
    "minimal": "low",
    "xhigh": "high",
    "max": "xhigh",
}
"""What an effort becomes that the template does not name. Every template with efforts knows the
others.
"""

SHARES: Mapping[ReasoningEffort, float] = {
    "minimal": 0.1,
    "low": 0.2,
    "medium": 0.5,
    "high": 0.8,
    "xhigh": 0.95,
}
"""Of the tokens that may be generated, how many may be reasoning, as OpenRouter has it. `max` has
no limit.
"""

_SWITCH = re.compile(r"""\{%(?:(?!%\}).)*?(?<![\w.'"\[])thinking(?![\w'"(])""", re.DOTALL)


class Efforts:
    """What one model's chat template, given as text, reads of thinking."""

    def __init__(self, template: str) -> None:
        self._has_levels = "reasoning_effort" in template
        self._named = {effort for effort in NEAREST if re.search(rf"(['\"]){effort}\1", template)}
        self.switches = ["enable_thinking"]
        """The names of its switch, which some templates, as DeepSeek's, call `thinking`."""
        if _SWITCH.search(template):
            self.switches.append("thinking")

    def told(self, effort: ReasoningEffort) -> ReasoningEffort:
        """The effort that the template is given: the next one that it tells apart from others."""
        while effort in NEAREST and effort not in self._named:
            effort = NEAREST[effort]
        return effort

    def budget(self, effort: ReasoningEffort, max_tokens: int) -> int | None:
        """The most tokens of reasoning where the template has no levels; None for any number."""
        share = None if self._has_levels else SHARES.get(effort)
        return None if share is None else int(share * max_tokens)
