"""What outlives its request: stored responses, and those that are made in the background."""
