"""The runner without graphs: buffers, batches, requests that come and go, and bad input."""

import dataclasses

import numpy as np
import pytest
import torch

from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import ServingError
from cgkit.serving.request import Request, Scheduled
from cgkit.serving.runner import Runner
from cgkit.serving.sampling import SamplingParams
from cgkit.serving.tokenizer import ByteTokenizer
from cgkit.serving.weights import load_model

from .helpers import TOY, generate_alone, prompts_of, run_all, toy_and_reference

EAGER = CompilationConfig(level=0)
LENGTHS = [9, 1, 17, 4, 30]


def runner_of(**options):
    options = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 4} | options
    return Runner(toy_and_reference()[0], config=EAGER, **options)


@pytest.fixture(scope="module")
def expected():
    reference = toy_and_reference()[1]
    return [generate_alone(reference, prompt, 12) for prompt in prompts_of(LENGTHS)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_seqs": 5}, id="all-at-once"),
        pytest.param({"max_num_seqs": 2}, id="two-seats"),
        pytest.param({"max_num_batched_tokens": 7}, id="chunked-prefill"),
        pytest.param({"kv_cache_tokens": 64}, id="short-of-blocks"),
        pytest.param({"block_size": 16}, id="large-blocks"),
    ],
)
def test_batches_give_what_transformers_gives_each_prompt_alone(options, expected):
    runner = runner_of(**options)
    free = runner.kv_cache.allocator.num_free
    answers = runner.generate(prompts_of(LENGTHS), max_tokens=12)
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert runner.kv_cache.allocator.num_free == free


def test_steps_are_reported_and_the_batch_shrinks_as_requests_stop(expected):
    runner = runner_of(max_num_seqs=5)
    # Each request stops at a token of its own, so they leave at different steps.
    stops = [answer[index] for index, answer in enumerate(expected)]
    requests = [
        Request(prompt, 12, stop_ids=frozenset([stop])) for prompt, stop in zip(prompts_of(LENGTHS), stops)
    ]
    for request in requests:
        request.blocks = runner.kv_cache.allocator.alloc(11)
    steps = run_all(runner, requests)
    for request, answer, stop in zip(requests, expected, stops):
        assert request.answer == answer[: answer.index(stop) + 1]
    assert (steps[0].kind, steps[0].num_tokens) == ("prefill", sum(LENGTHS))
    assert {step.kind for step in steps[1:]} == {"decode"} and len(steps) > 1
    sizes = [step.num_reqs for step in steps]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 5
    assert all(step.mode == "NONE" and step.num_padded_tokens == step.num_tokens for step in steps)


def test_prefill_and_decode_of_different_requests_may_share_a_step(expected):
    """What a continuous-batching scheduler does; ``generate`` does not."""
    runner = runner_of()
    old, new = (Request(prompt, 12) for prompt in prompts_of(LENGTHS)[:3:2])
    old.blocks, new.blocks = ([1, 9, 3, 7, 5, 11], [2, 12, 4, 6, 8, 10, 13, 14])
    outputs = [runner.execute([Scheduled(old, 9)])]
    old.advance(9, outputs[0].tokens[0])
    for share in (5, 12):  # the new one in two chunks, the old one decoding beside it
        outputs.append(runner.execute([Scheduled(new, share), Scheduled(old, 1)]))
        new.advance(share, outputs[-1].tokens[0])
        old.advance(1, outputs[-1].tokens[1])
    outputs.append(runner.execute([Scheduled(old, 1), Scheduled(new, 1)]))
    assert outputs[1].tokens[0] is None
    assert old.answer == expected[0][:3] and new.answer == expected[2][:1]
    assert outputs[3].tokens == [expected[0][3], expected[2][1]]
    assert [output.kind for output in outputs] == ["prefill", "prefill", "prefill", "decode"]


def each_field(metadata):
    return [getattr(metadata, field.name) for field in dataclasses.fields(metadata)]


