"""Greedy tokens of each family, through the runner, in every mode: what ``transformers`` itself generates."""

import random

import pytest
import torch

import cgkit
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import ServingError
from cgkit.serving import Engine, Runner

from .families import FAMILIES, VOCAB, alone, build, config_of, family, least_gap

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
#: FULL_DECODE_ONLY records the decode graphs of FULL_AND_PIECEWISE: what Inductor makes is the same.
COMPILED_MODES = tuple(mode for mode in MODES if mode != "FULL_DECODE_ONLY")
#: The families that every run of the tests takes, one with rotary positions and one with learned ones.
QUICK = ("Llama", "GPT2")
#: One prompt of a single token, and two that are longer than a step takes.
LENGTHS = [9, 1, 23, 4]
STEP, COUNT = 8, 9


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def expected_of(model):
    """Each prompt's answer by itself; that it tells one model from another is a part of the test."""
    answers = [alone(model, prompt, COUNT) for prompt in prompts()]
    assert len({token for answer in answers for token in answer}) >= 8
    assert min(map(least_gap, [model] * len(answers), prompts(), answers)) > 1e-4
    return answers


def runner_of(model, **config):
    config = CompilationConfig(**{"cudagraph_capture_sizes": [1, 2, 4, 8], "compiler": "eager"} | config)
    return Runner(
        cgkit.adopt(model) if hasattr(model, "generate") else model,
        config=config,
        max_num_seqs=4,
        max_model_len=48,
        max_num_batched_tokens=STEP,
        block_size=4,
        kv_cache_tokens=44,  # the longest request's, and little more: an engine must take blocks away
    )


def answers_of(runner):
    return [answer.token_ids for answer in runner.generate(prompts(), COUNT, stop_at_eos=False)]


def answers_of_engine(runner, mode):
    """The same prompts through continuous batching: in another order, each some steps after the one before it."""
    engine, answers, names = Engine(runner), {}, {}
    chance = random.Random(f"requests by {mode}")  # a seed by which each mode takes blocks away

    def step():
        for output in engine.step():
            if output.finished:
                answers[names[output.request_id]] = output.token_ids

    for number in chance.sample(range(len(LENGTHS)), len(LENGTHS)):
        for _ in range(chance.choice([0, 0, 1, 3])):
            step()
        names[engine.add_request(prompts()[number], COUNT, stop_at_eos=False)] = number
    while engine.has_work:
        step()
    assert engine.num_preemptions > 0
    return [answers[number] for number in range(len(LENGTHS))]


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_greedy_tokens_equal_transformers_own_in_every_mode(name):
    """By the runner and by the engine. Traced and compiled once, recorded anew for each mode."""
    model = family(name)
    expected = expected_of(model)
    runner = runner_of(model, cudagraph_mode="FULL_AND_PIECEWISE")
    with cgkit.compilation_counter.expect(num_graphs_seen=1, num_module_path_steps=0):
        for mode in MODES:
            runner.executor.mode = CUDAGraphMode[mode]
            runner.capture_model()
            assert answers_of(runner) == expected, mode
            assert answers_of_engine(runner, mode) == expected, mode
            recorded = runner.executor.captured
            assert (recorded is None) == (mode == "NONE")
    assert len(runner.executor.split.pieces) == 2 * 2 + 1
    assert [alone(model, prompt, COUNT) for prompt in prompts()] == expected  # it still has its own attention


@pytest.mark.parametrize("name", FAMILIES)
def test_levels_without_graphs_serve_it_too(name):
    model = family(name)
    assert answers_of(runner_of(model, level=0)) == [alone(model, prompt, COUNT) for prompt in prompts()]


@pytest.mark.slow
@pytest.mark.parametrize("mode", COMPILED_MODES)
@pytest.mark.parametrize("name", ["Qwen3", "GPT2"])
def test_greedy_tokens_through_inductor(name, mode):
    model = family(name)
    runner = runner_of(model, cudagraph_mode=mode, compiler="inductor").capture_model()
    assert answers_of(runner) == expected_of(model)


