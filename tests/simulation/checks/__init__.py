"""What must hold at every moment of a simulation, each recounted from scratch or from the model."""
