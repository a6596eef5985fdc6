"""`/v1/responses`: what clients send, items, the response object and the events of a stream."""
