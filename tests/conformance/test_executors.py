"""Every executor keeps what executors promise; a new executor file is picked up here."""

import pytest

from evo.discovery import plugin_names
from evo.errors import UnknownNameError
from evo.executors import find_executor
from evo.testing.executors import ExecutorSuite


class TestExecutors(ExecutorSuite):
    names = tuple(plugin_names("executor"))


def test_an_unknown_executor_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UnknownNameError, match="unknown executor 'lokal'; did you mean local"):
        find_executor("lokal")
