"""Every sampler keeps what samplers promise; a new file in evo/search/samplers is picked up by its name."""

from evo.search.samplers import sampler_names
from evo.testing.samplers import SamplerSuite


class TestSamplers(SamplerSuite):
    names = tuple(sampler_names())
