"""The routes that belong to no dialect: health, models, metrics, administration and the dashboard.

Each module is a group of paths. Imports what the dialects share, and the layers below them.
"""
