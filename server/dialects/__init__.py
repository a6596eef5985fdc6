"""The APIs of OpenAI and Anthropic, a module or folder each: requests read, responses written."""
