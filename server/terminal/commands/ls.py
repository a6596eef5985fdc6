"""`rootstock ls`."""

import typer
from huggingface_hub import constants

from server.model_cache import cached_models
from server.terminal.commands.on_demand import command_app
from server.terminal.tables import listing, show
from server.terminal.text import bytes_text, printable

app = command_app()


@app.command()
def ls() -> None:
    """List the models in the Hugging Face cache, the one that was used last first."""
    rows = [
        (repo.repo_id, bytes_text(repo.size_on_disk), repo.last_accessed_str)
        for repo in cached_models()
    ]
    if rows:
        show(listing(("model", "size", "last used"), rows))
    else:
        nothing = f"no models in {constants.HF_HUB_CACHE}; `rootstock pull` fetches one"
        typer.echo(printable(nothing), err=True)
