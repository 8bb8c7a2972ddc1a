"""The stitching code: a straight-line Python function that runs the pieces one after the other.

vLLM's split module interprets nothing at run time either: fx generates its ``forward``. Ours is
generated to be read and to be quick. One line a piece, dead values deleted at once (their memory is the
next piece's), splitting operators called right there: those of ``register_op`` without torch's
dispatcher, others as ``OpOverload`` (a packet would choose among its overloads at each call).
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import linecache
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from cgkit import marks
from cgkit.errors import SplitError
from cgkit.splitting.assign import Assignment
from cgkit.splitting.pieces import Piece
from cgkit.splitting.register import direct_call
from cgkit.splitting.values import called_overload
from cgkit.torch_hooks import operator_of

_serial = itertools.count()


class StitchingCode:
    """The source of a stitching function, and what its free names mean.

    ``source`` defines ``execute(*graph inputs)``; ``constants`` are its globals, apart from the
    callables of the pieces, which :meth:`compile` adds under ``callable_names``.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        inline: bool,
        source: str = "",
        constants: dict[str, Any] | None = None,
        callable_names: Sequence[str] = (),
        marked: tuple[str, dict[str, int]] | None = None,
    ) -> None:
        """``marked``: the source with ranges, and the number of the piece by the ranges' free names."""
        self.pieces = pieces
        self.inline = inline
        self.source = source
        self.constants: dict[str, Any] = constants or {}
        self.callable_names = list(callable_names)
        self._marked = marked

    def compile(self, callables: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """The function, with ``callables`` for the pieces that it calls, in order."""
        called = [piece for piece in self.pieces if not (self.inline and piece.is_splitting)]
        if len(callables) != len(called):
            kind = "capturable pieces" if self.inline else "pieces"
            raise SplitError(
                f"stitch got {len(callables)} callables for {len(called)} {kind}: give one for each, in order"
                + (" (inline_splitting=False takes one for each piece)" if self.inline else "")
            )
        names = dict(self.constants)
        names.update((self.callable_names[p.index], function) for p, function in zip(called, callables))
        filename = f"<cgkit stitching {next(_serial)}>"
        exec(compile(self.source, filename, "exec"), names)  # the source is ours, from the graph
        function = names["execute"]
        # so that tracebacks and inspect.getsource show the lines, as long as the function lives
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        weakref.finalize(function, linecache.cache.pop, filename, None)
        function.markable = markable = _MarkableStitching(function, self)  # lives as long as the function
        marks.register(markable)
        return function

    def marked_source(self) -> tuple[str, dict[str, int]]:
        """The source with a range around each splitting piece, and the pieces' numbers by the ranges' free names."""
        assert self._marked is not None
        return self._marked


class Stitching(StitchingCode):
    """The stitching of a split graph, written from it."""

    def __init__(
        self, graph_module: fx.GraphModule, assignment: Assignment, pieces: Sequence[Piece], inline: bool
    ) -> None:
        super().__init__(pieces, inline)
        self.graph_module = graph_module
        self._assignment = assignment
        self._graph = graph_module.graph
        self._taken = {"execute", *keyword.kwlist, *(node.name for node in self._graph.nodes)}
        self._constant_names: dict[int, str] = {}
        self.callable_names = [self._free_name(piece.name) for piece in pieces]
        self.source = self._write()

    def marked_source(self) -> tuple[str, dict[str, int]]:
        """See :meth:`StitchingCode.marked_source`; written when it is first asked for."""
        if self._marked is None:
            names = {piece.index: self._free_name(f"mark_{piece.index}") for piece in self.pieces}
            by_name = {names[piece.index]: piece.index for piece in self.pieces if piece.is_splitting}
            self._marked = self._write(names), by_name
        return self._marked

    # --- writing ---------------------------------------------------------------------------------

    def _write(self, ranges: dict[int, str] | None = None) -> str:
        dead_after = self._dead_after()
        lines = [f"def execute({', '.join(self._parameters())}):"]
        # a piece takes the symbols of its inputs' shapes even where no node uses them
        taken = {name for piece in self.pieces for name in piece.input_names}
        for node in self._assignment.prologue:
            if node.users or node.name in taken:
                lines.append(f"    {node.name} = {self._call(node)}")
        for piece in self.pieces:
            lines += [f"    # {self._describe(piece)}"]
            margin = "    "
            if ranges and piece.is_splitting:
                lines.append(f"    with {ranges[piece.index]}():")
                margin = "        "
            lines += [f"{margin}{line}" for line in self._piece_lines(piece)]
            if dead := dead_after[piece.index]:
                lines.append(f"    del {', '.join(dead)}")
        output = self._graph.output_node()
        lines += [f"    {line}" for line in self._local_lines([output], set())]
        lines.append(f"    return {self._expression(output.args[0])}")
        return "\n".join(lines) + "\n"

    def _parameters(self) -> Iterable[str]:
        for node in self._graph.nodes:
            if node.op == "placeholder":
                stars = str(node.target)[: len(str(node.target)) - len(str(node.target).lstrip("*"))]
                default = f"={self._expression(node.args[0])}" if node.args else ""
                yield f"{stars}{node.name}{default}"

    def _describe(self, piece: Piece) -> str:
        count = f"{len(piece.ops)} operators" if len(piece.ops) != 1 else "1 operator"
        what = ", ".join(dict.fromkeys(piece.ops)) if piece.is_splitting else count
        return f"piece {piece.index}, {piece.kind}: {what}"

    def _piece_lines(self, piece: Piece) -> list[str]:
        if self.inline and piece.is_splitting:
            return self._inline_lines(piece)
        call = f"{self.callable_names[piece.index]}({', '.join(piece.input_names)})"
        names = piece.output_names
        return [f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}" if names else call]

    def _inline_lines(self, piece: Piece) -> list[str]:
        nodes = self._assignment.pieces[piece.index]
        made: set[fx.Node] = set()
        lines = []
        for node in nodes:
            lines += self._local_lines([node], made)
            lines.append(self._statement(node))
        temporary = [n.name for n in (*nodes, *made) if n.users and n.op != "get_attr"]
        if temporary := [name for name in temporary if name not in piece.output_names]:
            lines.append(f"del {', '.join(temporary)}")
        return lines

    def _local_lines(self, users: Iterable[fx.Node], made: set[fx.Node]) -> list[str]:
        """Lines that compute the graph-level arithmetic which ``users`` need, unless ``made`` already."""
        lines: list[str] = []
        for user in users:
            for node in user.all_input_nodes:
                if node in self._assignment.local and node.op != "get_attr" and node not in made:
                    lines += self._local_lines([node], made)
                    lines.append(self._statement(node))
                    made.add(node)
        return lines

    def _dead_after(self) -> list[list[str]]:
        """By piece: the values that crossed a cut and that nothing after the piece uses. Graph inputs
        stay: the caller holds them anyway, and a delete of each weight would cost as much as a call."""
        last = {}
        for piece in self.pieces:
            for name in piece.input_names:
                last[name] = piece.index
        output = self._graph.output_node()
        returned = {node.name for node in output.all_input_nodes}
        dead: list[list[str]] = [[] for _ in self.pieces]
        for piece in self.pieces:
            for name in piece.output_names:
                if name not in returned:
                    dead[last[name]].append(name)
        return dead

    def _statement(self, node: fx.Node) -> str:
        call = self._call(node)
        return f"{node.name} = {call}" if node.users else call

    def _call(self, node: fx.Node) -> str:
        args = [self._expression(arg) for arg in node.args]
        kwargs = [f"{key}={self._expression(arg)}" for key, arg in node.kwargs.items()]
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:] + kwargs)})"
        if node.op == "call_module":
            function = self._constant(self.graph_module.get_submodule(str(node.target)), str(node.target))
        else:
            function = self._function(called_overload(node) or node.target, _function_label(node.target))
        return f"{function}({', '.join(args + kwargs)})"

    def _function(self, target: Any, label: str) -> str:
        direct = direct_call(target)
        return f"{self._constant(direct, label)}.call" if direct else self._constant(target, label)

    def _expression(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            if arg.op == "get_attr":
                return self._constant(
                    operator.attrgetter(str(arg.target))(self.graph_module), str(arg.target)
                )
            return arg.name
        if isinstance(arg, tuple) and not hasattr(arg, "_fields"):
            inner = ", ".join(map(self._expression, arg))
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        if isinstance(arg, list):
            return f"[{', '.join(map(self._expression, arg))}]"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{key!r}: {self._expression(value)}" for key, value in arg.items()) + "}"
        if isinstance(arg, slice):
            return f"slice({', '.join(map(self._expression, (arg.start, arg.stop, arg.step)))})"
        if isinstance(arg, tuple):  # a named tuple
            return f"{self._constant(type(arg), type(arg).__name__)}({', '.join(map(self._expression, arg))})"
        if arg is None or arg is Ellipsis or type(arg) in (bool, int, str):
            return repr(arg)
        if type(arg) is float and math.isfinite(arg):
            return repr(arg)
        return self._constant(arg, str(arg))

    def _constant(self, value: Any, label: str) -> str:
        """A name for ``value`` among the globals of the function, after ``label``, never one in use."""
        if id(value) in self._constant_names:
            return self._constant_names[id(value)]
        stem = "".join(c if c.isalnum() else "_" for c in label).strip("_")[:60] or "constant"
        stem = f"c_{stem}" if stem[0].isdigit() else stem
        name = self._free_name(stem)
        self.constants[name] = value  # also keeps it alive, so that its id stays its own
        self._constant_names[id(value)] = name
        return name

    def _free_name(self, stem: str) -> str:
        candidates = itertools.chain([stem], (f"{stem}_{i}" for i in itertools.count(1)))
        name = next(n for n in candidates if n not in self._taken and not hasattr(builtins, n))
        self._taken.add(name)
        return name


