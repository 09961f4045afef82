"""Every target and language keeps what they promise; a new file is picked up here, and a language's source goes below."""

from evo.discovery import plugin_names
from evo.problem.loading import kernel_names, load_kernel
from evo.targets import find_language
from evo.testing.targets import LanguageSuite, TargetSuite

SOURCES = {
    "cuda_cpp": 'extern "C" __global__ void twice(float* y, long long n) { if (threadIdx.x < n) y[threadIdx.x] *= 2; }',
    "cpp": 'extern "C" void twice(float* y, long long n) { for (long long i = 0; i < n; ++i) y[i] *= 2; }',
}


class TestTargets(TargetSuite):
    names = tuple(plugin_names("target"))


class TestLanguages(LanguageSuite):
    names = tuple(plugin_names("language"))
    sources = SOURCES


def test_every_kernel_has_a_template_for_each_of_its_targets_in_a_language_of_that() -> None:
    for kernel in map(load_kernel, kernel_names()):
        for target in kernel.dtypes:
            (template,) = kernel.folder.glob(f"{target}.*")
            languages = map(find_language, plugin_names("language"))
            assert template.name in [f"{target}{x.suffix}.j2" for x in languages if target in x.targets]
