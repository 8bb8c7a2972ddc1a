"""What becomes of a graph mode: every combination against a table of vLLM's rule."""

from __future__ import annotations

import logging

import pytest

from cgkit.capturing.modes import resolutions_frame, resolve_cudagraph_mode
from cgkit.config import AttentionCGSupport, CompilationConfig, CUDAGraphMode
from cgkit.errors import ConfigError
from cgkit.serving.executor import Executor, cuts_attention
from cgkit.serving.llama import PRESETS
from cgkit.serving.weights import random_model

#: Read off vLLM 0.33, ``CompilationConfig.resolve_cudagraph_mode_and_sizes`` (vllm/config/compilation.py), by hand; the
#: columns are what attention supports, as in the table of docs/design/cuda_graphs.md. "-": it raises ValueError.
#: (The same rule stands in ``GPUModelRunner`` of earlier versions.)
ORDER = ("ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE", "NEVER")
N, P, F, D, B = "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"
CUT = {N: (N, N, N, N), P: (P, P, P, P), F: (F, B, B, "-"), D: (D, D, D, P), B: (B, B, B, P)}
WHOLE = {N: (N, N, N, N), P: (P, P, P, P), F: (F, D, D, "-"), D: (D, D, D, N), B: (B, B, B, N)}
#: With decode batches of several tokens a request.
CUT_SPEC = {**CUT, F: (F, B, P, "-"), D: (D, D, P, P), B: (B, B, P, P)}
WHOLE_SPEC = {**WHOLE, F: (F, D, N, "-"), D: (D, D, N, N), B: (B, B, N, N)}

CASES = [
    (asked, support, cut, length, given)
    for table, cut, length in ((CUT, True, 1), (WHOLE, False, 1), (CUT_SPEC, True, 3), (WHOLE_SPEC, False, 3))
    for asked, row in table.items()
    for support, given in zip(ORDER, row)
]


def test_the_table_has_every_combination():
    assert len(CASES) == len(CUDAGraphMode) * len(AttentionCGSupport) * 2 * 2


@pytest.mark.parametrize(("asked", "support", "cut", "length", "given"), CASES)
def test_a_mode_becomes_what_vllm_makes_of_it(asked, support, cut, length, given):
    if given == "-":
        with pytest.raises(ConfigError, match=f"{asked}.*{support}.*PIECEWISE"):
            resolve_cudagraph_mode(asked, support, cut, length)
        return
    found = resolve_cudagraph_mode(asked, support, cut, length)
    assert found.mode.name == given and found.asked.name == asked
    assert found.changed == (asked != given)
    assert found.said.startswith(f"asked for {asked}, given {given}: ")
    if asked != N:  # the reason names what the attention supports
        assert support in found.said
    again = resolve_cudagraph_mode(found.mode, support, cut, length)
    assert again.mode is found.mode and not again.changed


@pytest.mark.parametrize(("asked", "support", "cut", "length", "given"), CASES)
def test_where_attention_stands_is_said_as_it_is(asked, support, cut, length, given):
    """Pieces hold the attention that is not cut out; vLLM gives the mode all the same, and so the sentence warns."""
    if given == "-":
        return
    found = resolve_cudagraph_mode(asked, support, cut, length)
    assert cut or "between" not in found.said
    assert found.unsafe == (not cut and support != "ALWAYS" and given in (P, B))
    assert ("with it inside" in found.said) == found.unsafe


def test_the_frame_holds_the_rule():
    frame = resolutions_frame(uniform_query_lens=(1, 3))
    wanted = {(a, s, c, n): "refused" if g == "-" else g for a, s, c, n, g in CASES}
    rows = frame.to_dict("records")
    got = {(r["asked"], r["support"], r["attention_cut"], r["uniform_query_len"]): r["given"] for r in rows}
    assert got == wanted and len(frame) == len(wanted)
    assert len(resolutions_frame(True)) == 20


@pytest.mark.parametrize(
    ("changes", "cut"),
    [
        ({}, True),
        ({"splitting_ops": ["cgkit::unified_attention_with_output"]}, True),
        ({"splitting_ops": ["cgkit.linear_attention_with_output"]}, True),
        ({"splitting_ops": ["aten::mm"]}, False),
        ({"splitting_ops": [], "cudagraph_mode": "FULL"}, False),
        ({"level": 2}, False),
    ],
)
def test_whether_attention_is_cut_out(changes, cut):
    assert cuts_attention(CompilationConfig(**changes)) is cut


def test_a_runner_says_what_became_of_its_mode(caplog):
    model = random_model(PRESETS["tiny-llama"].scaled(num_hidden_layers=1))
    config = CompilationConfig(cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2])
    with caplog.at_level(logging.WARNING, logger="cgkit"):
        executor = Executor(model, config, AttentionCGSupport.UNIFORM_BATCH)
    assert executor.mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert executor.resolution.said in caplog.text and "asked for FULL" in caplog.text
    caplog.clear()
    Executor(model, config)
    assert caplog.text == ""
    uncut = CompilationConfig(splitting_ops=["aten::mm"], cudagraph_capture_sizes=[1, 2])
    with caplog.at_level(logging.WARNING, logger="cgkit"):
        Executor(model, uncut, AttentionCGSupport.NEVER)
    assert "with it inside and may compute nonsense" in caplog.text
    with pytest.raises(ConfigError, match="NEVER"):
        Executor(model, config, AttentionCGSupport.NEVER)
