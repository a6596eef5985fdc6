"""What a request says: its items and fields as a chat request's."""
