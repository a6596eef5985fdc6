"""The JSON of the routes that belong to no dialect. Imports nothing of the server."""
