"""What plug-ins promise, as tests for their authors: pytest runs a class that names them.

    from evo.testing.samplers import SamplerSuite

    class TestMine(SamplerSuite):
        names = ("mine",)

One suite a kind: `samplers`, `operators`, `targets` (languages, too), `executors`, `exporters`. They need pytest.
"""

from typing import ClassVar

import pytest

for kind in ("samplers", "operators", "targets", "executors", "exporters"):
    pytest.register_assert_rewrite(f"{__name__}.{kind}")


class Suite:
    """names: of the plug-ins that each test with a `name` is run for."""

    names: ClassVar[tuple[str, ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self.names, scope="module")
