"""The one name that an installed Rootstock has in site-packages. What it does is in `__main__`."""