@pytest.mark.slow
def test_two_shapes_of_one_class_in_one_process_are_told_apart():
    """Same class, same sizes: what differs is a number in the configuration."""
    models = [build(config_of("Llama", rms_norm_eps=eps)) for eps in (1e-6, 2.0)]
    runners = [runner_of(model, compiler="inductor").capture_model() for model in models]
    answers = [answers_of(runner) for runner in runners]
    assert answers == [expected_of(model) for model in models] and answers[0] != answers[1]


@pytest.mark.slow
def test_a_second_start_loads_the_trace_and_another_shape_does_not(compile_cache):
    model, other = (build(config_of("GPT2", layer_norm_epsilon=eps)) for eps in (1e-5, 0.1))
    for each, loaded in ((model, 0), (model, 1), (other, 0)):
        with cgkit.compilation_counter.expect(num_traces_loaded=loaded, num_traces_saved=1 - loaded):
            runner = runner_of(each, compiler="inductor").capture_model()
        assert answers_of(runner) == expected_of(each)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", COMPILED_MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_on_a_gpu(name, mode):
    model = build(config_of(name)).cuda()
    adopted = cgkit.adopt(model)
    runner = runner_of(adopted, cudagraph_mode=mode, compiler="inductor").capture_model()
    ids = [torch.tensor([prompt], device="cuda") for prompt in prompts()]
    own = [
        model.generate(
            each, attention_mask=torch.ones_like(each), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
        )
        for each in ids
    ]
    expected = [out[0, each.shape[1] :].tolist() for each, out in zip(ids, own)]
    assert answers_of(runner) == expected


# --- windows -------------------------------------------------------------------------------------


def test_a_sliding_window_ends_a_request_and_is_right_up_to_its_end():
    model = build(config_of("Mistral", sliding_window=32))
    adopted = cgkit.adopt(model)
    assert adopted.config.max_position_embeddings == 32 and "sliding window" in adopted.config.limited_by
    runner = Runner(adopted, config=CompilationConfig(level=0), block_size=4)
    assert runner.max_model_len == 32
    (answer,) = runner.generate([prompts()[2]], 32 - LENGTHS[2], stop_at_eos=False)
    assert answer.token_ids == alone(model, prompts()[2], 32 - LENGTHS[2])
    with pytest.raises(ServingError, match=r"32 positions of .*look back 32 tokens"):
        Runner(adopted, max_model_len=33)


def test_beyond_its_window_a_model_sees_less_than_cgkits_attention():
    """Why there is a limit at all: the same weights without a window answer a longer prompt otherwise."""
    narrow, wide = (build(config_of("Mistral", sliding_window=window)) for window in (4, None))
    long = prompts()[2]
    assert alone(narrow, long, COUNT) != alone(wide, long, COUNT)
    assert cgkit.adopt(wide).config.max_position_embeddings == 128


# --- other things of a model ---------------------------------------------------------------------


def test_an_end_token_of_the_models_own_ends_an_answer():
    model = family("Llama")
    answer = alone(model, prompts()[0], COUNT)
    ending = build(config_of("Llama", eos_token_id=answer[3]))
    adopted = cgkit.adopt(ending)
    assert adopted.config.eos_token_ids == (answer[3],)
    runner = Runner(adopted, config=CompilationConfig(level=0), max_model_len=48)
    (stopped,) = runner.generate([prompts()[0]], COUNT)
    assert stopped.token_ids == answer[: answer.index(answer[3]) + 1] and stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    ("name", "more"), [("Granite", {"logits_scaling": 3.0}), ("Cohere", {"logit_scale": 0.25})]
)
def test_what_a_family_does_after_its_projection_is_done(name, more):
    """The logits themselves are compared: a scale would not change the greedy token."""
    model = build(config_of(name, **FAMILIES["Llama"], **more))
    adopted = cgkit.adopt(model)
    assert not adopted.head.plain
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(3))
    factor = 0.25 if name == "Cohere" else 1 / 3.0
    torch.testing.assert_close(adopted.compute_logits(hidden), model.lm_head(hidden) * factor)


def test_the_weights_are_shared_and_the_model_itself_is_left_as_it_was():
    model = build(config_of("Llama")).train()
    before = model.config._attn_implementation
    adopted = cgkit.adopt(model)
    assert model.training and model.config._attn_implementation == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in adopted.parameters())
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in adopted.parameters()} == own
