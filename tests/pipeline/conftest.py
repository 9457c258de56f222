"""A pipeline with everything around it, and its waiting room at work."""

from collections.abc import AsyncIterator

import anyio
import pytest
from support.world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.pipeline.room.run)
        tasks.start_soon(world.pipeline.first_tokens.run)
        yield world
        tasks.cancel_scope.cancel()
