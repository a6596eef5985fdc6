"""Which blocks hold which tokens, which of them go first, and what is on its way there."""
