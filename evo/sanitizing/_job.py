"""What a sanitized process is to do: gate cases written to a folder, and its outputs judged as the gate does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo.executors import BuildRequest
from evo.measure.gate import Expected, Gate, allocate_outputs, argument_values, case_seed, compare, extent
from evo.problem.kernel import Case, Kernel, Launch, Tensors
from evo.targets import Session

if TYPE_CHECKING:
    import torch

__all__ = ["Job", "small_cases"]

_SMALL_BYTES = 8 << 20
_AT_LEAST = 4
_LEAD_FILL = 0xA5


def small_cases(kernel: Kernel, request: BuildRequest) -> list[Case]:
    """Gate cases worth running a hundred times slower: every small problem and alignment once, whatever its data.

    Small is what moves at most 8 MiB; the smallest four are taken in any case.
    """
    distinct: dict[tuple[object, int], Case] = {}
    for case in kernel.cases(request.target, request.workload):
        if all(size for _, size in case.workload.dims):
            distinct.setdefault((case.workload, case.offset), case)
    ranked = sorted(distinct.values(), key=lambda c: kernel.cost(c.workload).bytes)
    few = ranked[:_AT_LEAST] + [c for c in ranked[_AT_LEAST:] if kernel.cost(c.workload).bytes <= _SMALL_BYTES]
    return [c for c in distinct.values() if c in few]


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """A case with the data that the gate would draw for it. Of the outputs only shape and dtype are used."""

    case: Case
    inputs: Tensors
    outputs: dict[str, torch.Tensor]
    expected: tuple[Expected, ...]

    def lead_bytes(self, name: str) -> int:
        """Between the beginning of a tensor's memory and the tensor."""
        tensor = self.outputs.get(name, self.inputs.get(name))
        assert tensor is not None
        return self.case.offset * tensor.itemsize


class Job:
    """A folder of inputs with job.json, which says what is to be called on them."""

    def __init__(self, kernel: Kernel, request: BuildRequest, session: Session, seed: int, folder: Path) -> None:
        self.folder = folder
        self._kernel, self._request, self._session = kernel, request, session
        gate = Gate(kernel, request.target, session, seed)
        self._calls: list[tuple[str, _Problem]] = []
        written: list[dict[str, Any]] = []
        for number, case in enumerate(small_cases(kernel, request)):
            problem = self._draw(gate, case, case_seed(seed, case))
            for tensor_name, tensor in problem.inputs.items():
                if tensor is not None:
                    (folder / f"{number}-{tensor_name}.in").write_bytes(_to_bytes(tensor))
            for name, launch in self._launches(case):
                self._calls.append((name, problem))
                written.append(self._call(len(written), number, name, launch, problem))
        (folder / "job.json").write_text(json.dumps(written))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._calls]

    def _draw(self, gate: Gate, case: Case, seed: int) -> _Problem:
        import torch

        device = self._session.device
        generator = torch.Generator(device=device).manual_seed(seed)
        inputs = self._kernel.inputs(case.workload, case.data, generator)
        return _Problem(
            case=case,
            inputs=inputs,
            outputs=allocate_outputs(self._kernel, case.workload, device),
            expected=gate.expect(inputs, case.workload),
        )

    def _launches(self, case: Case) -> Iterator[tuple[str, Launch]]:
        """As on this device; and, for a grid that depends on it, as on one of a single multiprocessor, where every
        block has to come back for more work."""
        limits, parameters = self._session.limits, self._request.genome.parameters
        own = self._kernel.launch(self._request.target, parameters, case.workload, limits)
        few = self._kernel.launch(
            self._request.target, parameters, case.workload, replace(limits, multiprocessors=1)
        )
        yield case.name, own
        if few != own:
            yield f"{case.name}, few blocks", few

    def _call(self, call: int, case: int, name: str, launch: Launch, problem: _Problem) -> dict[str, Any]:
        values = argument_values(self._kernel, problem.case.workload, problem.inputs, problem.outputs)
        arguments: list[dict[str, Any]] = []
        for a, value in zip(self._kernel.arguments, values, strict=True):
            if a.kind == "scalar":
                arguments.append({"kind": "float" if isinstance(value, float) else "integer", "value": value})
            elif value is None:
                arguments.append({"kind": "absent"})
            else:
                tensor: Any = value
                arguments.append(
                    {
                        "kind": "tensor",
                        "bytes": extent(tensor) * tensor.element_size(),
                        "lead": problem.lead_bytes(a.name),
                        "data": f"{case}-{a.name}.in" if a.kind == "input" else None,
                        "result": f"{call}-{a.name}.out",
                    }
                )
        return {
            "name": name,
            "entry": self._kernel.entry,
            "grid": launch.grid,
            "block": launch.block,
            "smem_bytes": launch.smem_bytes,
            "cluster": launch.cluster,
            "alignment": launch.alignment,
            "arguments": arguments,
        }

    def clear(self) -> None:
        """Forgets the results of a run."""
        for path in [*self.folder.glob("*.out"), self.folder / "running"]:
            path.unlink(missing_ok=True)

    @property
    def running(self) -> str:
        """The case that the process ended at; empty if it came to its end."""
        path = self.folder / "running"
        return path.read_text() if path.exists() else ""

    @property
    def finished(self) -> bool:
        """Whether every call has left its results."""
        return all((self.folder / f"{c}-{name}.out").exists() for c, (_, p) in enumerate(self._calls) for name in p.outputs)

    def outputs(self) -> dict[str, bytes]:
        """What was written, without what lies before it, by case and output."""
        return {
            f"{name}: {output}": self._result(call, output)[problem.lead_bytes(output) :]
            for call, (name, problem) in enumerate(self._calls)
            for output in problem.outputs
            if (self.folder / f"{call}-{output}.out").exists()
        }

    def refusals(self) -> list[str]:
        """What the gate has against the results, a sentence a case; cases that did not end are left out."""
        return [
            f"{name}: {reason}"
            for call, (name, problem) in enumerate(self._calls)
            if (reason := self._refusal(call, problem))
        ]

    def _refusal(self, call: int, problem: _Problem) -> str:
        for name, tensor in problem.inputs.items():
            if tensor is None or not (data := self._result(call, name)):
                continue
            if data[problem.lead_bytes(name) :] != _to_bytes(tensor):
                return f"input {name} was changed"
        for expected in problem.expected:
            if not (data := self._result(call, expected.name)):
                continue
            lead = problem.lead_bytes(expected.name)
            if data[:lead] != bytes([_LEAD_FILL]) * lead:
                return f"memory outside output {expected.name} was written"
            _, reason = compare(_from_bytes(data[lead:], problem.outputs[expected.name]), expected)
            if reason:
                return f"{expected.name}: {reason}"
        return ""

    def _result(self, call: int, name: str) -> bytes:
        path = self.folder / f"{call}-{name}.out"
        return path.read_bytes() if path.exists() else b""


def _to_bytes(tensor: torch.Tensor) -> bytes:
    """From its first element to its last, and what lies between them."""
    import torch

    return tensor.as_strided((extent(tensor),), (1,)).cpu().view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=like.dtype).as_strided(like.shape, like.stride()).to(like.device)
