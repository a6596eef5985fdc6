"""An example body of each request, for `/openapi.json`. Each is answered with 200."""

from collections.abc import Mapping

from pydantic import BaseModel

from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.embeddings import EmbeddingRequest
from server.schemas.messages.request import CountTokensRequest, MessagesRequest
from server.schemas.ollama.embed import OllamaEmbeddingsRequest, OllamaEmbedRequest
from server.schemas.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from server.schemas.prompt import PromptOrChat
from server.schemas.rerank import RerankRequest, ScoreRequest
from server.schemas.responses.request import InputTokensRequest, ResponsesRequest
from server.schemas.tokens import DetokenizeRequest, TokenizeRequest

_MESSAGES = [{"role": "user", "content": "What is a radix tree?"}]

EXAMPLES: Mapping[type[BaseModel], Mapping[str, object]] = {
    ChatRequest: {
        "messages": [{"role": "system", "content": "Answer in one sentence."}, *_MESSAGES],
        "max_tokens": 100,
    },
    CompletionRequest: {"prompt": "A radix tree is", "max_tokens": 32, "temperature": 0},
    ResponsesRequest: {"input": "What is a radix tree?", "max_output_tokens": 100},
    InputTokensRequest: {"input": "What is a radix tree?"},
    MessagesRequest: {"max_tokens": 100, "messages": _MESSAGES},
    CountTokensRequest: {"messages": _MESSAGES},
    OllamaChatRequest: {"messages": _MESSAGES, "stream": False, "options": {"num_predict": 100}},
    OllamaGenerateRequest: {"prompt": "What is a radix tree?", "options": {"num_predict": 100}},
    OllamaEmbedRequest: {"input": ["What is a radix tree?", "What is a block?"]},
    OllamaEmbeddingsRequest: {"prompt": "What is a radix tree?"},
    OllamaShowRequest: {"model": ""},
    OllamaModelRequest: {"model": "mlx-community/Qwen3-4B-4bit"},
    OllamaPullRequest: {"model": "mlx-community/Qwen3-4B-4bit"},
    PromptOrChat: {"messages": _MESSAGES},
    TokenizeRequest: {"prompt": "A radix tree is"},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
    EmbeddingRequest: {"input": ["What is a radix tree?", "A tree that shares beginnings."]},
    RerankRequest: {
        "query": "What is a radix tree?",
        "documents": ["A tree that shares beginnings.", "A plant with a trunk."],
    },
    ScoreRequest: {
        "text_1": "What is a radix tree?",
        "text_2": ["A tree that shares beginnings.", "A plant with a trunk."],
    },
}
"""Without `model`, which then is the one that is served."""
