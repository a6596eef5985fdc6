"""What parts of the engine cost by themselves: `python -m load_tests.bench.NAME`."""
