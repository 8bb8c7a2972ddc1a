"""Under what circumstances a stored trace is the one that Dynamo would make now.

Two lists of facts. What can be told before a trace is known (:func:`facts_before`): the model and all that
hangs on it, the example call, the configuration, the state of torch. And what only a trace tells
(:class:`Reads`): the globals that the traced functions named, the operators that stand in the graph, the
constants that Dynamo guarded. Both are written with the trace and taken again before it is used.
"""

from __future__ import annotations

import builtins
import functools
import gc
import hashlib
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.compiling.cache.factors import cache_key
from cgkit.compiling.warm.describe import Describer, UndescribableError
from cgkit.config import CompilationConfig
from cgkit.splitting.register import registered_ops
from cgkit.tracing.frames import TORCH_FOLDER

Guard = tuple[str, str, Any]
#: Our own code that makes graphs into pieces: a stored trace holds its results.
_OUR_STAGES = ("tracing", "splitting", "compiling", "torch_hooks")
_KNOWN_NAMESPACES = ("aten", "prims", "prim", "higher_order")
_CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
#: A plain attribute of a module: the walk over the model has it already.
_OF_A_MODULE = re.compile(r"(?:\._modules\['[^']+'\])*(?:\.\w+)?")


@dataclass(frozen=True)
class Call:
    """The example call as it is traced, for one model. ``locals``: what Dynamo's sources call ``L``."""

    model: torch.nn.Module
    function: Any  # the model's own forward, unbound
    passed: tuple[str, ...]
    arguments: Mapping[str, Any]  # stand-ins by parameter
    dims: Mapping[str, tuple[int, ...]]
    self_name: str

    @property
    def locals(self) -> dict[str, Any]:
        """By name: self, the arguments, and what forward's closure holds."""
        names = getattr(getattr(self.function, "__code__", None), "co_freevars", ())
        cells = getattr(self.function, "__closure__", None) or ()
        held = {name: cell.cell_contents for name, cell in zip(names, cells) if _filled(cell)}
        return {**held, self.self_name: self.model, **self.arguments}


def facts_before(
    call: Call, config: CompilationConfig, settings: Mapping[str, Any], checked: bool
) -> Describer:
    """The facts that are known without a trace.

    Raises:
        UndescribableError: the model is too large to be described.
    """
    found = Describer()
    found.add("model", call.model)
    for name, value in call.arguments.items():
        found.add(f"argument {name}", value)
    found.add("call", (call.passed, str(sorted(call.dims.items())), checked, call.self_name))
    found.add("forward", call.function)
    found.add("state", torch_hooks.trace_state())
    found.facts["cgkit"] = own_code()
    key = found.key = cache_key(config, (), found.devices, settings)
    for factor in ("environment", "config", "compiler"):
        found.facts |= {f"{factor} {name}": value for name, value in key.factor(factor).items()}
    return found


