"""The guard for the memory of the whole machine, which other programs use, too."""
