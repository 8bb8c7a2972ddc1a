"""Attention as an operator: what it reads, what it writes, and that the graph can be cut at it."""

from __future__ import annotations

import importlib
from dataclasses import fields

import pytest
import torch

from cgkit.errors import CgkitError, ServingError
from cgkit.forward_context import set_forward_context
from cgkit.serving.attention import AttentionMetadata, attention, build_metadata
from cgkit.splitting import registered_ops
from tests.kernels.cases import Case, assert_right, make_case

NAME = "cgkit::unified_attention_with_output"


def in_layer(case: Case, name: str = "layer") -> AttentionMetadata:
    case.metadata.kv_caches = {name: (case.key_cache, case.value_cache)}
    return case.metadata


def test_the_operator_writes_and_attends_through_the_context() -> None:
    case = make_case([1, 7, 3], [20, 7, 40], padded_reqs=1, padded_tokens=2)
    with set_forward_context(in_layer(case)):
        torch.ops.cgkit.unified_attention_with_output(
            case.query, case.key, case.value, case.output, case.scale, "layer"
        )
    assert_right(case)


def fp8_call(case: Case, output: torch.Tensor, scale: float, name: str = "layer") -> None:
    torch.ops.cgkit.unified_attention_with_fp8_output(
        case.query, case.key, case.value, output, case.scale, name, torch.tensor(scale)
    )


def test_the_operator_with_fp8_output_is_attention_and_quantisation() -> None:
    case = make_case([1, 7, 3], [20, 7, 40], padded_reqs=1, padded_tokens=2)
    output = torch.empty_like(case.query, dtype=torch.float8_e4m3fn)
    with set_forward_context(in_layer(case)):
        fp8_call(case, output, 0.01)
        torch.ops.cgkit.unified_attention_with_output(
            case.query, case.key, case.value, case.output, case.scale, "layer"
        )
        with pytest.raises(ServingError, match=r"'second'.*'layer'"):
            fp8_call(case, output, 0.01, "second")
    assert_right(case)
    apart = torch.empty_like(output)
    torch.ops.cgkit.static_fp8_quant(apart, case.output, torch.tensor(0.01))
    assert torch.equal(output.view(torch.uint8), apart.view(torch.uint8))
    with set_forward_context(None):
        fp8_call(case, output, 0.01, "no such layer")
    assert not output.view(torch.uint8).any()


def test_the_helper_scales_by_the_head_size_and_allocates() -> None:
    case = make_case([3], [3])
    with set_forward_context(in_layer(case)):
        implied = attention(case.query, case.key, case.value, "layer")
        given = attention(case.query, case.key, case.value, "layer", scale=case.query.shape[-1] ** -0.5)
        other = attention(case.query, case.key, case.value, "layer", scale=case.scale)
    assert torch.equal(implied, given)
    assert not torch.equal(implied, other)


def test_without_metadata_zeros_and_no_write() -> None:
    query, key = torch.full((4, 2, 8), torch.nan), torch.ones(4, 1, 8)
    with set_forward_context(None):
        assert torch.equal(attention(query, key, key, "no such layer"), torch.zeros_like(query))


def test_without_a_context_it_says_so() -> None:
    query = torch.ones(1, 1, 8)
    with pytest.raises(CgkitError, match="no forward context"):
        attention(query, query, query, "layer")


def test_an_unknown_layer_names_the_known_ones() -> None:
    case = make_case([1], [1])
    with (
        set_forward_context(in_layer(case, "first")),
        pytest.raises(ServingError, match=r"'second'.*'first'"),
    ):
        attention(case.query, case.key, case.value, "second")


def test_a_second_import_registers_nothing_twice() -> None:
    before = registered_ops()[NAME]
    importlib.reload(importlib.import_module("cgkit.serving.attention"))
    after = registered_ops()[NAME]
    assert after.schema == before.schema
    assert after.overload is before.overload
    assert [name for name in registered_ops() if name.endswith("::unified_attention_with_output")] == [NAME]


def test_the_schema_writes_the_output_alone() -> None:
    schema = torch.ops.cgkit.unified_attention_with_output.default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["output"]
    assert not schema.returns


def test_dynamo_leaves_the_operator_whole_and_the_allocation_before_it() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph

    def forward(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return attention(query + 1, key, key, "layer") * 2

    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    case = make_case([1, 2], [9, 2])
    with set_forward_context(in_layer(case)), torch.no_grad():
        result = compiled(case.query, case.key)
        assert torch.equal(result, forward(case.query, case.key))
    names = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
    where = next(i for i, name in enumerate(names) if "unified_attention" in name)
    assert any("empty" in name for name in names[:where])


def test_build_metadata_pads_as_it_says() -> None:
    m = build_metadata([2, 1], [2, 5], [[3], [4, 1]], 4, max_reqs=4, max_tokens=6, max_blocks_per_req=3)
    assert m.block_table.tolist() == [[3, 0, 0], [4, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert m.seq_lens.tolist() == [2, 5, 0, 0]
    assert m.query_start_loc.tolist() == [0, 2, 3, 3, 3]
    assert m.token_to_req.tolist() == [0, 0, 1, 0, 0, 0]
    assert m.slot_mapping.tolist() == [12, 13, 4, -1, -1, -1]
    assert m.positions is not None
    assert m.positions.tolist() == [0, 1, 4, 0, 0, 0]
    assert (m.num_reqs, m.num_tokens, m.max_query_len, m.max_seq_len, m.decode_only) == (2, 3, 2, 5, False)
    kinds = {f.name: getattr(m, f.name).dtype for f in fields(m) if hasattr(getattr(m, f.name), "dtype")}
    assert {k for k, v in kinds.items() if v is torch.int64} == {"slot_mapping", "positions"}
    assert build_metadata([1, 1], [4, 9], [[1], [2, 3, 4]], 4).decode_only


@pytest.mark.parametrize(("new", "total", "blocks"), [(0, 3, [1]), (4, 3, [1]), (1, 9, [1, 2])])
def test_build_metadata_refuses(new: int, total: int, blocks: list[int]) -> None:
    with pytest.raises(ServingError, match="request 0"):
        build_metadata([new], [total], [blocks], 4)
