"""How families of models write calls, a file for each family."""
