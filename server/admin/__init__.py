"""The routes that belong to no dialect: health, models, metrics, administration and the dashboard.

Each module is a group of paths with its JSON. JSON that the terminal reads as well is in
server/admin_schema.py.
"""
