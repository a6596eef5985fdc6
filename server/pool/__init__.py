"""Several models behind one door: which are loaded, and which must go."""
