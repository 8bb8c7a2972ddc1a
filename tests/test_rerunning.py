"""Cells can be run again in any order: no name is bound by two cells and read by a third one."""

import ast
import builtins
import symtable
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="the notebooks' sources are paired by jupytext")
SOURCES = sorted((Path(__file__).parent.parent / "notebooks" / "src").glob("*.py"))


def tables(of):
    """The symbol table of a statement and of every scope inside it."""
    table = symtable.symtable(ast.unparse(of), "cell", "exec")
    yield table
    for child in table.get_children():
        yield from scopes(child)


def scopes(table):
    yield table
    for child in table.get_children():
        yield from scopes(child)


def globals_read(of):
    """The names of the notebook that a piece of code reads, inside its functions too."""
    outer, *inner = tables(of)
    read = {symbol.get_name() for symbol in outer.get_symbols() if symbol.is_referenced()}
    for table in inner:
        read |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_global() and symbol.is_referenced()
        }
    return read - set(dir(builtins))


def bound_and_read(source):
    """({name: the import that binds it, or ""}, names that the cell takes from other cells) of a cell.

    A function reads its names when it is called, perhaps by another cell: they count as taken from elsewhere.
    """
    bound, taken = {}, set()
    for statement in ast.parse(source).body:
        outer = next(tables(statement)).get_symbols()
        binds = {symbol.get_name() for symbol in outer if symbol.is_assigned() or symbol.is_imported()}
        functions = [
            node
            for node in ast.walk(statement)
            if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef))
        ]
        late = set().union(*map(globals_read, functions)) - {getattr(node, "name", "") for node in functions}
        now = globals_read(statement) - set(bound)
        if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr)):
            now -= binds  # a loop's variable, a function's own name
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            now |= {statement.target.id} - set(bound)
        taken |= now | late
        is_import = isinstance(statement, (ast.Import, ast.ImportFrom))
        bound |= dict.fromkeys(binds, ast.unparse(statement) if is_import else "")
    return bound, taken


def contested(cells):
    """{name: the numbers of the cells that bind it} where several do, not by one import, and another cell reads it."""
    known = [bound_and_read(source) for source in cells]
    found = {}
    for name in {name for bound, _ in known for name in bound}:
        where = [number for number, (bound, _) in enumerate(known) if name in bound]
        ways = {known[number][0][name] for number in where}
        if len(where) > 1 and (len(ways) > 1 or "" in ways) and any(name in taken for _, taken in known):
            found[name] = where
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_cell_reads_a_name_that_two_cells_bind(path):
    assert contested([cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code"]) == {}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["x = 1", "x = 2", "print(x)"], {"x": [0, 1]}),
        (["x = 1\nprint(x)", "x = 2\nx + 1", "for y in []:\n    y", "y = 3\nprint(y)"], {}),
        (["import re", "import re", "re.sub"], {}),
        (
            ["from a import question", "for question in 'ab':\n    pass", "question('1')"],
            {"question": [0, 1]},
        ),
        (["x = 1\ndef f():\n    return x", "x = 2", "f()"], {"x": [0, 1]}),
        (["x = 1\n[x for _ in range(3)]", "x = 2\n{n: x for n in 'ab'}", "[x for x in 'ab']"], {}),
        (["with a as b:\n    b", "b = 1", "b"], {"b": [0, 1]}),
        (["def f(x):\n    return x", "def f(y):\n    return y", "f(1)"], {"f": [0, 1]}),
        (["n = 0", "n += 1"], {"n": [0, 1]}),
    ],
)
def test_contested_names_are_found(cells, expected):
    assert contested(cells) == expected
