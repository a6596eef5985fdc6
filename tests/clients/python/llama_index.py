"""llama-index: a vector index over embeddings of an OpenAI-like server."""

from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

from tests.clients.checks import Daemon, main
from tests.clients.scenario import LIBRARY, found_in


def small_index(daemon: Daemon) -> str:
    embeddings = OpenAILikeEmbedding(
        model_name=daemon.model, api_base=daemon.base_url, api_key="none", max_retries=0
    )
    nodes = [TextNode(text=text) for text in LIBRARY.values()]
    found = VectorStoreIndex(nodes, embed_model=embeddings).as_retriever(similarity_top_k=1)
    return found_in(lambda query: found.retrieve(query)[0].get_content())


if __name__ == "__main__":
    main(globals())
