"""Writes what was compiled as text: the file to look at when a piece is not what one thinks.

Implements the article's "调试与观测：两个官方入口" (debugging and observing), its
``computation_graph.py``: look first whether there are as many pieces as layers ask for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cgkit.errors import ConfigError

if TYPE_CHECKING:
    from cgkit.compiling.compiled_graph import CompiledGraph


def dump_pieces(compiled: CompiledGraph, folder: str) -> Path:
    """Writes ``computation_graph.py`` (and ``keys/NAME.txt``, what each piece's key is made of).

    Returns the folder, ``folder/model_name``. Pieces that share a compilation are written once.

    Raises:
        ConfigError: the folder cannot be written.
    """
    root = Path(folder) / "".join(c if c.isalnum() or c in "-_." else "_" for c in compiled.model_name)
    try:
        (root / "keys").mkdir(parents=True, exist_ok=True)
        (root / "computation_graph.py").write_text(_text(compiled), encoding="utf-8")
        for backend in compiled.backends:
            for one in backend.compiled:
                if not one.shared:
                    shape = "general" if one.shape is None else str(one.shape)
                    lines = "\n".join(one.key.lines) + "\n"
                    (root / "keys" / f"{one.piece}.{shape}.txt").write_text(lines, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"debug_dump_path={folder!r} cannot be written: {error}") from error
    return root


def _text(compiled: CompiledGraph) -> str:
    backends = {backend.name: backend for backend in compiled.backends}
    parts = [
        f"# {compiled.model_name}: {len(compiled.split.pieces)} pieces, {len(backends)} compiled, "
        f"{compiled.num_unique} different\n\n{compiled.split.source.rstrip()}"
    ]
    for piece in compiled.split.pieces:
        backend = backends.get(piece.name)
        if backend is None:
            note = "not compiled: holds a splitting operator"
        elif backend.general.shared:
            parts.append(
                f"# {piece.name}: the same as {backend.general.owner} (key {backend.general.key.digest})"
            )
            continue
        else:
            note = f"key {backend.general.key.digest}"
        parts.append(f"# {piece.name}: {note}\n{piece.graph_module.code.strip()}")
    return "\n\n\n".join(parts) + "\n"
