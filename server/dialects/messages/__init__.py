"""Anthropic's Messages: requests read into a ChatRequest, answers as content blocks."""
