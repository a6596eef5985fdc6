"""The middleware of the application, in the order of stack.py.

Imports metrics, dialects, access and the layers below them.
"""
