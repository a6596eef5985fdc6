"""What schemas allow is what JSON Schema allows: generated ones, and the public test suite's."""
