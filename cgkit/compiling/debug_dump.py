"""Writes what was compiled to a folder: the files to look at when a piece is not what one thinks.

Implements the article's "调试与观测：两个官方入口" (debugging and observing), its
``computation_graph.py`` and ``transformed_code.py``, and adds each piece, what its key is made of, Inductor's
code, and a page that links them. Look first whether there are as many pieces as layers ask for.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cgkit.compiling.generated import generated_code
from cgkit.display import html_page
from cgkit.errors import ConfigError
from cgkit.tracing.decompile import decompile

if TYPE_CHECKING:
    from types import CodeType

    from cgkit.compiling.compiled_graph import CompiledGraph

#: What a dump consists of; a folder that holds only this is one of ours, and may be replaced.
MANIFEST = "files.json"

File = tuple[str, str, str]  # where, what it is, its text


def dump_pieces(compiled: CompiledGraph, folder: str) -> Path:
    """Writes ``folder/model_name`` with its ``index.html`` and returns it.

    Pieces that share a compilation are written once. The folder appears whole or not at all: everything
    is written beside it and then renamed. An earlier dump is replaced; a folder with anything else in it is
    left alone.

    Raises:
        ConfigError: the folder cannot be written (the disk is full, it is a file), or holds something
            that no dump wrote. Nothing is left behind, and an earlier dump is as it was.
    """
    root = Path(folder) / safe_name(compiled.model_name)
    try:
        _refuse_foreign(root)
        root.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{root.name[:40]}.", suffix=".partial", dir=root.parent))
        try:
            beside.chmod(0o755)
            _write_all(beside, compiled)
            _put_in_place(beside, root)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"debug_dump_path={str(folder)!r} cannot be written: {error}. Nothing was left behind; name "
            "another folder, or leave debug_dump_path out"
        ) from error
    return root


def safe_name(name: str) -> str:
    """``name`` as the name of a file: letters and digits of any language, ``-``, ``_`` and ``.``; never hidden,
    never empty, at most 80 characters and 200 bytes."""
    kept = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".")[:80]
    while len(kept.encode()) > 200:
        kept = kept[:-1]
    return kept or "model"


def _refuse_foreign(root: Path) -> None:
    """Raises ConfigError if ``root`` holds what no dump wrote."""
    if not root.is_dir():
        if root.exists():
            raise NotADirectoryError(f"{root} is a file")
        return
    held = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    try:
        ours = set(json.loads((root / MANIFEST).read_text(encoding="utf-8"))["files"]) | {MANIFEST}
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    if foreign := sorted(held - ours):
        raise ConfigError(
            f"{root} holds {foreign[0]!r}{f' and {len(foreign) - 1} more files' if len(foreign) > 1 else ''} "
            "that no dump of cgkit wrote: it is left alone. Name another debug_dump_path, or empty that folder"
        )


def _put_in_place(beside: Path, root: Path) -> None:
    """Renames ``beside`` to ``root``; what is there goes only when that has worked."""
    if not root.exists():
        os.rename(beside, root)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{root.name[:40]}.", suffix=".old", dir=root.parent))
    try:
        os.rename(root, old / "dump")
        try:
            os.rename(beside, root)
        except OSError:
            os.rename(old / "dump", root)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _write_all(folder: Path, compiled: CompiledGraph) -> None:
    written: list[tuple[str, str]] = []
    for where, what, text in _files(compiled):
        _write(folder / where, text)
        written.append((where, what))
    _write(folder / "index.html", html_page(compiled, files=written))
    _write(
        folder / MANIFEST,
        json.dumps(
            {"model": compiled.model_name, "files": [where for where, _ in written] + ["index.html"]},
            indent=1,
        ),
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _files(compiled: CompiledGraph) -> Iterator[File]:
    yield (
        "computation_graph.py",
        "the function that runs the pieces, and all different pieces",
        _text(compiled),
    )
    traced = compiled.split.traced
    if traced is not None:
        yield "original_code.py", "forward's bytecode before Dynamo", _bytecode(traced.original_code)
        yield (
            "transformed_code.py",
            "forward's bytecode after Dynamo: it fetches and calls",
            _bytecode(traced.code),
        )
    compiled_by = {backend.name: backend for backend in compiled.backends}
    for piece in compiled.split.pieces:
        backend = compiled_by.get(piece.name)
        if backend is not None and not backend.general.shared:
            what = f"{piece.name} as Dynamo traced it"
            yield f"pieces/{piece.name}.py", what, piece.graph_module.code.strip() + "\n"
        for one in backend.compiled if backend is not None else ():
            if one.shared:
                continue
            shape = "general" if one.shape is None else str(one.shape)
            at = f"{piece.name}, {'any token count' if one.shape is None else f'{one.shape} tokens'}"
            yield (
                f"keys/{piece.name}.{shape}.txt",
                f"{at}: what its key is made of",
                "\n".join(one.key.lines) + "\n",
            )
            if generated := generated_code(one):
                yield f"generated/{piece.name}.{shape}.py", f"{at}: Inductor's code", generated.code
                if generated.post_grad:
                    what = f"{at}: the graph after Inductor's passes"
                    yield f"generated/{piece.name}.{shape}.graph.txt", what, generated.post_grad


def _bytecode(code: CodeType) -> str:
    """Decompiled, or as a listing in comments: the file is Python either way."""
    how, text = decompile(code)
    if how == "depyf":
        return f"# decompiled by depyf\n{text.rstrip()}\n"
    listing = "".join(f"# {line}\n" for line in text.rstrip().splitlines())
    return f"# a listing by dis: depyf is not installed, or could not decompile it\n{listing}"


def _text(compiled: CompiledGraph) -> str:
    backends = {backend.name: backend for backend in compiled.backends}
    model = " ".join(compiled.model_name.splitlines())
    parts = [
        f"# {model}: {len(compiled.split.pieces)} pieces, {len(backends)} compiled, "
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
