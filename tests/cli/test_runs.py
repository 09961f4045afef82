"""The job files that are shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo.cli.options import parse_duration
from evo.cli.search import read_job
from evo.problem.kernel import load_kernel
from evo.search.run import check_workloads
from evo.search.samplers import sampler_names

JOBS = sorted((Path(__file__).parents[2] / "runs").glob("*.toml"))


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.stem)
def test_a_shipped_job_is_one_that_can_be_searched(path: Path) -> None:
    job = read_job(path)
    kernel = load_kernel(job["kernel"])
    assert len(check_workloads(kernel, job["target"], job["workloads"])) == len(job["workloads"])
    assert job["sampler"] in sampler_names()
    assert parse_duration(job["budget"]) > 0
