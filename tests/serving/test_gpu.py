"""The runner on a GPU: the same tokens as on the CPU, through every kind of graph."""

import pytest
import torch

from cgkit import events
from cgkit.config import CompilationConfig
from cgkit.serving.runner import Runner
from cgkit.serving.weights import load_model

from .helpers import prompts_of

pytestmark = pytest.mark.gpu

LENGTHS, SIZES = [9, 1, 17, 4, 5], (1, 2, 4, 8, 40)


def generate(device, level, mode="NONE", dtype=torch.float32):
    loaded = load_model("tiny-llama", device=device, dtype=dtype)
    sizes = None if mode == "NONE" else SIZES
    config = CompilationConfig(level=level, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    runner = Runner(loaded.model, loaded.tokenizer, config, max_num_seqs=5, max_model_len=64)
    before = [t.clone() for pair in runner.kv_cache.caches.values() for t in pair]
    runner.capture_model()
    after = [t for pair in runner.kv_cache.caches.values() for t in pair]
    assert all(torch.equal(old, new) for old, new in zip(before, after))
    with events.record(events.StepRan) as steps:
        answers = runner.generate(prompts_of(LENGTHS), max_tokens=16, stop_at_eos=False)
    return [answer.token_ids for answer in answers], [step.mode for step in steps]


@pytest.mark.parametrize(
    ("level", "mode", "prefill", "decode"),
    [
        (0, "NONE", "NONE", "NONE"),
        (2, "FULL", "FULL", "FULL"),
        (3, "NONE", "NONE", "NONE"),
        (3, "PIECEWISE", "PIECEWISE", "PIECEWISE"),
        (3, "FULL", "FULL", "FULL"),
        (3, "FULL_AND_PIECEWISE", "PIECEWISE", "FULL"),
    ],
)
def test_tokens_are_those_of_the_cpu(level, mode, prefill, decode):
    expected, _ = generate("cpu", 0)
    tokens, modes = generate("cuda", level, mode)
    assert tokens == expected
    assert modes == [prefill] + [decode] * 15


def test_bfloat16_replays_equal_the_compiled_step():
    """Where both pad alike: one request, so that no size is rounded up."""
    loaded = load_model("tiny-llama", device="cuda", dtype=torch.bfloat16)
    tokens = []
    for mode in ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE"):
        sizes = None if mode == "NONE" else (1, 8)
        config = CompilationConfig(level=3, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
        runner = Runner(loaded.model, None, config, max_num_seqs=1, max_model_len=64)
        runner.capture_model()
        tokens.append(runner.generate(prompts_of([8]), max_tokens=24, stop_at_eos=False)[0].token_ids)
    assert tokens[1] == tokens[0]
    assert len(tokens[2]) == 24
