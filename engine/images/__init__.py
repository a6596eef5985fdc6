"""Images of prompts: read in a child process, and given the tokens that stand for them.

`layout` says how a checkpoint's images stand in a prompt, and imports no Pillow. `queue` is the
engine's end: it gives images to `worker`, the only process in which images are decoded.
"""
