"""cohere: rerank, as its first and its second version ask."""

from typing import Any

import cohere
from cohere.errors import BadRequestError, NotFoundError

from tests.clients.checks import Daemon, main, raised
from tests.clients.scenario import LIBRARY, UNKNOWN, found_in

TEXTS = list(LIBRARY.values())


def rerank(daemon: Daemon) -> str:
    return _ranked(daemon, cohere.ClientV2(base_url=daemon.root, api_key="none"))


def rerank_as_its_first_version(daemon: Daemon) -> str:
    return _ranked(daemon, cohere.Client(base_url=daemon.root, api_key="none"))


def errors(daemon: Daemon) -> str:
    client = cohere.ClientV2(base_url=daemon.root, api_key="none")
    asked = {"query": "a cat", "documents": TEXTS}
    raised(NotFoundError, lambda: client.rerank(model=UNKNOWN, **asked))
    error = raised(BadRequestError, lambda: client.rerank(model=daemon.model, **asked, top_n=-1))
    assert "top_n" in str(error)
    return str(error)


def _ranked(daemon: Daemon, client: Any) -> str:
    def search(query: str) -> str:
        answer = client.rerank(model=daemon.model, query=query, documents=TEXTS, top_n=2)
        best, second = answer.results
        assert best.relevance_score >= second.relevance_score
        return TEXTS[int(best.index)]

    return found_in(search)


if __name__ == "__main__":
    main(globals())
