"""Anthropic's Messages API: requests become Chats, and answers content blocks."""
