"""One file for each API that agents speak: a conversation as its body, its stream as an answer."""
