"""What every target and every language promises, as far as it can be seen without the device."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from evo.errors import CompileError, DeviceError
from evo.evaluation import Binary
from evo.problem.kernel import Launch
from evo.problem.render import Source
from evo.targets import Language, Target, cached_build, find_language, find_target
from evo.testing import Suite

LAUNCH = Launch(grid=(1, 1, 1), block=(64, 1, 1))


class TargetSuite(Suite):
    """What every target promises, as far as it can be seen without its device."""

    @pytest.fixture
    def target(self, name: str) -> Target:
        return find_target(name)

    def test_a_target_is_found_by_its_name_and_compiles_its_usual_language(self, target: Target) -> None:
        assert target is find_target(target.name)
        assert target.name in find_language(target.language).targets
        assert target.compiler() == find_language(target.language).compiler()
        assert target.owns(target.example_arch)
        assert target.machine_code(target.example_arch) == target.example_arch

    def test_a_device_is_described_or_its_absence_explained_with_a_remedy(self, target: Target) -> None:
        try:
            info = target.device()
        except DeviceError:
            with pytest.raises(DeviceError, match=r"run with --target|install "):
                target.device()
        else:
            assert next(iter(target.devices().values())) == info.name
            assert target.limits(info.arch).arch == info.arch

    def test_an_unknown_architecture_has_no_limits_and_nobody_says_that_its_code_runs(self, target: Target) -> None:
        for ask in (target.limits, target.runs):
            with pytest.raises(DeviceError, match="z80000"):
                ask("z80000")

    def test_pytorch_computes_as_it_does_where_no_other_device_is_stood_in_for(self, target: Target) -> None:
        import torch

        with target.torch_as_on(""):
            assert torch.ones(2).sum() == 2

    def test_code_for_the_device_present_runs_here(self, target: Target) -> None:
        try:
            arch = target.device().arch
        except DeviceError:
            with pytest.raises(DeviceError):
                target.runs(target.example_arch)
        else:
            assert target.runs(arch) == ""

    def test_limits_are_known_without_the_device(self, target: Target) -> None:
        limits = target.limits(target.example_arch)
        assert limits.arch == target.example_arch
        assert limits.multiprocessors >= 1
        assert limits.cache_bytes > 0


def target_of(language: Language) -> Target:
    return find_target(language.targets[0])


def arch_of(language: Language) -> str:
    return target_of(language).example_arch


class LanguageSuite(Suite):
    """What every language promises. sources: by the language's name, one with an entry point `twice` that doubles numbers:
    of float* y and long long n, on a device by one block of 64 threads, with `*= 2` in it."""

    sources: ClassVar[Mapping[str, str]]

    @pytest.fixture
    def language(self, name: str) -> Language:
        return find_language(name)

    def source_of(self, language: Language, text: str | None = None) -> Source:
        text = self.sources[language.name] if text is None else text
        return Source(text=text, target=language.targets[0], language=language.name, entry="twice")

    def built(self, language: Language, folder: Path, text: str | None = None) -> Binary:
        folder.mkdir(exist_ok=True)
        return language.compile(self.source_of(language, text), arch_of(language), folder)

    def test_a_compiler_has_a_name_with_a_version_that_stays(self, language: Language) -> None:
        assert any(c.isdigit() for c in language.compiler())
        assert language.compiler() == language.compiler()

    def test_machine_code_is_equal_for_equal_code_alone(self, language: Language, tmp_path: Path) -> None:
        text = self.sources[language.name]
        plain = self.built(language, tmp_path / "plain")
        commented = self.built(language, tmp_path / "commented", f"// a comment\n{text}")
        thrice = self.built(language, tmp_path / "thrice", text.replace("*= 2", "*= 3"))
        assert len(plain.code_hash) == 64
        assert commented.code_hash == plain.code_hash
        assert thrice.code_hash != plain.code_hash

    def test_compiling_loads_no_torch(self, language: Language, tmp_path: Path) -> None:
        source = self.source_of(language)
        program = "\n".join(
            [
                "import sys; from pathlib import Path; from evo.problem.render import Source",
                "from evo.targets import compile_source",
                f"source = Source(**{vars(source)!r})",
                f"assert compile_source(source, {arch_of(language)!r}, Path({str(tmp_path)!r})).code",
                "assert 'torch' not in sys.modules",
            ]
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    def test_a_source_that_does_not_compile_is_an_error_with_the_line(self, language: Language, tmp_path: Path) -> None:
        with pytest.raises(CompileError, match=r"candidate\.\w+[(:]2\b") as caught:
            self.built(language, tmp_path, "\nint broken(;\n" + self.sources[language.name])
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), CompileError)

    def test_an_unknown_flag_is_a_compile_error_that_names_it(self, language: Language, tmp_path: Path) -> None:
        source = replace(self.source_of(language), flags=("--no-such-flag",))
        with pytest.raises(CompileError, match="--no-such-flag"):
            language.compile(source, arch_of(language), tmp_path)

    def test_a_binary_crosses_processes_and_the_cache_unchanged(self, language: Language, tmp_path: Path) -> None:
        binary, _, _ = cached_build(tmp_path, language, self.source_of(language), arch_of(language))
        assert pickle.loads(pickle.dumps(binary)) == binary
        assert cached_build(tmp_path, language, self.source_of(language), arch_of(language)).binary == binary

    def test_occupancy_is_a_share_or_nothing(self, language: Language, tmp_path: Path) -> None:
        share = language.occupancy(self.built(language, tmp_path), LAUNCH, target_of(language).limits(arch_of(language)))
        assert share is None or 0 < share <= 1

    def test_an_open_device_runs_what_was_compiled_and_replays_it(self, language: Language, tmp_path: Path) -> None:
        import torch

        try:
            arch = target_of(language).device().arch
            session = target_of(language).open()
        except DeviceError as error:
            pytest.skip(str(error))
        binary = language.compile(self.source_of(language), arch, tmp_path)
        launch = replace(LAUNCH, entry=str(binary.launch.get("entry", "")))
        loaded = session.load(binary, launch.entry or "twice")
        y = torch.ones(64, device=session.device)
        loaded((y, 63), launch)
        session.synchronize()
        assert y.tolist() == [2.0] * 63 + [1.0]

        z = torch.ones(64, device=session.device)
        replay = session.record([lambda: loaded((z, 64), launch)] * 3)
        z.fill_(1.0)
        assert replay.run_us() > 0
        session.synchronize()
        assert replay.calls == 3
        assert z.tolist() == [8.0] * 64
        assert all(isinstance(v, float) for v in session.clocks().values())
        replay.close()
        loaded.close()
