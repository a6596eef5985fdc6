"""Requests read: input items as messages, and fields as those of a ChatRequest."""
