"""Models that are right get neither an error nor a warning: ours, each family of ``transformers``, SmolLM2.

That each family is adopted and gives equal tokens replayed is tests/serving/adopt/test_families.py, and SmolLM2
tests/serving/test_smollm2.py; here are the report's sides of it.
"""

from __future__ import annotations

import pytest
import torch

import cgkit
from cgkit.serving.llama import PRESETS, Llama
from tests.serving.adopt.families import FAMILIES, build, config_of, family
from tests.serving.helpers import need_smollm2

CONFIG = cgkit.CompilationConfig(cudagraph_capture_sizes=[1, 2, 4, 8], max_num_seqs=8)
TOKENS = torch.arange(6) + 3, torch.arange(6)
OTHERS = [(torch.arange(n) + 5, torch.arange(n)) for n in (1, 5, 8)]


def healthy(report):
    assert report.ok, report
    assert report.not_checked == {}, report.not_checked
    return report


def test_our_llama():
    model = Llama(PRESETS["tiny-llama"]).eval()
    healthy(cgkit.doctor(model, *TOKENS, config=CONFIG, other_inputs=OTHERS))


def test_a_family_adopted_by_cgkit():
    healthy(cgkit.doctor(cgkit.adopt(family("OPT")), *TOKENS, config=CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_as_it_is_and_adopted(name):
    model = build(config_of(name))
    ids = torch.arange(12).reshape(2, 6) + 3
    healthy(cgkit.doctor(model, ids, config=CONFIG, use_cache=False))
    full = cgkit.CompilationConfig(
        cudagraph_capture_sizes=[1, 2, 4, 8], max_num_seqs=8, cudagraph_mode="FULL_AND_PIECEWISE"
    )
    report = healthy(cgkit.doctor(cgkit.adopt(model), *TOKENS, config=full, other_inputs=OTHERS))
    assert report.would_fail(*OTHERS[1]) == []
    assert report.outside_frame()[["alive", "in_place"]].all(axis=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2():
    need_smollm2()
    from cgkit.serving.weights import SMOLLM2

    healthy(cgkit.doctor(cgkit.adopt(SMOLLM2), *TOKENS, config=CONFIG))
