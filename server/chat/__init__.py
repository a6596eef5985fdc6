"""`rootstock chat`: a terminal client for any server that speaks OpenAI's chat completions.

client.py talks HTTP and yields typed events; answer.py and conversation.py gather them without any
I/O; screen.py is the terminal, session.py the loop between them, daemon.py a server of its own.
"""
