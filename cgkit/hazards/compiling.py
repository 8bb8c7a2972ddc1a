"""Compilation that gets slow, or takes what was compiled for something else."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cgkit.compiling import compile_pieces
from cgkit.compiling.cache import CacheKey, cache_key, explain_cache
from cgkit.config import CompilationConfig
from cgkit.hazards.exhibit import SLOW, WRONG, Exhibit, Symptom
from cgkit.hazards.road import eager, findings
from cgkit.splitting import register_op, split_graph
from cgkit.tracing import trace
from cgkit.tracing.own_code import with_own_code

_serial = itertools.count()
KeyOf = Callable[[CompilationConfig, list[str]], CacheKey]
_TUNED = CompilationConfig(inductor_compile_config={"max_autotune": True})
_PLAIN = CompilationConfig()


def _files_of(model: nn.Module) -> list[str]:
    return list(trace(model, torch.ones(8, 4)).traced_files)


# --- a factor that the key lacks -------------------------------------------------------------------------


def key_of_the_code(config: CompilationConfig, files: list[str]) -> CacheKey:
    """The text of all traced files, and nothing else."""
    return CacheKey({}, {}, dict(cache_key(config, files, ()).code), {})


def key_of_all_factors(config: CompilationConfig, files: list[str]) -> CacheKey:
    """Environment, configuration, code, compiler."""
    return cache_key(config, files, ())


def _two_configs(key_of: KeyOf, device: str) -> Symptom:
    files = _files_of(_Doubles())
    same = key_of(_PLAIN, files).digest == key_of(_TUNED, files).digest
    text = "one key: the second start loads what was compiled for the first" if same else "two keys"
    return Symptom(same, f"with max_autotune off and on: {text}")


def _what_it_lacks(key_of: KeyOf, device: str) -> str:
    files = _files_of(_Doubles())
    if key_of(_PLAIN, files).digest != key_of(_TUNED, files).digest:
        return ""
    return "; ".join(
        str(each) for each in explain_cache(cache_key(_PLAIN, files, ()), cache_key(_TUNED, files, ()))
    )


class _Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


MISSING_FACTOR = Exhibit(
    "missing-factor",
    "The cache's key lacks a factor",
    (13,),
    "'expected size 7==9', by the order of launches: vLLM#53366 (num_speculative_tokens was in no key)",
    "two configurations that compile to different code share one entry on disk",
    key_of_the_code,
    key_of_all_factors,
    _two_configs,
    _what_it_lacks,
    on_gpu=False,
    kind=WRONG,
    tool="explain_cache",
)

# --- a key that knows where a file lies ------------------------------------------------------------------

_SOURCE = """import torch

class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x * 2
"""


def key_by_place(config: CompilationConfig, files: list[str]) -> CacheKey:
    """A traced file counts by its path."""
    code = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in files}
    return CacheKey({}, {}, code, {})


def key_by_content(config: CompilationConfig, files: list[str]) -> CacheKey:
    """A traced file counts by its module's name and its content."""
    return cache_key(config, files, ())


