"""Every operator keeps what operators promise; a new file in evo/search/operators is picked up by its name."""

from evo.search.operators import operator_names
from evo.testing.operators import OperatorSuite


class TestOperators(OperatorSuite):
    names = tuple(operator_names())
