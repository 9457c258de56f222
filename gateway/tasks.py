"""Tasks that run beside a block, and end with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def tasks_beside(*errors: type[Exception]) -> AsyncIterator[TaskGroup]:
    """Yield a task group that is cancelled at the end of the block.

    Such `errors` of the block are raised as they are; a task group alone would wrap them.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except errors as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