def _moved(key_of: KeyOf) -> list[CacheKey]:
    """The keys of one checkout in two places."""
    keys = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "moved_model.py"
            path.write_text(_SOURCE, encoding="utf-8")
            spec = importlib.util.spec_from_file_location("moved_model", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            keys.append(
                key_of(_PLAIN, [path for path in _files_of(module.Model()) if path.startswith(folder)])
            )
    return keys


def _after_a_move(key_of: KeyOf, device: str) -> Symptom:
    here, there = _moved(key_of)
    missed = here.digest != there.digest
    return Symptom(
        missed, "moved, the same checkout misses: all is compiled again" if missed else "moved, it hits"
    )


def _why_it_missed(key_of: KeyOf, device: str) -> str:
    found = explain_cache(*_moved(key_of))
    return str(next(iter(found))) if found else ""


MOVED_CHECKOUT = Exhibit(
    "moved-checkout",
    "A cache that does not survive a move",
    (14,),
    "a stale path after relocation: vLLM#52154; a cache that is not reused: dynamo#10695",
    "a path stands in the key, or in what is stored",
    key_by_place,
    key_by_content,
    _after_a_move,
    _why_it_missed,
    on_gpu=False,
    kind=SLOW,
    tool="explain_cache",
)

# --- equal layers that are not seen as equal ----------------------------------------------------------------


def _named(x: Tensor, out: Tensor, layer: str) -> None:
    out.copy_(x)


def _cuts(x: Tensor, out: Tensor) -> None:
    out.copy_(x.flip(-1))


register_op("write_as", _named, ["out"], namespace="cgkit_hazards")
register_op("write_by_lookup", _named, ["out"], lookup_args=["layer"], namespace="cgkit_hazards")
register_op("cuts", _cuts, ["out"], namespace="cgkit_hazards")


class NamesInTheGraph(nn.Module):
    """Each layer hands its name to an operator, which is compiled in as a constant."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(4):
            out, x = torch.empty_like(x), x * 2
            torch.ops.cgkit_hazards.write_as(x, out, f"layers.{layer}")
            x = torch.empty_like(out)
            torch.ops.cgkit_hazards.cuts(out + 1, x)
        return x


class NamesLookedUp(nn.Module):
    """The operator says that the name is only looked up (``lookup_args``)."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(4):
            out, x = torch.empty_like(x), x * 2
            torch.ops.cgkit_hazards.write_by_lookup(x, out, f"layers.{layer}")
            x = torch.empty_like(out)
            torch.ops.cgkit_hazards.cuts(out + 1, x)
        return x


_CUT = ["cgkit_hazards::cuts"]


def _compilations(model: type[nn.Module], device: str) -> Symptom:
    compiled = compile_pieces(
        split_graph(trace(model(), torch.ones(8, 4, device=device)), _CUT), eager("NONE", splitting_ops=_CUT)
    )
    pieces, different = len(compiled.backends), compiled.num_unique
    return Symptom(different > 3, f"{different} of {pieces} pieces are compiled, for 4 layers that are alike")


UNSHARED_PIECES = Exhibit(
    "unshared-pieces",
    "Equal layers are compiled one by one",
    (15,),
    "a cold start of 87.6 s and not 22.0 (llama3-70b): vLLM#33267, PR#33441; #20451, #20264, #20342, sglang#6830",
    "a layer's name stands in the graph as a constant, so no two layers have the same code",
    NamesInTheGraph,
    NamesLookedUp,
    _compilations,
    lambda model, device: findings(
        "piece-not-shared", model(), torch.ones(8, 4, device=device), splitting_ops=_CUT, compiler="eager"
    ),
    kind=SLOW,
    tool="doctor",
)

# --- recompilations while serving ---------------------------------------------------------------------------


class CountsSteps(nn.Module):
    """A Python number that changes at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * self.steps


class CountsOnTheDevice(nn.Module):
    """The number comes in as a tensor."""

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        return x * steps


def _under_guards(model: type[nn.Module], device: str) -> Symptom:
    """``torch.compile`` as it is, a call a step."""
    compiled = [0]

    def backend(graph: Any, inputs: Any) -> Any:
        compiled[0] += 1
        return graph

    made, x = model(), torch.ones(8, 4, device=device)
    # Dynamo stops to recompile a code after some times, and counts those of an earlier visit too.
    own = with_own_code(model.forward, f"forward_{next(_serial)}")  # type: ignore[arg-type]
    step = torch.compile(MethodType(own, made), backend=backend, dynamic=False)
    with torch.no_grad():
        for number in range(1, 6):
            step(*_arguments(model, x, number))
    return Symptom(compiled[0] > 1, f"5 steps under Dynamo's guards: {compiled[0]} compilations")


def _arguments(model: type[nn.Module], x: Tensor, number: int) -> tuple[Tensor, ...]:
    return (x, torch.full((), float(number), device=x.device)) if model is CountsOnTheDevice else (x,)


RECOMPILES = Exhibit(
    "recompiles",
    "A model that is compiled again while it serves",
    (22,),
    "recompilations in serving: sglang#15654, PR#38354, sglang#32655",
    "a Python value of the model is guarded; when it changes, the guard fails and Dynamo traces anew "
    "(without guards it would stay what it was)",
    CountsSteps,
    CountsOnTheDevice,
    _under_guards,
    lambda model, device: findings(
        "recompilation", model(), *_arguments(model, torch.ones(8, 4, device=device), 1), compiler="eager"
    ),
    kind=SLOW,
    tool="doctor",
)

EXHIBITS = (MISSING_FACTOR, MOVED_CHECKOUT, UNSHARED_PIECES, RECOMPILES)
