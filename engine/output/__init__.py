"""From sampled tokens to text, and to the end of a sequence."""
