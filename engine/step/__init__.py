"""What the scheduler and the backend exchange: plans, results, and the runner's protocol."""
