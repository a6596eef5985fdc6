"""`rootstock doctor --measure`: measurements in child processes, within a time limit."""
