"""The command line, `rootstock`. It may import everything else of the server.

commands/ has a module for each command, imported when the command is called; client/ is a client of
this daemon and of all OpenAI-compatible servers. chat/, launch/ and top/ implement the commands of
these names.
"""
