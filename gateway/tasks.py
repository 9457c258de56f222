"""Tasks that run beside a block, and end with it."""

from types import TracebackType

import anyio
from anyio.abc import TaskGroup


class TasksBeside:
    """Yields a task group that is cancelled at the end of the block.

    Such `errors` of the block are raised as they are; a task group alone would wrap them.

    A class, because of CPython 3.13: there, an error that leaves a generator's block refers to the frame that
    has thrown it in, and that to the error, and both to what the block held until the garbage collector runs.
    """

    def __init__(self, *errors: type[Exception]) -> None:
        """Raise these as they are."""
        self._errors = errors
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> TaskGroup:
        """Begin the block."""
        return await self._tasks.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Cancel the tasks, and wait for them."""
        try:
            if error is None or isinstance(error, self._errors):
                self._tasks.cancel_scope.cancel()
                await self._tasks.__aexit__(None, None, None)
                return None
            return await self._tasks.__aexit__(kind, error, traceback)
        finally:
            del error, traceback
