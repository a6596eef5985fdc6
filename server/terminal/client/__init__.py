"""A client of OpenAI-compatible servers, and of this daemon's admin routes.

http.py is the connection; models.py, chat.py and admin.py send requests through it. answer.py
collects typed events, sse.py and wire.py parse bytes, all three without I/O.
"""
