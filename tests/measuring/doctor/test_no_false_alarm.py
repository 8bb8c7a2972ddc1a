"""Models that are right get neither an error nor a warning: ours, each family of ``transformers``, SmolLM2.

That each family is adopted and gives equal tokens replayed is tests/serving/adopt/test_families.py, and SmolLM2
tests/serving/test_smollm2.py; here are the report's sides of it.
"""

from __future__ import annotations

import pytest
import torch

import cgkit
from cgkit.measuring.doctor import CHECKS
from cgkit.serving.llama import PRESETS, Llama
from tests.serving.adopt.families import FAMILIES, build, config_of, family
from tests.serving.helpers import need_smollm2

CONFIG = cgkit.CompilationConfig(cudagraph_capture_sizes=[1, 2, 4, 8], max_num_seqs=8)
TOKENS = torch.arange(6) + 3, torch.arange(6)
OTHER = torch.arange(5) + 5, torch.arange(5)


def healthy(report):
    assert report.ok, report
    assert report.not_checked == {}, report.not_checked
    return report


def test_our_llama():
    model = Llama(PRESETS["tiny-llama"]).eval()
    healthy(cgkit.doctor(model, *TOKENS, config=CONFIG, other_inputs=[OTHER]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_as_it_is_and_adopted(name):
    layers = {"n_layer": 1} if name == "GPT2" else {"num_hidden_layers": 1}
    ids = torch.arange(12).reshape(2, 6) + 3
    healthy(cgkit.doctor(build(config_of(name, **layers)), ids, config=CONFIG, use_cache=False))
    report = healthy(cgkit.doctor(cgkit.adopt(family(name)), *TOKENS, config=CONFIG))
    assert report.would_fail(*OTHER) == []
    assert report.outside_frame()[["alive", "in_place"]].all(axis=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2():
    need_smollm2()
    from cgkit.serving.weights import SMOLLM2

    checks = [name for name in CHECKS if name != "recompilations"]  # half a minute of tracing it again
    healthy(cgkit.doctor(cgkit.adopt(SMOLLM2, check=False), *TOKENS, config=CONFIG, only=checks))
