"""A client of servers that are compatible with OpenAI, and of this daemon's own routes.

http.py is the connection, models.py and chat.py ask through it and yield typed events; answer.py
gathers them, sse.py and wire.py read bytes, all three without any I/O.
"""
