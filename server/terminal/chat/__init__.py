"""`rootstock chat`: a conversation with any server that speaks OpenAI's chat completions.

screen.py is the terminal, lines.py its line editor, session.py the loop between screen and server;
conversation.py does no I/O; daemon.py is a server of the chat's own.
"""
