"""What all dialects share: conversations, prompts, engine requests, and answers made of events."""
