"""Work for a client that ends when the client disconnects."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import create_task_group
from anyio.abc import TaskGroup
from starlette.types import Receive

from server.errors import ClientLeft


@asynccontextmanager
async def client_waiting(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body as soon as the client disconnects, and raise ClientLeft."""
    client_left = False

    async def watch(tasks: TaskGroup) -> None:
        nonlocal client_left
        while (await receive())["type"] != "http.disconnect":
            pass
        client_left = True
        tasks.cancel_scope.cancel()

    async with task_scope() as tasks:
        tasks.start_soon(watch, tasks)
        yield
    if client_left:
        raise ClientLeft


@asynccontextmanager
async def task_scope() -> AsyncIterator[TaskGroup]:
    """A task group that is cancelled at its body's end, and raises the body's exception as it is.

    For tasks that raise nothing themselves: a plain group would wrap the body's exception.
    """
    try:
        async with create_task_group() as tasks:
            yield tasks
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None
