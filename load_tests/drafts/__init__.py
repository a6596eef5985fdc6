"""What drafts bring and cost: loads with and without them, in one daemon."""
