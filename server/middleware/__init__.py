"""The middleware of the application, in the order of stack.py."""
