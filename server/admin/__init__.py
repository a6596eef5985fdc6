"""The routes that belong to no dialect: health, models, metrics, administration and the dashboard.

Each module is a group of paths, and has the JSON that no other module needs. What the terminal
reads, too, is in server/schemas.py.
"""
