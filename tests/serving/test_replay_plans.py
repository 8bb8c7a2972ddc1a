"""The runner by its replay plans: whatever the mode and the path, the same logits and the same tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cgkit.capturing import capture
from cgkit.compiling import compile_pieces
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.counters import compilation_counter
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.kernels.fused_torch import FP8
from cgkit.serving.attention import build_metadata
from cgkit.serving.kv_cache import PagedKVCache
from cgkit.serving.linear_attention import TinyLinearAttentionModel
from cgkit.serving.request import Request, Scheduled
from cgkit.serving.runner import Runner
from cgkit.serving.weights import build_model, random_weights
from cgkit.splitting import split_graph
from cgkit.tracing import trace

from .helpers import TOY, generate_alone, prompts_of, toy_and_reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = (1, 2, 4, 8)
LENGTHS = [5, 9, 3, 12, 4, 6]
TOKENS = 12
#: Which requests take part in each step. The batch grows and shrinks, has 3, 5 or 6 tokens where 4 and 8 are recorded,
#: mixes a prompt with decoding within a recorded size and beyond the largest one, and goes from 8 to 1 at once.
STEPS = [
    [0], [0], [0, 2], [0, 2], [0, 1, 2], [0, 1, 2], [1], [0, 1, 2, 3], [0, 1, 2, 3], [4, 5], [0, 1, 2, 3, 4],
    [2], [1, 3, 4, 5, 0, 2], [5],
]  # fmt: skip
PIECEWISE = CUDAGraphMode.PIECEWISE
RECORDED = len(STEPS) - 3  # steps that do not exceed the largest size


def runner_of(mode, path="plan", device="cpu", sizes=SIZES, **options):
    model = build_model(TOY, random_weights(TOY, device=device, seed=0), device=device)
    config = CompilationConfig(
        level=3,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=None if mode == "NONE" else sizes,
        compiler="eager" if device == "cpu" else "inductor",
        replay_path=path,
        max_num_seqs=6,
    )
    runner = Runner(model, config=config, max_model_len=48, block_size=8, **options)
    runner.capture_model()
    return runner


def run(runner, steps=STEPS):
    """The tokens of each request, and (padded size, hidden states of the real tokens) of each step."""
    requests = [Request(prompt, TOKENS) for prompt in prompts_of(LENGTHS)]
    for request in requests:
        request.blocks = runner.kv_cache.allocator.alloc(4)
    seen, sample = [], runner._next_tokens

    def look(hidden, batch, uniform):
        seen.append((hidden.shape[0], hidden[: sum(one.num_tokens for one in batch)].clone()))
        return sample(hidden, batch, uniform)

    runner._next_tokens = look
    try:
        for members in steps:
            batch = [Scheduled(requests[i], requests[i].num_pending) for i in members]
            for (request, count), token in zip(batch, runner.execute(batch).tokens):
                request.advance(count, token)
    finally:
        runner._next_tokens = sample
        for request in requests:
            runner.kv_cache.allocator.free(request.blocks)
    return [request.answer for request in requests], seen


@pytest.mark.parametrize("device", DEVICES)
def test_all_modes_and_both_paths_give_the_same_logits_and_tokens(device):
    reference = toy_and_reference()[1]
    expected = [generate_alone(reference, prompt, TOKENS) for prompt in prompts_of(LENGTHS)]
    seen = {}
    for mode, path in [
        ("NONE", "plan"), ("PIECEWISE", "plan"), ("PIECEWISE", "module"), ("FULL", "plan"),
        ("FULL_DECODE_ONLY", "plan"), ("FULL_AND_PIECEWISE", "plan"), ("FULL_AND_PIECEWISE", "module"),
    ]:  # fmt: skip
        with compilation_counter.expect(num_module_path_steps=0):
            answers, seen[mode, path] = run(runner_of(mode, path, device))
        assert all(one == whole[: len(one)] for one, whole in zip(answers, expected))
        assert sum(map(len, answers)) == sum(map(len, STEPS))
    # The ways that pad alike. FULL alone has one graph for decode batches and others: on a GPU its attention is
    # another kernel there, and only its tokens are compared.
    alike = [key for key in seen if "PIECEWISE" in key[0] or (key[0] == "FULL" and device == "cpu")]
    sizes = [size for size, _ in seen["PIECEWISE", "plan"]]
    assert set(sizes) == {
        1,
        2,
        4,
        8,
        10,
        11,
        15,
    }  # the last three are beyond the largest: no graph, no padding
    for key in alike:
        assert [size for size, _ in seen[key]] == sizes
        for (_, ours), (_, theirs) in zip(seen[key], seen["PIECEWISE", "plan"]):
            assert torch.equal(ours, theirs)


def test_a_mixed_batch_and_a_decode_batch_have_plans_of_their_own():
    runner = runner_of("PIECEWISE")
    frame = runner.executor.captured.plans.to_frame()
    assert list(frame["num_tokens"]) == [8, 8, 4, 4, 2, 2, 1, 1] and frame["laid_out"].all()
    assert set(frame["between"]) == {"3 x torch form, arguments bound"}
    assert list(frame["kind"]) == ["any batch", "decode"] * 4


def test_a_cache_that_was_made_anew_is_seen_and_the_module_path_reads_it():
    runner = runner_of("PIECEWISE")
    expected, _ = run(runner)
    caches = runner.kv_cache.caches
    name = list(caches)[1]
    caches[name] = tuple(torch.zeros_like(tensor) for tensor in caches[name])
    with compilation_counter.expect(num_module_path_steps=RECORDED, num_cudagraph_captured=0):
        assert run(runner)[0] == expected
    assert list(runner.executor.captured.plans.module_steps) == [
        "not the step that a plan was laid out for: metadata.kv_caches"
    ]
    runner.capture_model()
    with compilation_counter.expect(num_module_path_steps=0):
        assert run(runner)[0] == expected


def test_a_cache_whose_memory_was_exchanged_is_seen():
    runner = runner_of("PIECEWISE", sizes=(8,))
    (key, _), *_ = runner.kv_cache.caches.values()
    key.data = torch.zeros_like(key)
    with compilation_counter.expect(num_module_path_steps=1):
        run(runner, [[0]])


def test_releasing_and_capturing_again():
    runner = runner_of("PIECEWISE")
    expected, _ = run(runner)
    first = runner.executor.captured
    runner.executor.release()
    assert first.plans.ready == {} and run(runner)[0] == expected
    with compilation_counter.expect(num_replay_plans_built=8):
        runner.capture_model()
    assert run(runner)[0] == expected and first.plans.ready == {}


def test_decode_inputs_are_those_that_the_general_way_writes():
    runner = runner_of("NONE")
    inputs = runner.inputs
    prompts = prompts_of([9, 1, 17, 4, 5])
    batch = [
        Scheduled(Request(p, 8, blocks=[1 + 4 * i, 2 + 4 * i, 3 + 4 * i], num_computed=len(p) - 1), 1)
        for i, p in enumerate(prompts)
    ]
    for count, padded in [(5, 8), (5, 8), (3, 4), (3, 8), (1, 1), (5, 5), (2, 8)]:
        ours = inputs.fill(batch[:count], padded, decode_only=True)
        taken = {name: tensor.clone() for name, tensor in tensors_of(inputs, ours, padded).items()}
        theirs = inputs.fill(batch[:count], padded, decode_only=False)
        for name, tensor in tensors_of(inputs, theirs, padded).items():
            assert torch.equal(taken[name], tensor), name
        numbers = ("num_reqs", "num_tokens", "max_query_len", "max_seq_len")
        assert [getattr(ours, name) for name in numbers] == [getattr(theirs, name) for name in numbers]
        inputs.fill(batch[:count], padded, decode_only=True)
        inputs.fill(batch[:count], padded, decode_only=True)  # what is left from the last step is right too
        for name, tensor in tensors_of(inputs, theirs, padded).items():
            assert torch.equal(taken[name], tensor), name


def tensors_of(inputs, metadata, padded):
    ids, positions = inputs.front(padded)
    rows = inputs.last_token_rows(metadata.num_reqs)
    per_token = {n: getattr(metadata, n)[:padded] for n in ("slot_mapping", "token_to_req")}
    per_request = {n: getattr(metadata, n) for n in ("seq_lens", "query_start_loc")}
    table = metadata.block_table[: metadata.num_reqs]
    return {"ids": ids, "positions": positions, "rows": rows, "table": table, **per_token, **per_request}


# --- other operators between pieces --------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_linear_attention_by_its_plan(device):
    torch.manual_seed(0)
    model = TinyLinearAttentionModel(num_layers=3).to(device).requires_grad_(False)
    held = build_metadata([1], [1], [[1]], 1000, max_reqs=4, max_tokens=8, device=device)

    def refill(news, totals, slots):
        new = build_metadata(
            news, totals, [[s] for s in slots], 1000, max_reqs=4, max_tokens=8, max_blocks_per_req=1,
            device=device,
        )  # fmt: skip
        for name in ("block_table", "seq_lens", "query_start_loc", "token_to_req"):
            getattr(held, name).copy_(getattr(new, name))

    refill([0] * 0, [], [])
    with set_forward_context(held):
        traced = trace(
            model, torch.zeros(4, dtype=torch.int64, device=device), dynamic_arg_dims={"input_ids": 0}
        )
        compiled = compile_pieces(
            split_graph(traced), CompilationConfig(compiler="eager" if device == "cpu" else "inductor")
        )
        captured = capture(compiled, [2, 4, 8], context=held)
    assert len(captured.plans.ready) == 3
    states = [layer.state for layer in model.layers]

    def serve(run):
        for state in states:
            state.zero_()
        captured.run, usual = run, captured.run
        outputs = []
        try:
            for news, totals, slots in [
                ([3], [3], [2]), ([1, 2], [4, 2], [2, 5]), ([1, 1], [5, 3], [2, 5]), ([1], [6], [2]),
                ([5, 1], [5, 4], [7, 5]),
            ]:  # fmt: skip
                refill(news, totals, slots)
                ids = torch.arange(sum(news), device=device)
                with set_forward_context(held):
                    outputs.append(captured(ids))
        finally:
            captured.run = usual
        return outputs, [state.clone() for state in states]

    with compilation_counter.expect(num_module_path_steps=0):
        ours, our_states = serve(captured.run)
    theirs, their_states = serve(captured.run_module)
    assert all(map(torch.equal, ours, theirs)) and all(map(torch.equal, our_states, their_states))
    assert all(state.any() for state in our_states)


class QuantisedAttention(nn.Module):
    """Attention that writes FP8, between two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.tensor(0.05))

    def forward(self, x: Tensor) -> Tensor:  # (tokens, 2, 16)
        query = x * 2
        output = torch.empty_like(query, dtype=FP8)
        torch.ops.cgkit.unified_attention_with_fp8_output(
            query, x + 1, x - 1, output, 0.25, "layer", self.scale
        )
        return output.to(torch.float32) * self.scale


