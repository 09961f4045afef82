"""Every sampler keeps what samplers promise; a new file in evo/search/samplers is picked up by its name."""

from evo.discovery import plugin_names
from evo.testing.samplers import SamplerSuite


class TestSamplers(SamplerSuite):
    names = tuple(plugin_names("sampler"))
