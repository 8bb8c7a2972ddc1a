"""Real weights, real prompts: the same greedy tokens whatever was compiled and recorded."""

import time

import pytest
import torch

from cgkit import events
from cgkit.capturing.emulated import EmulatedGraph
from cgkit.config import CompilationConfig
from cgkit.serving.runner import Runner
from cgkit.serving.tokenizer import chat_prompt
from cgkit.serving.weights import SMOLLM2, load_model

from .helpers import generate_alone, in_transformers, need_smollm2

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain to a child why the sky is blue, in two sentences.",
    "List three prime numbers above 20.",
    "Translate 'good morning' into Spanish, German and Italian.",
    "Who wrote Pride and Prejudice, and when was it published?",
    "Name a fruit.",
    "What does a compiler do? Answer for somebody who has never programmed, and give one example.",
]
TOKENS, SEATS = 48, 7  # seven decode together, padded to 8; the eighth waits and then runs alone
SIZES = (1, 2, 4, 8, 384)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def loaded():
    need_smollm2()
    return load_model(SMOLLM2)


@pytest.fixture(scope="module")
def prompts(loaded):
    return [loaded.tokenizer.encode(chat_prompt(loaded.tokenizer, question)) for question in QUESTIONS]


@pytest.fixture(scope="module")
def expected(loaded, prompts):
    """What ``transformers`` generates for each prompt alone, going on after an end token."""
    reference = in_transformers(loaded.model)
    reference.generation_config.eos_token_id = None
    return [generate_alone(reference, prompt, TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    ("level", "mode", "prefill", "decode"),
    [
        pytest.param(0, "NONE", "NONE", "NONE", id="eager"),
        pytest.param(3, "NONE", "NONE", "NONE", id="compiled"),
        pytest.param(3, "PIECEWISE", "PIECEWISE", "PIECEWISE", id="piecewise"),
        pytest.param(3, "FULL", "FULL", "FULL", id="full"),
        pytest.param(3, "FULL_AND_PIECEWISE", "PIECEWISE", "FULL", id="full-and-piecewise"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    level, mode, prefill, decode, loaded, prompts, expected, replays
):
    sizes = None if mode == "NONE" else SIZES
    config = CompilationConfig(level=level, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    runner = Runner(
        loaded.model,
        loaded.tokenizer,
        config,
        max_num_seqs=SEATS,
        max_model_len=128,
        max_num_batched_tokens=384,
    )
    started = time.perf_counter()
    with events.record(events.PlanBuilt) as plans:
        runner.capture_model()
    captured = time.perf_counter()
    pieces = loaded.config.num_hidden_layers + 1
    # Recording runs nothing; then each plan of graphs and operators is held against the module path, once.
    assert len(plans) == (
        2 * len(SIZES) - 1 if "PIECEWISE" in mode else 0
    )  # 384 is no size of a decode batch
    assert len(replays) == 2 * pieces * len(plans)
    replays.clear()
    with events.record(events.StepRan) as steps:
        answers = runner.generate(prompts, TOKENS, stop_at_eos=False)
    print(f"\n{mode}: ready in {captured - started:.1f} s; ms a step {milliseconds(steps)}")
    assert [answer.token_ids for answer in answers] == expected
    # Seven prefilled together and decoded to the end, then the eighth by itself.
    decodes = TOKENS - 1
    assert [step.num_reqs for step in steps] == [SEATS] * (1 + decodes) + [1] * (1 + decodes)
    assert len({len(prompt) for prompt in prompts}) >= 6
    assert [step.mode for step in steps] == ([prefill] + [decode] * decodes) * 2
    padded = [step.num_padded_tokens for step in steps if step.kind == "decode"]
    assert padded == [7 if decode == "NONE" else 8] * decodes + [1] * decodes
    graphs = {"NONE": 0, "PIECEWISE": pieces, "FULL": 1}
    assert len(replays) == 2 * graphs[prefill] + 2 * decodes * graphs[decode]


@pytest.fixture
def replays(monkeypatch):
    """A list that grows by one entry at each replay of any recorded graph."""
    counted, replay = [], EmulatedGraph.replay

    def counting(graph):
        counted.append(graph)
        return replay(graph)

    monkeypatch.setattr(EmulatedGraph, "replay", counting)  # a wrapper binds it when it records
    return counted


def milliseconds(steps):
    """Medians by kind and number of requests."""
    kinds = {(step.kind, step.num_reqs) for step in steps}
    return {
        kind: round(
            1e3 * float(torch.tensor([s.seconds for s in steps if (s.kind, s.num_reqs) == kind]).median()), 1
        )
        for kind in sorted(kinds)
    }
