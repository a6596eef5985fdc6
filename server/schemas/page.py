"""What the page is told beside what the API says."""

from pydantic import BaseModel


class Agents(BaseModel):
    """The names of the agents that `rootstock launch` can start."""

    agents: list[str]
