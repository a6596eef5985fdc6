"""Text to tokens and back: the tokenizer, chat templates, replayed answers."""
