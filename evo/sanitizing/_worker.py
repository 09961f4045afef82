"""Makes the calls of a job in a process that a sanitizer watches: python _worker.py cuda|cpu FOLDER CODE FILL

Alone in that process: no PyTorch, whose own kernels and allocator a sanitizer would look at too, and nothing of
evo. Every tensor has an allocation of its own, no byte larger than it, so that the first element beyond it is
somebody else's. FILL (0 to 255) is what outputs hold before a call; "none" leaves them as they were allocated.
Exit code 3, with one line on stderr, where the device refuses something.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

_LEAD_FILL = 0xA5
"""What lies before a tensor that starts past an aligned address."""

_REFUSED = 3


class _Cpu:
    """Candidates are shared libraries; memory is malloc's, which the sanitizer's runtime has replaced."""

    def __init__(self, code: Path) -> None:
        # Candidates name no OpenMP runtime: they bind to what the process offers.
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
        self._libc = ctypes.CDLL(None)
        self._library = ctypes.CDLL(str(code), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self._held: list[int] = []

    def allocate(self, size: int) -> int:
        address = ctypes.c_void_p()
        error = self._libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(64), ctypes.c_size_t(size))
        found = address.value
        if error or found is None:
            _refuse(f"no memory for {size} bytes")
        self._held.append(found)
        return found

    def fill(self, address: int, byte: int, size: int) -> None:
        ctypes.memset(address, byte, size)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def call(self, call: dict[str, Any], values: list[tuple[object, Any]]) -> None:
        function = self._library[call["entry"]]
        function.restype = None
        function.argtypes = [kind for _, kind in values]
        function(*(value for value, _ in values))

    def release(self) -> None:
        for address in self._held:
            self._libc.free(ctypes.c_void_p(address))
        self._held.clear()


class _Cuda:
    """Candidates are modules of GPU 0's primary context; memory is the driver's."""

    def __init__(self, code: Path) -> None:
        from cuda.bindings import driver

        self._api = driver
        self._expect(driver.cuInit(0), "starting the driver")
        device = self._expect(driver.cuDeviceGet(0), "opening the GPU")
        context = self._expect(driver.cuDevicePrimaryCtxRetain(device), "opening the GPU")
        self._expect(driver.cuCtxSetCurrent(context), "opening the GPU")
        self._module = self._expect(driver.cuModuleLoadData(code.read_bytes() + b"\0"), "loading the candidate")
        self._held: list[int] = []

    def _expect(self, result: tuple[Any, ...], doing: str) -> Any:
        error, *values = result
        if error:
            _refuse(f"{doing}: {getattr(error, 'name', error)}")
        return values[0] if values else None

    def allocate(self, size: int) -> int:
        address = int(self._expect(self._api.cuMemAlloc(size), f"allocating {size} bytes"))
        self._held.append(address)
        return address

    def fill(self, address: int, byte: int, size: int) -> None:
        self._expect(self._api.cuMemsetD8(address, byte, size), "filling memory")

    def write(self, address: int, data: bytes) -> None:
        held = ctypes.create_string_buffer(data, len(data))
        self._expect(self._api.cuMemcpyHtoD(address, ctypes.addressof(held), len(data)), "copying an input")

    def read(self, address: int, size: int) -> bytes:
        held = ctypes.create_string_buffer(size)
        self._expect(self._api.cuMemcpyDtoH(ctypes.addressof(held), address, size), "copying a result")
        return held.raw

    def call(self, call: dict[str, Any], values: list[tuple[object, Any]]) -> None:
        api, entry, smem, cluster = self._api, call["entry"], call["smem_bytes"], call["cluster"]
        addresses = [v for v, kind in values if kind is ctypes.c_void_p and isinstance(v, int)]
        unaligned = any(address & (call["alignment"] - 1) for address in addresses)
        if unaligned:  # as `evo.problem.kernel.Launch` has it
            entry, smem, cluster = f"{entry}_unaligned", 0, 1
        doing = f"launching {entry}"
        function = self._expect(api.cuModuleGetFunction(self._module, entry.encode()), f"looking up {entry}")
        attribute = api.CUfunction_attribute
        if smem:
            key = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._expect(api.cuFuncSetAttribute(function, key, smem), doing)
        if cluster > 8:  # the largest that needs no permission
            key = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._expect(api.cuFuncSetAttribute(function, key, 1), doing)
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = call["grid"]
        config.blockDimX, config.blockDimY, config.blockDimZ = call["block"]
        config.sharedMemBytes, config.hStream = smem, 0
        attributes = []
        if cluster > 1:
            shape = api.CUlaunchAttribute()
            shape.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = cluster, 1, 1
            attributes.append(shape)
        config.attrs, config.numAttrs = attributes, len(attributes)
        held = [kind(value) for value, kind in values]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        self._expect(api.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0), doing)
        self._expect(api.cuCtxSynchronize(), f"running {entry}")

    def release(self) -> None:
        for address in self._held:
            self._expect(self._api.cuMemFree(address), "freeing memory")
        self._held.clear()


def _refuse(sentence: str) -> NoReturn:
    print(f"evo: {sentence}", file=sys.stderr, flush=True)
    os._exit(_REFUSED)


def _run(device: _Cpu | _Cuda, folder: Path, call: dict[str, Any], fill: int | None) -> None:
    values: list[tuple[object, Any]] = []
    results: list[tuple[Path, int, int]] = []
    for a in call["arguments"]:
        if a["kind"] == "absent":
            values.append((None if isinstance(device, _Cpu) else 0, ctypes.c_void_p))
        elif a["kind"] == "integer":
            values.append((a["value"], ctypes.c_int64))
        elif a["kind"] == "float":
            values.append((a["value"], ctypes.c_float))
        else:
            lead, size = a["lead"], a["bytes"]
            base = device.allocate(lead + size)
            if lead:
                device.fill(base, _LEAD_FILL, lead)
            if a["data"] is not None:
                device.write(base + lead, (folder / a["data"]).read_bytes())
            elif fill is not None:
                device.fill(base + lead, fill, size)
            values.append((base + lead, ctypes.c_void_p))
            results.append((folder / a["result"], base, lead + size))
    device.call(call, values)
    for path, base, size in results:
        path.write_bytes(device.read(base, size))
    device.release()


def main() -> None:
    kind, name, code, fill = sys.argv[1:]
    folder = Path(name)
    device = _Cuda(Path(code)) if kind == "cuda" else _Cpu(Path(code))
    for call in json.loads((folder / "job.json").read_text()):
        (folder / "running").write_text(call["name"])
        _run(device, folder, call, None if fill == "none" else int(fill))
    (folder / "running").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
