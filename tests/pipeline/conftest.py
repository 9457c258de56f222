"""A pipeline with everything around it."""

import pytest
from support.world import World


@pytest.fixture
def world() -> World:
    return World()
