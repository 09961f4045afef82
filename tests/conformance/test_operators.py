"""Every operator keeps what operators promise; a new file in evo/search/operators is picked up by its name."""

from evo.discovery import plugin_names
from evo.testing.operators import OperatorSuite


class TestOperators(OperatorSuite):
    names = tuple(plugin_names("operator"))
