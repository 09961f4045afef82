"""A hash of the machine code alone, so that candidates that compile to the same code are timed once.

Whole binaries differ even for equal code: they contain symbol tables, line tables, notes and compiler options.
"""

import hashlib
import re
import struct
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from elftools.elf.elffile import ELFFile

_ELF = b"\x7fELF"
_EM_CUDA = 190

# Sections of a host library and of a cubin that decide what the code does. A cubin's .nv.constant0 is left
# out: it only reserves space for the launch parameters.
_CODE = re.compile(
    r"\.text|\.rodata|\.data\b|\.data\.rel\.ro|\.init_array|\.nv\.constant[1-9]|\.nv\.global\.init|\.nv\.uft"
)
_SIZE_ONLY = re.compile(r"\.bss|\.nv\.shared\.|\.nv\.global$|\.nv\.local\.")
_RELOCATIONS = re.compile(r"\.rela?\.(text|plt|dyn|data|nv\.constant[1-9]|nv\.global\.init)")

# Attributes of a cubin that change a launch though the instructions are equal (names as cuobjdump -elf prints
# them). EIATTR_MAXTHREADS and EIATTR_MAX_STACK_SIZE, say, only bound it, and are left out.
_EIATTR_REQNTID = 0x10
_EIATTR_REGCOUNT = 0x2F
_EIATTR_CTA_PER_CLUSTER = 0x3D
_EIATTR_EXPLICIT_CLUSTER = 0x3E
_EIFMT_SVAL = 0x04
"""An attribute whose 16-bit value is the length of the payload that follows."""


def code_hash(code: bytes) -> str:
    """sha256, hexadecimal, of what an ELF file (cubin or shared library) or PTX executes.

    Counted: instructions, constants, the targets of relocations, the sizes of static memory and, for a cubin,
    registers a thread and the cluster shape. Not counted: names of sections' neighbours, debug information,
    notes; of PTX comments, line tables and spacing. Its names stay: registers are numbered in order, and other names come
    from the source.
    """
    if not code.startswith(_ELF):
        return hashlib.sha256(" ".join(_without_noise(code).split()).encode()).hexdigest()
    digest = hashlib.sha256()
    for name, content in sorted(_parts(ELFFile(BytesIO(code)))):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _parts(file: Any) -> Iterator[tuple[str, bytes]]:
    is_cubin = file.header["e_machine"] in ("EM_CUDA", _EM_CUDA)
    symbols = file.get_section_by_name(".symtab")
    for section in file.iter_sections():
        name, size = section.name, section["sh_size"]
        if section["sh_type"] == "SHT_NOBITS":
            if _SIZE_ONLY.match(name):
                yield (name, str(size).encode())
        elif _RELOCATIONS.match(name):
            if size:
                yield (name, _relocations(file, section))
        elif _CODE.match(name):
            yield (name, section.data())
        elif is_cubin and name.startswith(".nv.info"):
            yield (name, _launch_attributes(section.data(), symbols))


def _relocations(file: Any, section: Any) -> bytes:
    """Offset, type and target of each. A target with an address counts as its place, not its name."""
    symbols = file.get_section(section["sh_link"])
    lines = []
    for r in section.iter_relocations():
        addend = r["r_addend"] if r.is_RELA() else 0
        target = ""
        if symbols is not None and hasattr(symbols, "get_symbol"):
            symbol = symbols.get_symbol(r["r_info_sym"])
            place = symbol["st_shndx"]
            target = f"{file.get_section(place).name}+{symbol['st_value']}" if isinstance(place, int) else symbol.name
        lines.append(f"{r['r_offset']} {r['r_info_type']} {target} {addend}")
    return "\n".join(lines).encode()


def _launch_attributes(data: bytes, symbols: Any) -> bytes:
    """The attributes listed above, of an .nv.info section: records of format, attribute, value[, payload]."""
    found, at = [], 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = b""
        if form == _EIFMT_SVAL:
            payload = data[at : at + value]
            at += value
        if attribute == _EIATTR_REGCOUNT and len(payload) == 8:
            index, registers = struct.unpack("<II", payload)  # the index moves with unrelated symbols; the name stays
            found.append(f"registers {symbols.get_symbol(index).name} {registers}")
        elif attribute in (_EIATTR_REQNTID, _EIATTR_CTA_PER_CLUSTER, _EIATTR_EXPLICIT_CLUSTER):
            found.append(f"{attribute} {payload.hex()}")
    return "\n".join(sorted(found)).encode()


_PTX_NOISE = re.compile(
    r"//[^\n]*|/\*.*?\*/|^\s*\.(?:file|loc)\b[^\n]*|^\s*\.section\s+\.debug.*?^\s*\}",
    re.DOTALL | re.MULTILINE,
)


def _without_noise(ptx: bytes) -> str:
    return _PTX_NOISE.sub(" ", ptx.decode(errors="replace"))


_INSTRUCTION_BYTES, _OPCODE = 16, 0xFFF
_PREEXIT = 0x82D
"""Opcode of griddepcontrol.launch_dependents, from sm_90 to sm_121 alike (as nvdisasm names it)."""


_ERRBAR = 0x9AB
"""Opcode that follows a memory barrier for the whole device or system, from sm_80 to sm_120 alike; not one for a block."""
_FENCES = re.compile(r"(membar|fence)\S*\.(gl|gpu|sys)\b|\.(release|acq_rel)\.(gpu|sys)\b")


def triggers_dependents(code: bytes) -> bool:
    """Whether a cubin or PTX has the instruction by which a kernel lets the next one start."""
    return _has(code, _PREEXIT) if code.startswith(_ELF) else "launch_dependents" in _without_noise(code)


def has_fence(code: bytes) -> bool:
    """Whether a cubin or PTX has a fence by which what a thread has written is there for threads of other blocks before what
    it writes next: __threadfence(), or an atomic operation that releases."""
    return _has(code, _ERRBAR) if code.startswith(_ELF) else _FENCES.search(_without_noise(code)) is not None


def _has(cubin: bytes, opcode: int) -> bool:
    texts = [s.data() for s in ELFFile(BytesIO(cubin)).iter_sections() if s.name.startswith(".text")]
    return any(
        int.from_bytes(text[at : at + 2], "little") & _OPCODE == opcode
        for text in texts
        for at in range(0, len(text), _INSTRUCTION_BYTES)
    )
