"""Ollama's API: requests become Chats, and answers lines of JSON."""
