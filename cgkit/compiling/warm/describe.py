"""What a trace may have read, as text that is equal in every process where it is the same.

The walk goes further than Dynamo did: whatever hangs on a model (attributes, configuration objects, hooks,
the methods of its classes) counts, read or not. A difference that does not matter costs a trace; one that
is overlooked would cost a wrong result. What cannot be looked into stands with its type alone, as
``opaque``; what a trace read through it is held by Dynamo's guards (:mod:`cgkit.compiling.warm.assumed`).
"""

from __future__ import annotations

import copy
import enum
import functools
import hashlib
import sys
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.errors import CgkitError

_MOST_FACTS = 400_000
_DEPTH = 12
_LONG = 300  # characters of a value; a longer one stands with its hash
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Of a class' own attributes: what Python puts there, and what says nothing about a call.
_NOT_OF_CLASS = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__slots__"),
    *("__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl", "__parameters__"),
    *("__orig_bases__", "__match_args__", "__dataclass_fields__", "__dataclass_params__", "__annotate__"),
    *("__annotate_func__", "__annotations_cache__", "__hash__", "__slotnames__"),
}
#: Kept by :mod:`cgkit.pipeline` on a model and its class: what was compiled, not what is traced.
_OURS = "_cgkit_"


class UndescribableError(CgkitError):
    """Something that a trace may depend on cannot be told from another of its kind."""


