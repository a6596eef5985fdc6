"""`rootstock ls`."""

from server.terminal.commands.on_demand import command_app
from server.terminal.model_cache import cached_models
from server.terminal.tables import listing, show
from server.terminal.text import bytes_text

app = command_app()


@app.command()
def ls() -> None:
    """List the models in the Hugging Face cache, the one that was used last first."""
    rows = [
        (repo.repo_id, bytes_text(repo.size_on_disk), repo.last_accessed_str)
        for repo in cached_models()
    ]
    show(listing(("model", "size", "last used"), rows))
