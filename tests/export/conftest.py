"""Packages to try out, as the tests of the run time have them."""

from tests.cli.conftest import here
from tests.runtime.conftest import _no_launcher_of_before, exported, use

__all__ = ["_no_launcher_of_before", "exported", "here", "use"]