class Describer:
    """Collects facts: a name ("model.layers.0.norm.eps") -> what it is ("float 1e-05").

    One walk gives names to all that it meets: an object, a tensor or a storage that is met again stands as
    ``same as`` the first, so that tied weights are told from equal ones.
    """

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.codes: set[int] = set()  # ids of the code objects that were described
        self.devices: set[torch.device] = set()
        self._first: dict[int, str] = {}
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is given twice
        self._code_texts: dict[int, str] = {}
        self._classes: set[type] = set()
        self.key: Any = None  # the cache's key for what was described, without the traced files

    def fork(self) -> Describer:
        """A walk that goes on from here, and leaves this one as it is."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            setattr(other, name, copy.copy(value) if isinstance(value, dict | set | list) else value)
        return other

    def covers(self, code: types.CodeType) -> bool:
        """Whether a function with this code, or an equal one, was met."""
        return id(code) in self.codes or Describer().code(code) in set(self._code_texts.values())

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        """The fact ``name``, and those of what ``value`` holds."""
        self.facts[name] = self._text(name, value, depth)
        if len(self.facts) > _MOST_FACTS:
            raise UndescribableError(f"{name} lies in more than {_MOST_FACTS} values")

    # --- one value ---

    def _text(self, name: str, value: Any, depth: int) -> str:
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return _shortened(f"{type(value).__name__} {value!r}")
        if isinstance(value, _TORCH_PLAIN):
            return str(value)
        if isinstance(value, enum.Enum):
            return f"{_name_of(type(value))}.{value.name} {value.value!r:.80}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, type):
            return f"class {_name_of(value)}"
        if (first := self._first.get(id(value))) is not None:
            return f"same as {first}"
        self._first[id(value)] = name
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value, depth)
        if depth >= _DEPTH:
            return f"opaque {_name_of(type(value))}, too deep"
        return self._compound(name, value, depth)

    def _compound(self, name: str, value: Any, depth: int) -> str:
        if isinstance(value, torch.nn.Module):
            return self._module(name, value, depth)
        if isinstance(value, Mapping):
            return self._mapping(name, value, depth)
        if isinstance(value, tuple | list | deque):
            for index, item in enumerate(value):
                self.add(f"{name}[{index}]", item, depth + 1)
            return f"{_name_of(type(value))} of {len(value)}"
        if isinstance(value, set | frozenset):
            inner = Describer()
            texts = sorted(inner._text(name, item, depth + 1) for item in value)
            return _shortened(f"{_name_of(type(value))} {texts}")
        if (text := self._callable(name, value, depth)) is not None:
            return text
        return self._object(name, value, depth)

    def _mapping(self, name: str, value: Mapping[Any, Any], depth: int) -> str:
        for index, (key, item) in enumerate(value.items()):
            if isinstance(key, _PLAIN):
                self.add(f"{name}[{key!r}]", item, depth + 1)
            else:
                self.add(f"{name} key {index}", key, depth + 1)
                self.add(f"{name} value {index}", item, depth + 1)
        return f"{_name_of(type(value))} of {list(value) if all(isinstance(k, _PLAIN) for k in value) else len(value)}"

    def _object(self, name: str, value: Any, depth: int) -> str:
        cls = type(value)
        if numpy := _numpy_text(value):
            return numpy
        held = dict(getattr(value, "__dict__", None) or {})
        for each in cls.__mro__:
            slots = each.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                    held[slot] = getattr(value, slot)
        self.class_of(cls)
        if not held or _is_known(cls):
            return f"opaque {_name_of(cls)}"
        for key, item in held.items():
            if not str(key).startswith(_OURS):
                self.add(f"{name}.{key}", item, depth + 1)
        return f"{_name_of(cls)} with {len(held)} attributes"

    # --- modules and tensors ---

    def _module(self, name: str, module: torch.nn.Module, depth: int) -> str:
        self.class_of(type(module))
        for key, value in vars(module).items():
            if key.startswith(_OURS):
                continue
            if isinstance(value, dict) and key in torch_hooks.MODULE_DICTS:
                own = key in ("_parameters", "_buffers", "_modules")
                for inner, item in value.items():  # those that are empty, as hooks mostly are, say nothing
                    self.add(
                        f"{name}.{inner}" if own else f"{name}.{key}[{inner!r}]", item, depth * (not own) + 1
                    )
                if own and value:
                    self.facts[f"{name}.{key}"] = " ".join(map(str, value))
            elif isinstance(value, _PLAIN) and type(value) in _PLAIN:  # most of them: the short way
                self.facts[f"{name}.{key}"] = _shortened(f"{type(value).__name__} {value!r}")
            elif not (key == "_non_persistent_buffers_set" and not value):
                self.add(f"{name}.{key}", value, 1)
        return _name_of(type(module))

    def _tensor(self, name: str, tensor: torch.Tensor, depth: int) -> str:
        self.devices.add(tensor.device)
        parts = [_name_of(type(tensor)), str(tensor.dtype), str(tensor.device), str(tuple(tensor.shape))]
        if tensor.layout is torch.strided:
            parts += [
                f"strides {tensor.stride()}",
                f"offset {tensor.storage_offset()}",
                self._storage(tensor),
            ]
        else:
            parts.append(str(tensor.layout))
        flags = {"grad": tensor.requires_grad, "conj": tensor.is_conj(), "neg": tensor.is_neg()}
        flags["inference"] = tensor.is_inference()
        for key, item in vars(tensor).items() if hasattr(tensor, "__dict__") else ():
            if not key.startswith("_dynamo"):
                self.add(f"{name}.{key}", item, depth + 1)
        return " ".join([*parts, *(flag for flag, on in flags.items() if on)])

    def _storage(self, tensor: torch.Tensor) -> str:
        try:
            key = torch_hooks.storage_key(tensor)
        except (RuntimeError, NotImplementedError):  # a subclass that holds tensors, which are its attributes
            return "no storage"
        if key not in self._storages:
            self._storages[key] = len(self._storages)
            return f"storage {self._storages[key]}"
        return f"in storage {self._storages[key]} of {tensor.untyped_storage().nbytes()} bytes"

    # --- code ---

    def _callable(self, name: str, value: Any, depth: int) -> str | None:
        """Text for functions and what is made of them; None for anything else."""
        if isinstance(value, types.FunctionType):
            return self._function(name, value, depth)
        if isinstance(value, types.MethodType):
            self.add(f"{name}.__func__", value.__func__, depth + 1)
            self.add(f"{name}.__self__", value.__self__, depth + 1)
            return "method"
        if isinstance(value, functools.partial):
            for part in ("func", "args", "keywords"):
                self.add(f"{name}.{part}", getattr(value, part), depth + 1)
            return "partial"
        if isinstance(value, staticmethod | classmethod):
            self.add(f"{name}.__func__", value.__func__, depth + 1)
            return type(value).__name__
        if isinstance(value, property):
            self.add(f"{name}.fget", value.fget, depth + 1)
            return "property"
        if isinstance(value, functools.cached_property):
            self.add(f"{name}.func", value.func, depth + 1)
            return "cached property"
        if callable(value) and callable(wrapped := getattr(value, "__wrapped__", None)):  # functools.cache
            self.add(f"{name}.__wrapped__", wrapped, depth + 1)
            return f"{_name_of(type(value))} around"
        if (known := torch_hooks.operator_of(value)) is not None:
            return f"operator {known[0]} {known[1] or ''}"
        if isinstance(
            value, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType
        ):
            return f"builtin {_name_of(value)}"
        return None

    def _function(self, name: str, function: types.FunctionType, depth: int) -> str:
        known = f"function {_name_of(function)}"
        if function.__module__ and function.__module__.partition(".")[0] == "torch":
            return known  # the version of torch stands for it
        for index, cell in enumerate(function.__closure__ or ()):
            try:
                self.add(
                    f"{name} closure {function.__code__.co_freevars[index]}", cell.cell_contents, depth + 1
                )
            except ValueError:
                self.facts[f"{name} closure {function.__code__.co_freevars[index]}"] = "empty"
        for part in ("__defaults__", "__kwdefaults__"):
            if getattr(function, part):
                self.add(f"{name} {part}", getattr(function, part), depth + 1)
        return f"{known} {self.code(function.__code__)}"

    def code(self, code: types.CodeType) -> str:
        """A hash of what the code does, whatever its file and lines."""
        if id(code) not in self._code_texts:
            self.codes.add(id(code))
            self._kept.append(code)
            parts = [
                code.co_code.hex(), repr(code.co_names), repr(code.co_varnames), repr(code.co_freevars),
                repr(code.co_cellvars), repr((code.co_argcount, code.co_kwonlyargcount, code.co_flags)),
                *map(self._constant, code.co_consts),
            ]  # fmt: skip
            self._code_texts[id(code)] = _digest("\n".join(parts))
        return self._code_texts[id(code)]

    def _constant(self, value: Any) -> str:
        if isinstance(value, types.CodeType):
            return self.code(value)
        if isinstance(value, frozenset):
            return f"frozenset {sorted(map(self._constant, value))}"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._constant, value))})"
        return f"{type(value).__name__} {value!r}"

    def class_of(self, cls: type) -> None:
        """Facts of the class and its bases, but for torch's and Python's own."""
        for each in cls.__mro__:
            if each in self._classes:
                continue
            self._classes.add(each)
            if _is_known(each):
                continue
            name = f"class {_name_of(each)}"
            self.facts[name] = " ".join(_name_of(base) for base in each.__mro__)
            for key, value in vars(each).items():
                if key not in _NOT_OF_CLASS and not key.startswith(_OURS):
                    self.add(f"{name}.{key}", value, _DEPTH - 4)


def _is_known(cls: type) -> bool:
    """Whether torch's or Python's version says all about the class."""
    root = cls.__module__.partition(".")[0]
    return root in ("torch", "builtins") or root in sys.stdlib_module_names


def _name_of(value: Any) -> str:
    module = getattr(value, "__module__", None) or ""
    return f"{module}.{getattr(value, '__qualname__', getattr(value, '__name__', '?'))}".removeprefix(
        "builtins."
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:40]}... {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _numpy_text(value: Any) -> str:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return ""
    content = hashlib.sha256(value.tobytes()).hexdigest()[:24] if value.dtype != object else "opaque"
    return f"{_name_of(type(value))} {value.dtype} {value.shape} {content}"
