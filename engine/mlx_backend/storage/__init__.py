"""The tensors behind blocks, windows and states."""
