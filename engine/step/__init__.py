"""What the scheduler and the backend say to each other: plain values."""
