"""The commands of `rootstock`, a module each, by its name. Each has its Typer in `app`."""
