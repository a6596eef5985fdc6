"""The command line, `rootstock`. It may import everything else of the server.

cli.py lists the commands and imports the module of the one that is called; client.py is a client of
all OpenAI-compatible servers, admin_client.py one of this daemon; endpoint.py chooses the server.
"""
