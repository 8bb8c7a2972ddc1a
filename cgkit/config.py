"""The configuration: data, validated, no behaviour.

Implements the article's "编译等级：0/1/2/3 四级" (four levels), "切分算子：splitting_ops 与「铰链」"
(splitting operators) and "CUDAGraphMode：一张图还是几段图" (one graph or several). What would
silently do something else than what was written raises, with the field, the value and the way out.
"""

from __future__ import annotations

import difflib
import enum
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from cgkit.errors import ConfigError
from cgkit.token_ranges import Shape as Shape
from cgkit.token_ranges import TokenRange as TokenRange


class _ParsableEnum(enum.Enum):
    """An enum whose members may be written as strings, in any case."""

    @classmethod
    def parse(cls, value: Any, field_name: str) -> Any:
        """The member that ``value`` (member, name or number) means; ConfigError if none."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.strip().upper() in cls.__members__:
            return cls[value.strip().upper()]
        if isinstance(value, int) and not isinstance(value, bool):
            for member in cls:
                if member.value == value:
                    return member
        raise ConfigError(
            f"{field_name}={value!r} is not a {cls.__name__}; use one of {', '.join(cls.__members__)}"
        )


class CompilationLevel(_ParsableEnum):
    """How much of the road a model takes (vLLM today: ``CompilationMode``, other names, same order)."""

    NO_COMPILATION = 0  # eager
    DYNAMO_AS_IS = 1  # plain torch.compile, with its guards: it traces again when one fails
    DYNAMO_ONCE = 2  # one trace, no guards, compiled whole
    PIECEWISE = 3  # one trace, no guards, split, compiled piece by piece


class CUDAGraphMode(_ParsableEnum):
    """What is recorded: nothing, the pieces between splitting operators, the whole step, or a mix.

    A composite value is a pair (for decode batches, for all others).
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self) -> CUDAGraphMode:
        """The mode of a uniform decode batch: NONE, PIECEWISE or FULL."""
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> CUDAGraphMode:
        """The mode of any other batch: NONE, PIECEWISE or FULL."""
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def separate_routine(self) -> bool:
        """Whether decode batches and others are routed apart."""
        return isinstance(self.value, tuple)

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether ``mode`` (not a composite) is taken by some batch."""
        return mode in (self.decode_mode(), self.mixed_mode())

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE


class AttentionCGSupport(_ParsableEnum):
    """For which batches an attention implementation may stand inside a recorded graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


#: Operators at which a graph is cut when ``splitting_ops`` is not given: those whose work depends
#: on the batch in ways that a shape does not tell (the article: ``_attention_ops``).
DEFAULT_SPLITTING_OPS: tuple[str, ...] = (
    "cgkit::unified_attention_with_output",
    "cgkit::linear_attention_with_output",
)

#: The layers with a hand-written form beside the torch one (``cgkit.kernels.custom_op``).
CUSTOM_OPS: tuple[str, ...] = ("rms_norm", "silu_and_mul", "rotary", "quant_fp8")

#: The graph passes by name, in the order in which they make sense (``cgkit.compiling.passes``).
PASSES: tuple[str, ...] = (
    "noop",
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_attn_quant",
    "fix_functionalization",
)

COMPILERS: tuple[str, ...] = ("inductor", "inductor_patched", "eager")
REPLAY_PATHS: tuple[str, ...] = ("plan", "module")
LADDERS: tuple[str, ...] = ("article", "vllm-0.10.1", "vllm-0.33", "sglang", "tensorrt-llm")


