"""What every dialect comes down to: prompts, engine requests, and answers read from events."""
