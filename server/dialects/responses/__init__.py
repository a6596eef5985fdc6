"""OpenAI's Responses: a request becomes a chat request, its answer a list of items."""
