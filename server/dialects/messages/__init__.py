"""Anthropic's Messages API: requests become ChatRequests, and answers content blocks."""
