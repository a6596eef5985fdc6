"""KV events: which blocks are cached, published for routers in vLLM's format."""
