"""Work for idle steps: files of requests, which run at the lowest priority."""
