"""The JSON bodies of requests and responses, as pydantic models. Imports nothing of the server."""
