"""The HTTP routes, a module for each group of paths, and delivery.py, which sends responses.

Imports service.py and the layers below it.
"""
