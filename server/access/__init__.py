"""Access control: API keys and their limits, allowed hosts and web origins.

Imports http and the layers below it.
"""