@dataclass(frozen=True)
class CompilationConfig:
    """How a model is compiled and recorded. Immutable: ``dataclasses.replace`` makes another.

    Sizes are token counts. Enums may be given as strings (``"piecewise"``) or numbers.
    """

    #: How much of the road is taken.
    level: CompilationLevel = CompilationLevel.PIECEWISE
    #: The operators that are left out of the pieces, as ``ns.name``, ``ns::name``, with or without
    #: ``.overload``. None: :data:`DEFAULT_SPLITTING_OPS`, as far as the graph holds them.
    splitting_ops: tuple[str, ...] | None = None
    #: What is recorded. None: PIECEWISE at level 3, else NONE (the article's default).
    cudagraph_mode: CUDAGraphMode | None = None
    #: Sizes to record: a list, the name of a ladder (:data:`LADDERS`), or None: the article's.
    cudagraph_capture_sizes: tuple[int, ...] | str | None = None
    #: Sizes for which each piece also gets a static, tuned compilation.
    compile_sizes: tuple[int, ...] = ()
    #: Last token counts of ranges that each get a compilation of their own (vLLM today:
    #: ``compile_ranges_endpoints``): (8, 64) means 1 to 8 and 9 to 64. A compile size in a range wins over it.
    #: A size above the last endpoint is served by the general callable (vLLM lets the last range reach to
    #: ``max_num_batched_tokens``, and asserts that nothing lies outside). Nothing is tuned for a range.
    compile_ranges: tuple[int, ...] = ()
    #: Unrecorded runs of each size before it is recorded.
    cudagraph_num_of_warmups: int = 1
    #: Copy the arguments into static buffers first. False: the caller always passes the same buffers.
    cudagraph_copy_inputs: bool = True
    #: Which adaptor compiles a piece: one of :data:`COMPILERS`. "inductor_patched" is the article's
    #: ``InductorAdaptor``, to be studied.
    compiler: str = "inductor"
    #: How the guards are avoided: "bytecode" (the article's hook) or "guard_filter" (vLLM today).
    dispatch: str = "bytecode"
    #: When a piece gets its static sizes: "start" (before capture) or "first_hit".
    compile_at: str = "start"
    #: Which layers take a hand-written kernel: "all", "none", "+name", "-name" (vLLM's field); the names are
    #: :data:`CUSTOM_OPS`. Neither "all" nor "none": "none" where Inductor compiles (it fuses torch code, and sees
    #: nothing of a kernel), else "all".
    custom_ops: tuple[str, ...] | None = None
    #: Options handed to Inductor for every piece.
    inductor_compile_config: dict[str, Any] = field(default_factory=dict)
    #: Graph passes in Inductor's post-grad hook, in order: names (:data:`PASSES`), objects with a ``name``, a
    #: ``uuid()`` and a call on a graph, or functions ``(graph) -> matches``. (): none, Inductor as it is.
    #: A fusion brings ``fix_functionalization`` with it. Needs ``compiler="inductor"``.
    passes: tuple[Any, ...] = ()
    #: Folder for the stitching code, the pieces and what their keys are made of; None writes nothing.
    debug_dump_path: str | None = None
    #: The largest number of requests in a batch (one token each in decode).
    max_num_seqs: int = 256
    #: The largest number of tokens in a step. None: ladders take it for unlimited, and a runner for what
    #: fits its longest request and its largest recorded size.
    max_num_batched_tokens: int | None = None
    #: Token counts that run without a graph are padded to a multiple of this. Only 1 for now.
    tensor_parallel_size: int = 1
    #: How a PIECEWISE step runs once it is recorded: "plan" (a flat tuple of calls, laid out and checked at capture)
    #: or "module" (piece by piece, through the stitching code and the wrappers: the readable reference). Where no plan
    #: can be laid out "plan" takes the module path too, and counts it.
    replay_path: str = "plan"
    #: Which platform records: "auto", "cuda" or "emulated".
    graph_platform: str = "auto"
    #: Check what is not free to check as well (weights' addresses at each step, each replay, each replay plan and each
    #: call beside its eager run, ...).
    debug: bool = False

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("level", CompilationLevel.parse(self.level, "level"))
        if self.cudagraph_mode is None:
            piecewise = self.level is CompilationLevel.PIECEWISE
            put("cudagraph_mode", CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE)
        else:
            put("cudagraph_mode", CUDAGraphMode.parse(self.cudagraph_mode, "cudagraph_mode"))
        for name in ("splitting_ops", "custom_ops"):
            if getattr(self, name) is not None:
                put(name, _strings(name, getattr(self, name)))
        if isinstance(self.cudagraph_capture_sizes, str):
            _one_of("cudagraph_capture_sizes", self.cudagraph_capture_sizes, LADDERS)
        elif self.cudagraph_capture_sizes is not None:
            sizes = whole_sizes("cudagraph_capture_sizes", self.cudagraph_capture_sizes)
            if not sizes:
                raise ConfigError(
                    "cudagraph_capture_sizes=[] records nothing: write cudagraph_mode='NONE' if that is meant"
                )
            put("cudagraph_capture_sizes", sizes)
        put("compile_sizes", whole_sizes("compile_sizes", self.compile_sizes))
        put("compile_ranges", whole_sizes("compile_ranges", self.compile_ranges))
        _one_of("compiler", self.compiler, COMPILERS)
        _one_of("dispatch", self.dispatch, ("bytecode", "guard_filter"))
        _one_of("compile_at", self.compile_at, ("start", "first_hit"))
        _one_of("replay_path", self.replay_path, REPLAY_PATHS)
        _one_of("graph_platform", self.graph_platform, ("auto", "cuda", "emulated"))
        for name, least in [
            ("cudagraph_num_of_warmups", 0),
            ("max_num_seqs", 1),
            ("tensor_parallel_size", 1),
        ]:
            _whole(name, getattr(self, name), least)
        if self.max_num_batched_tokens is not None:
            _whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}: cgkit runs on one device; use 1"
            )
        for name in ("cudagraph_copy_inputs", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is neither True nor False")
        if not isinstance(self.inductor_compile_config, dict):
            raise ConfigError(
                f"inductor_compile_config={self.inductor_compile_config!r} is not a dict of Inductor's options"
            )
        if self.debug_dump_path is not None and not isinstance(self.debug_dump_path, (str, os.PathLike)):
            raise ConfigError(f"debug_dump_path={self.debug_dump_path!r} is not a path; None writes nothing")
        self._check_custom_ops()
        put("passes", self._checked_passes())
        self._resolve_modes(put)

    def _check_custom_ops(self) -> None:
        for entry in self.custom_ops or ():
            if entry not in ("all", "none") and not (entry[:1] in "+-" and entry[1:].isidentifier()):
                raise ConfigError(f"custom_ops has {entry!r}; use 'all', 'none', '+name' or '-name'")
            if entry[:1] in "+-" and entry[1:] not in CUSTOM_OPS:
                raise ConfigError(f"custom_ops has {entry!r}; the names are {', '.join(CUSTOM_OPS)}")
        if {"all", "none"} <= set(self.custom_ops or ()):
            raise ConfigError(
                f"custom_ops={list(self.custom_ops or ())} holds both 'all' and 'none'; keep one"
            )

    def _checked_passes(self) -> tuple[Any, ...]:
        if isinstance(self.passes, str) or not isinstance(self.passes, list | tuple):
            raise ConfigError(f"passes={self.passes!r} is not a list; write passes=['noop', ...]")
        for each in self.passes:
            if isinstance(each, str):
                if each not in PASSES:
                    near = difflib.get_close_matches(each, PASSES, n=1)
                    hint = f"; do you mean {near[0]!r}?" if near else ""
                    raise ConfigError(f"passes has {each!r}, which is none of {', '.join(PASSES)}{hint}")
            elif isinstance(each, type) or not callable(each):
                raise ConfigError(
                    f"passes has {each!r}; use one of {', '.join(PASSES)}, a function (graph) -> matches, or an "
                    "object of a subclass of cgkit.compiling.passes.GraphPass"
                )
        names = [each for each in self.passes if isinstance(each, str)]
        if len(set(names)) < len(names):
            raise ConfigError(f"passes={list(self.passes)} names one twice")
        if self.passes and self.compiler != "inductor":
            raise ConfigError(
                f"passes={list(self.passes)} with compiler={self.compiler!r}: the passes run inside Inductor; use "
                "compiler='inductor' or leave them out"
            )
        if self.passes and "post_grad_custom_post_pass" in self.inductor_compile_config:
            raise ConfigError(
                "inductor_compile_config has 'post_grad_custom_post_pass', which is where passes=[...] go: put the "
                "pass into passes"
            )
        return tuple(self.passes)

    def _resolve_modes(self, put: Any) -> None:
        """What a level allows; and PIECEWISE without a cut, which is FULL.

        vLLM 0.10.1 (the article) makes an empty ``splitting_ops`` FULL; vLLM 0.33 makes it NONE.
        """
        mode, level = self.cudagraph_mode, self.level
        assert mode is not None
        if mode and level is CompilationLevel.NO_COMPILATION:
            raise ConfigError(
                f"cudagraph_mode={mode.name} at level 0 (NO_COMPILATION): level 0 is the eager reference and records "
                "nothing; use level 2 or 3, or cudagraph_mode='NONE'"
            )
        if level is CompilationLevel.DYNAMO_AS_IS and mode:
            raise ConfigError(
                f"cudagraph_mode={mode.name} at level 1 (DYNAMO_AS_IS): a guard may trace and compile again "
                "at any call, also while recording; use level 2 or 3, or cudagraph_mode='NONE'"
            )
        if level is not CompilationLevel.PIECEWISE:
            if mode.has_mode(CUDAGraphMode.PIECEWISE):
                raise ConfigError(
                    f"cudagraph_mode={mode.name} needs pieces, and level={level.value} ({level.name}) does not "
                    "split; use level 3, or cudagraph_mode='FULL'"
                )
            for name in ("splitting_ops", "compile_sizes", "compile_ranges"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name}={list(getattr(self, name))} has no effect at level {level.value} "
                        f"({level.name}); use level 3 or leave it out"
                    )
        elif self.splitting_ops == () and mode.has_mode(CUDAGraphMode.PIECEWISE):
            warnings.warn(
                f"splitting_ops=[] leaves one piece, so cudagraph_mode={mode.name} becomes FULL: the whole step, "
                "attention included, is recorded (vLLM 0.10.1 does the same, vLLM 0.33 records nothing). "
                "Write cudagraph_mode='FULL' or 'NONE' to say which you mean",
                stacklevel=4,
            )
            put("cudagraph_mode", CUDAGraphMode.FULL)

    def custom_op_enabled(self, name: str) -> bool:
        """Whether the layer ``name`` (:data:`CUSTOM_OPS`) takes its hand-written form.

        ``"+name"`` and ``"-name"`` win over ``"all"`` and ``"none"``. The default is vLLM's: off where Inductor
        compiles, on elsewhere.
        """
        given = self.custom_ops or ()
        if f"+{name}" in given or f"-{name}" in given:
            return f"+{name}" in given
        if "all" in given or "none" in given:
            return "all" in given
        return self.level is CompilationLevel.NO_COMPILATION or self.compiler == "eager"

    @property
    def token_ranges(self) -> tuple[TokenRange, ...]:
        """The ranges between the endpoints in ``compile_ranges``."""
        starts = (1, *(end + 1 for end in self.compile_ranges))
        return tuple(TokenRange(start, end) for start, end in zip(starts, self.compile_ranges))

    @property
    def dynamo_backend(self) -> str:
        """The backend of plain ``torch.compile`` (level 1): the patched adaptor has none, and is Inductor."""
        return "eager" if self.compiler == "eager" else "inductor"

    @property
    def mode(self) -> CUDAGraphMode:
        """``cudagraph_mode`` after the defaults were filled in (never None)."""
        assert self.cudagraph_mode is not None
        return self.cudagraph_mode

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != _default(f)]
        return f"CompilationConfig({', '.join(f'{f.name}={_show(getattr(self, f.name))}' for f in changed)})"


def whole_sizes(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """``sizes`` sorted and freed of doubles; ConfigError for what is not a positive whole number."""
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__iter__"):
        raise ConfigError(f"{name}={sizes!r} is not a list of whole numbers")
    return tuple(sorted({_whole(name, size, 1) for size in sizes}))


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{name} has {value!r}, which is not a whole number")
    if value.__index__() < least:
        raise ConfigError(f"{name} has {value!r}; the least that makes sense is {least}")
    return value.__index__()


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(e, str) for e in value):
        raise ConfigError(f"{name}={value!r} is not a list of strings")
    return tuple(value)


def _default(f: Any) -> Any:
    return f.default_factory() if callable(f.default_factory) else f.default  # type: ignore[misc]


def _show(value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else repr(value)
