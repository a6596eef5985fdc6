"""Several models in one daemon: within their budget, through deaths, and swapped."""
