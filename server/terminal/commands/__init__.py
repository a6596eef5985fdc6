"""The commands of `rootstock`, a module for each. Its Typer is `app`."""
