"""OpenAI's Responses API: a request becomes a ChatRequest, and its answer a list of items."""
