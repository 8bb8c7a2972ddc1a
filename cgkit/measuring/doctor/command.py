"""``cgkit doctor``: a report on a class in a file, or on a model of ``transformers``."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from cgkit import torch_hooks
from cgkit.capturing.static_inputs import Call, as_call
from cgkit.config import CompilationConfig
from cgkit.errors import CgkitError
from cgkit.measuring.doctor.examine import doctor
from cgkit.measuring.doctor.report import Report

#: A configuration by its family's name is made so small (the fields that it has), with random weights.
_SMALL: Mapping[str, int] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "ffn_dim": 128, "word_embed_proj_dim": 64,
}  # fmt: skip
_TOKENS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "model",
        metavar="FILE:CLASS",
        nargs="?",
        help="a class in a Python file, built without arguments; or a folder that transformers wrote; or a model's "
        "name on the Hugging Face hub, if it was downloaded before; or one of transformers' families (llama, ...), "
        "made small with random weights",
    )
    parser.add_argument("--codes", action="store_true", help="only list the codes that a finding may have")
    parser.add_argument(
        "--inputs",
        metavar="CODE",
        help="the example call: a method of the class, a function of the file, or an expression with its names and "
        "torch, that gives a tensor, a tuple or a dict of keywords (default: the method example_inputs)",
    )
    parser.add_argument(
        "--other",
        action="append",
        metavar="CODE",
        help="another call that the model will get, written as --inputs; may be given several times",
    )
    parser.add_argument("--mode", metavar="MODE", help="the cudagraph_mode, as 'full' (default: piecewise)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="N", help="the sizes to be recorded (default: the article's)"
    )
    parser.add_argument(
        "--splitting-ops",
        nargs="*",
        metavar="OP",
        help="operators that are cut at (default: cgkit's attention)",
    )
    parser.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        help="another field of CompilationConfig, as level=1 or max_num_batched_tokens=64; may be given several times",
    )
    parser.add_argument(
        "--check", action="append", metavar="NAME", help="only this check; may be given several times"
    )


def run(args: argparse.Namespace) -> Report:
    """The report that the command prints.

    Raises:
        CgkitError: the model or its inputs are not there, or raise; the message says which.
    """
    if not args.model:
        raise CgkitError(
            "say which model: FILE.py:CLASS, a folder, or a name of transformers (or ask for --codes)"
        )
    options = {
        "cudagraph_mode": args.mode,
        "cudagraph_capture_sizes": tuple(args.sizes) if args.sizes else None,
        "splitting_ops": None if args.splitting_ops is None else tuple(args.splitting_ops),
        **_fields(args.set or ()),
    }
    config = CompilationConfig(**options)
    file, colon, name = args.model.rpartition(":")
    with torch_hooks.stand_in_streams():  # a constructor may make a stream
        if colon and file.endswith(".py"):
            model, module = _from_file(Path(file), name)
            call = as_call(_inputs(model, module, args.inputs))
        else:
            module = None
            model, call = _of_transformers(args.model, args.inputs)
        others = [_inputs(model, module, code, "inputs of --other") for code in args.other or ()]
        report = doctor_of_call(model, call, config, args.check, others)
    words = _words(args)
    report.findings = [replace(each, command=shlex.join([*words, "--check", each.check])) for each in report]
    return report


def _fields(given: Sequence[str]) -> dict[str, Any]:
    """Fields of :class:`CompilationConfig` as ``--set`` gives them."""
    known = {each.name for each in fields(CompilationConfig)}
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise CgkitError(
                f"--set {text}: write NAME=VALUE with a field of CompilationConfig: {', '.join(sorted(known))}"
            )
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value  # a word
    return found


def _words(args: argparse.Namespace) -> list[str]:
    """The command that was given, without what only shapes its output."""
    words = ["cgkit", "doctor", args.model]
    if args.inputs is not None:
        words += ["--inputs", args.inputs]
    for code in args.other or ():
        words += ["--other", code]
    if args.mode is not None:
        words += ["--mode", args.mode]
    if args.sizes:
        words += ["--sizes", *map(str, args.sizes)]
    if args.splitting_ops is not None:
        words += ["--splitting-ops", *args.splitting_ops]
    for text in args.set or ():
        words += ["--set", text]
    return words


def doctor_of_call(
    model: nn.Module, call: Call, config: CompilationConfig, only: Any = None, others: Sequence[Any] = ()
) -> Report:
    """:func:`doctor` for a call in one value."""
    try:
        return doctor(model, *call.args, config=config, only=only, other_inputs=others, **call.kwargs)
    except TypeError as error:
        raise CgkitError(f"the example inputs do not fit {type(model).__name__}.forward: {error}") from error
    except SystemExit as error:
        raise CgkitError(
            f"{type(model).__name__}.forward ends the process: sys.exit({error.code})"
        ) from error


def _from_file(path: Path, name: str) -> tuple[nn.Module, ModuleType]:
    module = load_file(path)
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        known = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, nn.Module)]
        raise CgkitError(f"{path} has no nn.Module class {name!r}; it has {', '.join(known) or 'none'}")
    try:
        model = cls()
    except (Exception, SystemExit) as error:
        raise CgkitError(
            f"{name}() raises {type(error).__name__}: {error}. The class is built without arguments: give one whose "
            "constructor takes none, for instance a subclass that fills them in"
        ) from error
    return model, module


def load_file(path: Path) -> ModuleType:
    """The file as a module, which Dynamo can find by its name.

    Raises:
        CgkitError: there is no such file, or it raises when it is run.
    """
    if not path.is_file():
        raise CgkitError(f"there is no file {path}")
    try:
        return _of_package(path.resolve()) or _by_itself(path)
    except (Exception, SystemExit) as error:
        raise CgkitError(f"{path} raises {type(error).__name__}: {error}") from error


def _of_package(path: Path) -> ModuleType | None:
    """The file as a module of the package that its folder is, so that its relative imports work; None if there is no
    such package, or another module has its name."""
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if len(parts) == 1 or path.stem == "__init__":
        return None
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    found = importlib.util.find_spec(parts[0])
    if found is None or Path(str(found.origin)).parent != folder / parts[0]:
        return None
    return importlib.import_module(".".join(parts))


def _by_itself(path: Path) -> ModuleType:
    name = f"cgkit_doctor_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # for what the file itself imports
    spec.loader.exec_module(module)
    return module


def _inputs(
    model: nn.Module, module: ModuleType | None, code: str | None, what: str = "example inputs"
) -> Any:
    if code is None and not hasattr(model, "example_inputs"):
        raise CgkitError(
            f"{type(model).__name__} has no method example_inputs: add one that gives the arguments of a call, or "
            "say --inputs 'torch.ones(8, 4)'"
        )
    name = code or "example_inputs"
    names = vars(module) if module is not None else {}
    try:
        if name.isidentifier() and callable(getattr(model, name, None)):
            return getattr(model, name)()
        if code is None:  # an attribute
            return model.example_inputs
        if callable(names.get(name)):
            return names[name]()
        return eval(name, {**names, "torch": torch, "model": model})  # the user's own text
    except (Exception, SystemExit) as error:
        raise CgkitError(f"the {what} ({name}) raise {type(error).__name__}: {error}") from error


def _of_transformers(given: str, inputs: str | None) -> tuple[nn.Module, Call]:
    """An adopted model with a few tokens."""
    from cgkit.serving.adopt import adopt
    from cgkit.serving.weights import SMOLLM2

    model = adopt(given if given == SMOLLM2 else _folder(given) or _small_config(given))
    if inputs is not None:
        return model, as_call(_inputs(model, None, inputs))
    return model, Call((torch.arange(_TOKENS) + 3, torch.arange(_TOKENS)), {})


def _folder(given: str) -> Path | None:
    """The folder that ``given`` names: its path, or where a model of the hub was downloaded to; None if neither."""
    path = Path(given).expanduser()
    if path.exists():
        return path
    if given.count("/") != 1:
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(given, local_files_only=True))
    except Exception as error:  # its own kinds, or it is not installed
        raise CgkitError(
            f"{given!r} is no folder, and no model of that name was downloaded before ({type(error).__name__}). cgkit "
            "downloads nothing: fetch it with the hub's own client, save_pretrained it into a folder, or name its "
            "family (llama, qwen3, ...) for a small one with random weights"
        ) from error


def _small_config(family: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise CgkitError(
            f"{family!r} is no file:class, and transformers is not installed ({error})"
        ) from error
    try:
        known = transformers.AutoConfig.for_model(family)
    except ValueError as error:
        raise CgkitError(
            f"{family!r} is neither FILE.py:CLASS, nor a folder, nor a family of transformers (llama, qwen3, gpt2, ...)"
        ) from error
    small = {name: value for name, value in _SMALL.items() if hasattr(known, name)}
    return transformers.AutoConfig.for_model(family, **small, bos_token_id=1, eos_token_id=2, pad_token_id=0)
