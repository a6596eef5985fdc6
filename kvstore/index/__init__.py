"""The prefix index: which blocks hold which tokens, what is evicted first, what is in flight."""
