"""The APIs of OpenAI and Anthropic: requests read into engine requests, responses written.

Imports generation and the layers below it.
"""
