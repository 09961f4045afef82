"""Texts and code that candidates share, several at a time."""

from __future__ import annotations

import zlib
from collections.abc import Collection

from sqlalchemy import Connection, select

from evo.errors import EngineError
from evo.lineage import models as m
from evo.lineage.read import at_once

__all__ = ["read_artefacts", "read_texts", "unpack"]


def unpack(sha256: str, data: bytes) -> bytes:
    """What was stored. Raises EngineError for data that are not what was stored."""
    try:
        return zlib.decompress(data)
    except zlib.error as error:
        raise EngineError(f"artefact {sha256} cannot be decompressed: {error}") from error


def read_artefacts(connection: Connection, digests: Collection[str]) -> dict[str, bytes]:
    """The bytes by sha256; those that are not kept are left out."""
    a, found = m.Artefact, {}
    for some in at_once(digests):
        for sha256, data in connection.execute(select(a.sha256, a.data).where(a.sha256.in_(some))):
            found[sha256] = unpack(sha256, data)
    return found


def read_texts(connection: Connection, digests: Collection[str]) -> dict[str, str]:
    """Sources by sha256."""
    return {k: v.decode("utf-8", "surrogatepass") for k, v in read_artefacts(connection, digests).items()}