def test_inputs_never_move():
    runner = runner_of(max_num_seqs=5)
    inputs = runner.inputs

    def addresses():
        metadata = [inputs.fill_dummy(2, True), inputs.fill_dummy(9, False)]
        tensors = [inputs.input_ids, inputs.positions, inputs.last_token_rows(1)]
        tensors += [
            value for each in metadata for value in each_field(each) if isinstance(value, torch.Tensor)
        ]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    assert len(before) == 3 + 2 * 6 and len(set(before)) == 8
    runner.generate(prompts_of(LENGTHS), max_tokens=3)
    assert addresses() == before


def test_padding_touches_no_request():
    runner = runner_of(max_num_seqs=4, max_num_batched_tokens=16)
    request = Request(prompts_of([3])[0], 4, blocks=[5])
    big = Request(prompts_of([9])[0], 4, blocks=[6, 7, 8])
    runner.inputs.fill([Scheduled(big, 9)], 9, decode_only=False)
    metadata = runner.inputs.fill([Scheduled(request, 3)], 8, decode_only=False)
    assert metadata.slot_mapping[:8].tolist() == [20, 21, 22, -1, -1, -1, -1, -1]
    assert metadata.seq_lens.tolist() == [3, 0, 0, 0]
    assert metadata.query_start_loc.tolist() == [0, 3, 3, 3, 3]
    assert metadata.positions[:8].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("decode_only", [True, False])
def test_dummy_inputs_are_valid_and_write_nothing(decode_only):
    runner = runner_of()
    size = 4 if decode_only else 21
    metadata = runner.inputs.fill_dummy(size, decode_only)
    assert (
        metadata.decode_only == decode_only
        and metadata.max_query_len == (1 if decode_only else 6)
        and metadata.num_reqs == 4
    )
    assert metadata.slot_mapping[:size].eq(-1).all()
    lengths = np.diff(metadata.query_start_loc.numpy())
    assert lengths.sum() == size and (lengths == metadata.seq_lens.numpy()).all()


def test_sampling_is_the_requests_own():
    runner = runner_of()
    prompts = prompts_of([6, 3, 8])
    hot = [SamplingParams(temperature=1.2, top_k=20, top_p=0.95, seed=seed) for seed in (1, 2, 3)]
    together = runner.generate(prompts, 8, hot)
    alone = [runner.generate([prompt], 8, [each])[0] for prompt, each in zip(prompts, hot)]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    other = runner.generate(prompts, 8, SamplingParams(temperature=1.2, seed=99))
    assert [a.token_ids for a in other] != [a.token_ids for a in alone]


def test_text_goes_in_and_comes_out():
    loaded = load_model("tiny-llama")
    runner = Runner(loaded.model, loaded.tokenizer, EAGER, max_num_seqs=2, max_model_len=64)
    one = runner.generate("hello", max_tokens=5, stop_at_eos=False)
    assert one[0].prompt_token_ids == ByteTokenizer().encode("hello")
    assert isinstance(one[0].text, str) and len(one[0].token_ids) == 5
    several = runner.generate(["a", "bc", "def"], max_tokens=2, stop_at_eos=False)
    assert [len(each.token_ids) for each in several] == [2, 2, 2]


BAD_PROMPTS = [
    pytest.param([[1, 2], []], {}, "prompt 1 is empty", id="empty"),
    pytest.param(["text"], {}, "no tokenizer", id="text-without-tokenizer"),
    pytest.param([[1, 97]], {}, "token 97.*ends at 96", id="unknown-token"),
    pytest.param([[1] * 60], {"max_tokens": 9}, "60 .*9 more.*max_model_len holds 64.*to 4", id="long"),
    pytest.param([[1] * 70], {}, "70 tokens.*larger max_model_len", id="longer-than-the-model"),
    pytest.param([[1.5]], {}, "prompt 0 is neither text nor", id="no-token-ids"),
    pytest.param([3.5], {}, "prompt 0 is neither text nor", id="no-prompts"),
    pytest.param([[1]], {"max_tokens": 0}, "max_tokens=0", id="no-tokens"),
    pytest.param([[1]], {"sampling": []}, "0 sampling parameters for 1 prompts", id="sampling"),
]


