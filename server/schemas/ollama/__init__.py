"""The JSON of Ollama's API."""
