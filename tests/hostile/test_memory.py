"""Whatever stands in the fields of a body, what is held of it while its answer is written is
counted in the budgets of the daemon.
"""

import random

import pytest

from tests.hostile.held import held_daemon

SEED = 67
N_ACCEPTED = 25
ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    *("/api/chat", "/api/generate", "/api/embed", "/v1/embeddings", "/rerank", "/score"),
)


def test_what_is_held_of_a_body_while_its_answer_is_written_is_counted() -> None:
    n_accepted = 0
    with held_daemon() as daemon:
        attacks = [one for one in daemon.attacks if one.route in ROUTES]
        random.Random(SEED).shuffle(attacks)
        for attack in attacks:
            found = daemon.holding(attack)
            if found.is_accepted:
                assert found.passed, (attack.name, found)
                n_accepted += 1
            if n_accepted == N_ACCEPTED:
                return
    pytest.fail(f"only {n_accepted} bodies were accepted")
