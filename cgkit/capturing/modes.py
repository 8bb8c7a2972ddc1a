"""What becomes of a graph mode, given what the attention supports; and the sentence that says so.

Implements the article's "CUDAGraphMode：一张图还是几段图" (one graph or several) where it meets the attention: a
mode is a wish, and the attention inside a whole graph decides whether it can be granted. The rule is vLLM's
(``CompilationConfig.resolve_cudagraph_mode_and_sizes`` in ``vllm/config/compilation.py`` of 0.33, before that
``GPUModelRunner._check_and_update_cudagraph_mode``; the support table is in its ``docs/design/cuda_graphs.md``),
in the order in which it asks:

1. every batch in one graph (FULL) needs attention that always may stand in one. If only uniform batches may, decode
   keeps its whole graphs and the rest goes in pieces, or without a graph where attention is not cut out. If
   it may never, the configuration is refused;
2. whole graphs for decode need attention that may stand in one at least for decode. Otherwise everything goes in pieces
   where attention is cut out, and without a graph elsewhere;
3. decode batches of several tokens a request (speculative decoding) need attention that supports uniform batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cgkit.config import AttentionCGSupport, CUDAGraphMode
from cgkit.errors import ConfigError

_FULL, _PIECEWISE, _NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
_MAY = {
    AttentionCGSupport.ALWAYS: "may stand inside a recorded graph for any batch",
    AttentionCGSupport.UNIFORM_BATCH: "may stand inside a recorded graph only for uniform batches",
    AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE: (
        "may stand inside a recorded graph only for decode batches of one token a request"
    ),
    AttentionCGSupport.NEVER: "may never stand inside a recorded graph",
}


class ModeResolution(NamedTuple):
    """The mode that is given, and the sentence that says what was asked, what is given and why."""

    mode: CUDAGraphMode
    said: str
    #: The mode that was asked for.
    asked: CUDAGraphMode
    #: Whether attention will stand in graphs of batches that it does not support; ``said`` ends with that then.
    unsafe: bool = False

    @property
    def changed(self) -> bool:
        """Whether something else is given than was asked for."""
        return self.mode is not self.asked


def resolve_cudagraph_mode(
    mode: CUDAGraphMode | str,
    support: AttentionCGSupport | str,
    splitting: bool,
    uniform_query_len: int = 1,
) -> ModeResolution:
    """The mode that attention of this ``support`` allows.

    Args:
        mode: what is asked for.
        support: the least that any attention of the model supports.
        splitting: whether attention is cut out of the pieces. Without a cut it stands in every graph.
        uniform_query_len: tokens of each request in a uniform decode batch (more than 1: speculative decoding).

    Raises:
        ConfigError: FULL is asked for and the attention supports no graph at all. (vLLM refuses it too.)
    """
    asked = CUDAGraphMode.parse(mode, "cudagraph_mode")
    held = AttentionCGSupport.parse(support, "support")
    never = held is AttentionCGSupport.NEVER
    given, whys = asked, []
    if asked.mixed_mode() is _FULL and held is not AttentionCGSupport.ALWAYS:
        if never:
            raise ConfigError(
                f"cudagraph_mode={asked.name} records attention for every batch, and this attention {_MAY[held]} "
                f"({held.name}); use cudagraph_mode='PIECEWISE' at level 3, which leaves it between the graphs"
            )
        given = CUDAGraphMode.FULL_AND_PIECEWISE if splitting else CUDAGraphMode.FULL_DECODE_ONLY
        others = (
            "go in recorded pieces without it"
            if splitting
            else "run without a graph, since it is not cut out"
        )
        whys.append(f"decode keeps whole graphs, other batches {others}")
    if given.decode_mode() is _FULL and never:
        given = _PIECEWISE if splitting else _NONE
        whys.append(_without_attention(splitting))
    elif (
        given.decode_mode() is _FULL
        and uniform_query_len > 1
        and held.value < AttentionCGSupport.UNIFORM_BATCH.value
    ):
        given = _PIECEWISE if splitting else _NONE
        whys.append(
            f"a decode batch has {uniform_query_len} tokens a request; {_without_attention(splitting)}"
        )
    why = (
        f"this attention {_MAY[held]} ({held.name}), so {', and '.join(whys)}"
        if whys
        else _as_asked(asked, held, splitting)
    )
    risk = _risk(given, held, splitting)
    said = f"asked for {asked.name}, given {given.name}: {why}{risk and f'; {risk}'}"
    return ModeResolution(given, said, asked, bool(risk))


def _without_attention(splitting: bool) -> str:
    if splitting:
        return "every batch goes in recorded pieces with attention between them"
    return "nothing is recorded, since attention is not cut out of the pieces"


def _risk(given: CUDAGraphMode, held: AttentionCGSupport, splitting: bool) -> str:
    """What nobody refuses and is wrong all the same: pieces that hold an attention which may not stand in a graph of
    any batch. vLLM gives the mode too; its pieces hold none unless somebody names other splitting operators."""
    if splitting or held is AttentionCGSupport.ALWAYS or not given.has_mode(_PIECEWISE):
        return ""
    return (
        f"it is not cut out, so pieces are recorded with it inside and may compute nonsense ({held.name}): name it in "
        "splitting_ops, or use another mode"
    )


def _as_asked(asked: CUDAGraphMode, held: AttentionCGSupport, splitting: bool) -> str:
    """Why nothing had to be changed."""
    if asked is _NONE:
        return "nothing is to be recorded"
    if asked is _PIECEWISE and splitting:
        return f"attention stands between the recorded pieces, so it does not matter that it {_MAY[held]} ({held.name})"
    return f"this attention {_MAY[held]} ({held.name})"


def resolutions_frame(splitting: bool | None = None, *, uniform_query_lens: Sequence[int] = (1,)) -> Any:
    """A DataFrame of the whole rule: a row a mode asked for and kind of support.

    Columns ``asked``, ``support``, ``attention_cut``, ``uniform_query_len``, ``given`` ("refused" where the
    configuration raises) and ``said``. ``splitting=None``: with and without the cut.
    """
    import pandas as pd

    rows = []
    for cut in (True, False) if splitting is None else (splitting,):
        for length in uniform_query_lens:
            for support in sorted(AttentionCGSupport, key=lambda each: -each.value):
                for mode in CUDAGraphMode:
                    try:
                        found = resolve_cudagraph_mode(mode, support, cut, length)
                        given, said = found.mode.name, found.said
                    except ConfigError as error:
                        given, said = "refused", str(error)
                    row = {"asked": mode.name, "support": support.name, "attention_cut": cut}
                    rows.append({**row, "uniform_query_len": length, "given": given, "said": said})
    return pd.DataFrame(rows)
