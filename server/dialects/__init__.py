"""The APIs that clients speak: OpenAI's chat completions (`chat`), text completions, Responses, and
embeddings with ranking; Anthropic's Messages; Ollama's API; and vLLM's routes of prompts and tokens
(`tokens`). Each is a package, or a module.

`schema` has the JSON, `read` makes requests of bodies, `routes` has the URLs, and `write`, where it
is long, makes bytes of answers. No dialect imports another one. What they share is in the modules
here.
"""