@pytest.mark.parametrize(("prompts", "options", "says"), BAD_PROMPTS)
def test_bad_requests_are_refused_and_the_runner_stays_usable(prompts, options, says, expected):
    runner = runner_of()
    free = runner.kv_cache.allocator.num_free
    good = prompts_of(LENGTHS)[:1]
    with pytest.raises(ServingError, match=says):
        runner.generate(prompts, **options)
    assert runner.kv_cache.allocator.num_free == free
    assert runner.generate(good, 12)[0].token_ids == expected[0]


def test_a_prompt_longer_than_the_cache_names_the_cache():
    runner = runner_of(kv_cache_tokens=16)
    with pytest.raises(ServingError, match=r"20 tokens.*the KV cache holds 16.*larger kv_cache_tokens"):
        runner.generate([[1] * 20])


def test_an_interrupted_generate_gives_its_blocks_back(monkeypatch):
    runner = runner_of()
    free = runner.kv_cache.allocator.num_free
    calls = []

    def dies(batch):
        calls.append(batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", dies)
        with pytest.raises(KeyboardInterrupt):
            runner.generate(prompts_of([5, 6]))
    assert calls and runner.kv_cache.allocator.num_free == free
    assert len(runner.generate(prompts_of([5, 6]), 3)) == 2


def test_a_step_that_does_not_fit_is_refused():
    runner = runner_of(max_num_batched_tokens=16)
    request = Request(list(range(20)), 4, blocks=[1, 2])
    for batch, says in [
        ([], "0 requests"),
        ([Scheduled(request, 17)], "17 tokens"),
        ([Scheduled(request, 0)], "0 tokens scheduled"),
        ([Scheduled(request, 9)], "9 tokens has 2 blocks of 4"),
        ([Scheduled(Request([1] * 65, 1, blocks=[1]), 1)] * 5, "5 requests"),
    ]:
        with pytest.raises(ServingError, match=says):
            runner.execute(batch)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_model_len": 300}, "beyond the 256 positions"),
        ({"block_size": 0}, "block_size=0"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens=0"),
    ],
)
def test_wrong_numbers_are_refused_by_name(options, says):
    with pytest.raises(ServingError, match=says):
        runner_of(**options)


def test_logits_are_taken_from_each_requests_last_token():
    """A batch of unequal chunks: the rows are those before each next start, not the first ones."""
    runner = runner_of()
    batch = [
        Scheduled(Request(p, 2, blocks=[1 + 9 * i + j for j in range(9)]), len(p))
        for i, p in enumerate(prompts_of([4, 1, 30]))
    ]
    runner.inputs.fill(batch, 35, decode_only=False)
    assert runner.inputs.last_token_rows(3).tolist() == [3, 4, 34]
    assert torch.equal(runner.inputs.input_ids[:35], torch.tensor([t for r, _ in batch for t in r.prompt]))


def test_mode_none_needs_no_capture():
    runner = runner_of()
    assert runner.config.mode is CUDAGraphMode.NONE and not runner.config.cudagraph_copy_inputs
    runner.capture_model()  # says that there is nothing to record, and does nothing
    assert TOY.vocab_size == 97


def test_the_last_line_of_a_cell_says_what_it_is():
    loaded = load_model("tiny-llama")
    weights = sum(each.numel() for each in loaded.model.parameters())
    assert (
        repr(loaded)
        == f"LoadedModel(tiny-llama: 4 layers, {weights:,} parameters, float32 on cpu; {loaded.source}; "
        "tokenizer ByteTokenizer)"
    )
    runner = runner_of(max_num_seqs=3)
    lines = repr(runner).splitlines()
    assert lines[0].endswith("float32 on cpu: at most 3 requests and 64 tokens a step, 64 tokens a request")
    assert lines[1:] == ["  Executor(level 0, NONE: eager)", f"  {runner.kv_cache!r}"]
    assert repr(runner.inputs).startswith("InputBatch(64 tokens of 3 requests at most, 8 buffers")
    later = Runner(loaded.model, config=CompilationConfig(compiler="eager"), max_num_seqs=3, max_model_len=64)
    assert "Executor(level 3, PIECEWISE: not compiled yet (capture_model(), or the first step))" in repr(
        later
    )
