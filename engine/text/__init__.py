"""Text to token ids and back: the tokenizer, chat templates, control tokens, replays."""