class _MarkableStitching:
    """Lets a generated function be marked: its code object is swapped for that of the marked source."""

    def __init__(self, function: FunctionType, stitching: StitchingCode) -> None:
        self._function = weakref.ref(function)
        self._stitching = stitching
        self._marked_code: CodeType | None = None

    def put_marks(self, marker: marks.Marker, undo: ExitStack) -> None:
        """Puts a range around each splitting piece: the compiled ones mark themselves."""
        function = self._function()
        if function is None:
            return
        source, pieces = self._stitching.marked_source()
        plain = function.__code__
        if self._marked_code is None:
            module = compile(source, plain.co_filename, "exec")
            self._marked_code = next(c for c in module.co_consts if isinstance(c, CodeType))
        for name, index in pieces.items():
            piece = self._stitching.pieces[index]
            stage = "attention" if any("attention" in op for op in piece.ops) else "splitting"
            function.__globals__[name] = marker.block(stage, piece.name)
        undo.callback(setattr, function, "__code__", plain)
        function.__code__ = self._marked_code


def _function_label(target: Any) -> str:
    if found := operator_of(target):
        name, overload = found
        return name.replace("::", "_") + (f"_{overload}" if overload not in (None, "default") else "")
    module = (getattr(target, "__module__", None) or "").lstrip("_").split(".")[0]
    name = getattr(target, "__name__", type(target).__name__)
    return f"{module}_{name}" if module in ("torch", "operator", "math") else name