@pytest.mark.parametrize("device", DEVICES)
def test_attention_that_writes_fp8(device):
    cache = PagedKVCache(1, 5, 4, 2, 16, device=device, layer_names=["layer"])
    dummy = build_metadata([1] * 4, [1] * 4, [[0]] * 4, 4, max_blocks_per_req=2, device=device)
    dummy.slot_mapping.fill_(-1)
    dummy.kv_caches = cache.caches
    model = QuantisedAttention().to(device)
    with set_forward_context(dummy):
        traced = trace(model, torch.zeros(4, 2, 16, device=device))
        split = split_graph(traced, ["cgkit::unified_attention_with_fp8_output"])
        captured = capture(compile_pieces(split, CompilationConfig(compiler="eager")), [4], context=dummy)
    assert len(captured.plans.ready) == 1 and not captured.plans.refused
    how = "torch form, arguments bound" if device == "cpu" else "cuLaunchKernel"
    assert set(captured.plans.to_frame()["between"]) == {f"1 x {how}"}
    real = build_metadata([1] * 4, [3, 5, 1, 8], [[1, 2], [3, 4], [1], [2, 3]], 4, device=device)
    real.kv_caches = cache.caches
    for name in ("block_table", "seq_lens", "query_start_loc", "token_to_req", "slot_mapping"):
        getattr(dummy, name).copy_(getattr(real, name))
    x, outputs = torch.randn(4, 2, 16, device=device), []
    for run in (captured.run, captured.run_module):
        for pair in cache.caches.values():
            for tensor in pair:
                tensor.zero_()
        captured.run = run
        with compilation_counter.expect(num_module_path_steps=0), set_forward_context(dummy):
            outputs.append(captured(x))
    assert torch.equal(*outputs) and outputs[0].isfinite().all() and outputs[0].any()


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_attention_is_launched_through_the_driver():
    runner = runner_of("PIECEWISE", device="cuda")
    frame = runner.executor.captured.plans.to_frame()
    assert frame["laid_out"].all(), frame["refused"].unique()
    print(frame.to_string())  # `pytest -s` shows how
    hows = set(frame["between"])
    assert hows == {"3 x cuLaunchKernel", "3 x cuLaunchKernel + cuLaunchKernel"}
    side = torch.cuda.Stream()
    expected, _ = run(runner)
    with torch.cuda.stream(side):  # launches follow the current stream, as replays do
        assert run(runner)[0] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_ten_thousand_steps_allocate_compile_and_record_nothing(mode):
    import gc
    import resource

    runner = runner_of(mode, device="cuda")
    captured, inputs = runner.executor.captured, runner.inputs
    batch = [
        Scheduled(Request(p, 8, blocks=[1 + 2 * i, 2 + 2 * i], num_computed=len(p) - 1), 1)
        for i, p in enumerate(prompts_of([9, 1, 7, 4]))
    ]
    uniform = mode != "PIECEWISE"

    def replay(count):
        for number in range(count):
            size = (1, 2, 4)[number % 3]
            route_mode, key, padded = runner.executor.route(size, True)
            metadata = inputs.fill(batch[:size], padded, decode_only=True)
            with set_forward_context(metadata, cudagraph_runtime_mode=route_mode, batch_descriptor=key):
                captured.run(*inputs.front(padded))
            if (
                number % 100 == 0
            ):  # the host's side of the buffers is written anew: the device must have read it
                torch.cuda.synchronize()

    with torch.no_grad(), compilation_counter.expect(
        num_cudagraph_captured=0, num_backend_compilations=0, num_module_path_steps=0, num_graphs_seen=0
    ):  # fmt: skip
        replay(1000)
        torch.cuda.synchronize()
        gc.collect()
        before, resident = torch.cuda.memory_stats(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        replay(10_000)
        torch.cuda.synchronize()
        after, grown = (
            torch.cuda.memory_stats(),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident,
        )
    for name in ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.current"):
        assert after[name] == before[name], name
    assert grown <= 1024, (
        f"{grown} KiB of host memory"
    )  # ru_maxrss is in KiB, in steps of the kernel's own batches
    assert uniform or captured.plans.ready


@pytest.mark.gpu
def test_a_key_and_its_plan_on_the_gpu_equal_the_module_path_in_bfloat16():
    model = build_model(TOY, random_weights(TOY, torch.bfloat16, "cuda"), dtype=torch.bfloat16, device="cuda")
    config = CompilationConfig(level=3, cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=(1, 2, 4, 24))
    runner = Runner(model, config=config, max_num_seqs=6, max_model_len=48, block_size=8)
    runner.capture_model()
    captured, inputs = runner.executor.captured, runner.inputs
    batch = [
        Scheduled(Request(p, 8, blocks=[1 + 3 * i, 2 + 3 * i, 3 + 3 * i]), len(p))
        for i, p in enumerate(prompts_of([9, 1, 12]))
    ]
    for padded in (24,):
        metadata, outputs = inputs.fill(batch, padded, decode_only=False), []
        for path in (captured.run, captured.run_module):
            key = BatchDescriptor(padded)
            with torch.no_grad(), set_forward_context(
                metadata, cudagraph_runtime_mode=PIECEWISE, batch_descriptor=key
            ):  # fmt: skip
                outputs.append(path(*inputs.front(padded))[: metadata.num_tokens].clone())
        assert torch.equal(*outputs) and outputs[0].any()
