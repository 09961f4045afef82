"""What can be counted in compiled code without its device: sizes, instructions, kinds of instructions."""

from __future__ import annotations

import re
import struct
from collections import Counter
from io import BytesIO
from typing import Any

__all__ = ["code_statistics", "is_ptx"]

_CUDA_MACHINE = ("EM_CUDA", 190)
_SASS_BYTES = 16
"""Of an instruction, from Volta on."""
_PADDING = struct.Struct("<H")
_SASS_NOP = 0x918
_SASS_OPCODE = 0xFFF
"""The low 12 bits of an instruction say what it is (as nvdisasm prints them beside its text)."""
_PTX_LINE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9]*)(?:\.[\w:.]+)?(?:\s[^;{]*)?;", re.MULTILINE)
_PTX_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def is_ptx(code: bytes) -> bool:
    return not code.startswith(b"\x7fELF") and b".version" in code[:4096]


def code_statistics(code: bytes) -> dict[str, int]:
    """Figures by name, in a fixed order: bytes of code and constants, instructions; empty for what is neither an ELF file
    nor PTX."""
    if is_ptx(code):
        return _ptx_statistics(code.decode("utf-8", "replace"))
    from elftools.common.exceptions import ELFError  # of all questions to a database, one looks into an ELF file
    from elftools.elf.elffile import ELFFile

    try:
        return _elf_statistics(ELFFile(BytesIO(code)))
    except (ELFError, ValueError, struct.error, UnicodeDecodeError, AttributeError, KeyError):
        return {}


def _elf_statistics(file: Any) -> dict[str, int]:
    cubin = file.header["e_machine"] in _CUDA_MACHINE
    found: Counter[str] = Counter()
    for section in file.iter_sections():
        name = section.name
        if name == ".text" or name.startswith(".text."):
            found["code_bytes"] += section["sh_size"]
            if cubin:
                found["instructions"] += _sass_instructions(section.data())
        elif name.startswith((".rodata", ".nv.constant")) and not name.startswith(".nv.constant0"):
            found["constant_bytes"] += section["sh_size"]
        elif name.startswith(".nv.shared"):
            found["shared_bytes"] += section["sh_size"]
    order = ("code_bytes", "instructions", "constant_bytes", "shared_bytes")
    return {k: found[k] for k in order if k in found}


def _sass_instructions(text: bytes) -> int:
    """Without the NOPs that fill a section up."""
    opcodes = (_PADDING.unpack_from(text, i)[0] & _SASS_OPCODE for i in range(0, len(text) - 1, _SASS_BYTES))
    return sum(opcode != _SASS_NOP for opcode in opcodes)


def _ptx_statistics(text: str) -> dict[str, int]:
    """Instructions, and how many of them are of the ten most frequent kinds."""
    body = _PTX_COMMENT.sub(" ", text)
    kinds = Counter(_PTX_LINE.findall(body))
    kinds.pop("reg", None)
    counted = {f"ptx_{kind}": n for kind, n in sorted(kinds.most_common(10), key=lambda k: (-k[1], k[0]))}
    return {"code_bytes": len(text), "instructions": sum(kinds.values()), **counted}
