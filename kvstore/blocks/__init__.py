"""The blocks as numbers: who refers to them, and the table of a sequence."""
