"""Requests read: input items as messages, and fields as a Chat."""
