"""The engine thread: its loop, the steps in flight, its inbox, and the engine around it."""
