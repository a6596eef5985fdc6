"""OpenAI's Responses API: a request becomes a Chat, and its answer a list of items."""