@functools.cache
def own_code() -> str:
    """A hash of our own stages' code."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(file for stage in _OUR_STAGES for file in (root / stage).rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(root)).encode() + b"\n" + file.read_bytes())
    return digest.hexdigest()[:24]


@dataclass(frozen=True)
class Reads:
    """What else one trace depended on: where to look again.

    Attributes:
        names: the names that traced functions use, by the module in whose globals they look.
        operators: custom operators in the graph, as ``ns::name``.
        guards: those of Dynamo's guards that hold constants, and those on arguments.
    """

    names: Mapping[str, Sequence[str]]
    operators: Sequence[str]
    guards: Sequence[Guard]

    def facts(self, call: Call, before: Describer) -> dict[str, str]:
        """The facts as they are now. ``before``: the walk that :func:`facts_before` made (it goes on).

        Raises:
            UndescribableError: a module is not imported here, or an operator not registered.
        """
        known = set(before.facts)
        for module, names in sorted(self.names.items()):
            if module not in sys.modules:
                raise UndescribableError(
                    f"the module {module}, of which it traced functions, is not imported"
                )
            _add_names(before, f"global {module}", sys.modules[module], set(names), set())
        for name in self.operators:
            _add_operator(before, name)
        scope = {"L": call.locals, "G": _Globals(getattr(call.function, "__globals__", {}))}
        for guard in self.guards:
            _add_guard(before, guard, scope)
        return {name: text for name, text in before.facts.items() if name not in known}


def reads_of(
    call: Call, before: Describer, codes: Iterable[types.CodeType], graph: Any, guards: Any
) -> Reads:
    """Where a trace that was just made looked.

    Args:
        codes: of forward and of all functions that Dynamo inlined.
        graph: the traced fx graph.
        guards: as :func:`cgkit.torch_hooks.dynamo_guards`.

    Raises:
        UndescribableError: a function was made on the spot, so that another process cannot look where it did.
    """
    if not guards:
        raise UndescribableError("this version of Dynamo does not say what it read")
    kept = [guard for guard in guards if guard[0] and isinstance(guard[2], str | int | None)]
    kept = [guard for guard in kept if _tells(guard, f"L['{call.self_name}']")]
    return Reads(
        names=_names_by_module(call, list(codes)),
        operators=_operators(graph),
        guards=list(dict.fromkeys(kept)),
    )


_KINDS_THAT_TELL = ("SEQUENCE_LENGTH", "DICT_CONTAINS", "DICT_NOT_CONTAINS", "HASATTR")


def _tells(guard: Guard, root: str) -> bool:
    source, kind, _ = guard
    if source.startswith(root) and _OF_A_MODULE.fullmatch(source, len(root)):
        return source.endswith(".training")
    return kind.endswith("_MATCH") or kind in _KINDS_THAT_TELL


# --- globals ---------------------------------------------------------------------------------


def _names_by_module(call: Call, codes: list[types.CodeType]) -> dict[str, list[str]]:
    ours = {id(code): code for code in codes if not code.co_filename.startswith(TORCH_FOLDER)}
    functions: dict[int, list[types.FunctionType]] = {}
    for holder in gc.get_referrers(*ours.values()) if ours else ():
        if isinstance(holder, types.FunctionType) and id(holder.__code__) in ours:
            functions.setdefault(id(holder.__code__), []).append(holder)
    inner = {id(c) for code in ours.values() for c in code.co_consts if isinstance(c, types.CodeType)}
    names: dict[str, set[str]] = {}
    own = call.function if isinstance(call.function, types.FunctionType) else None
    todo = [(code, functions.get(key, [])) for key, code in ours.items() if key not in inner]
    for code, found in [*todo, *([(own.__code__, [own])] if own is not None else [])]:
        if not found:
            raise UndescribableError(
                f"the function {code.co_name} at {code.co_filename}:{code.co_firstlineno} is gone"
            )
        for function in found:
            module = function.__globals__.get("__name__", "")
            if "_wrapped_forward" in function.__globals__:  # the stand-in of tracing.wrapper
                continue
            if code.co_filename.startswith("<frozen "):
                continue
            if getattr(sys.modules.get(module), "__dict__", None) is not function.__globals__:
                raise UndescribableError(
                    f"the function {code.co_name} at {code.co_filename} has globals that belong to no module"
                )
            names.setdefault(module, set()).update(_used(code))
    return {module: sorted(used) for module, used in names.items() if module.partition(".")[0] != "torch"}


def _used(code: types.CodeType) -> set[str]:
    used = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            used |= _used(constant)
    return used


def _add_names(found: Describer, name: str, module: Any, used: set[str], seen: set[int]) -> None:
    """Facts of the globals of ``module`` among ``used``; of modules among them, what is used of those."""
    if id(module) in seen:
        return
    seen.add(id(module))
    held = vars(module)
    for each in sorted(used & held.keys()):
        value = held[each]
        found.add(f"{name}.{each}", value, 6)
        if isinstance(value, types.ModuleType):
            _add_names(found, f"{name}.{each}", value, used, seen)
        elif isinstance(value, type):
            found.class_of(value)


# --- operators -------------------------------------------------------------------------------


def _operators(graph: Any) -> list[str]:
    found = set()
    for node in graph.nodes:
        known = torch_hooks.operator_of(node.target)
        if known is not None and known[0].partition("::")[0] not in _KNOWN_NAMESPACES:
            found.add(known[0])
    return sorted(found)


def _add_operator(found: Describer, name: str) -> None:
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None:
        raise UndescribableError(f"the operator {name} is not registered")
    overloads = [torch_hooks.operator_schema(getattr(packet, each)) for each in packet.overloads()]
    ours = registered_ops().get(name)
    found.add(
        f"operator {name}", (*sorted(overloads), ours is not None and (ours.lookup_args, ours.dispatch_key))
    )
    found.add(f"operator {name} fake", torch_hooks.fake_implementation(name), 6)


# --- guards ----------------------------------------------------------------------------------


class _Globals:
    """What Dynamo's sources call ``G``: forward's globals, and modules by the names that Dynamo gives them."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._own = own

    def __getitem__(self, name: str) -> Any:
        if name.startswith("__import_"):
            return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]
        if name.startswith("__builtins_dict__"):
            return vars(builtins)
        return self._own[name]


def _add_guard(found: Describer, guard: Guard, scope: dict[str, Any]) -> None:
    source, kind, key = guard
    name = f"guard {source}"
    try:
        value = eval(source, {"__builtins__": {"type": type, "len": len}}, scope)  # Dynamo's text
    except Exception as error:  # sources of values that nobody can reach (iterators): absent, here and there
        found.facts[name] = f"unreachable {type(error).__name__}"
        return
    if kind == "SEQUENCE_LENGTH":
        found.facts[f"{name} length"] = str(len(value)) if hasattr(value, "__len__") else "none"
    elif kind in ("DICT_CONTAINS", "DICT_NOT_CONTAINS"):
        found.facts[f"{name} has {key!r}"] = str(key in value)
    elif kind == "HASATTR":
        found.facts[f"{name} has attribute {key!r}"] = str(hasattr(value, str(key)))
    elif isinstance(value, (_CONSTANTS, types.FunctionType | type | types.ModuleType)):
        found.add(name, value, 6)
    else:
        found.facts[name] = f"a {type(value).__module__}.{type(value).__qualname__}"


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
