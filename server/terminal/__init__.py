"""Everything that `rootstock` does in a terminal.

commands/ has a module for each command, imported when it is asked for; client/ speaks to servers:
this daemon's API, and every other that is compatible with OpenAI's. chat/ and launch/ are what the
commands of these names are made of.
"""
