"""What the server keeps of requests and of the last minutes."""
