"""Images of requests: their bytes, decoded, fetched and kept in files."""
