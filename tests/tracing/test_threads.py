"""Threads: each traces and runs its own instance, or all run the same function."""

from __future__ import annotations

import threading

import pytest
import torch

from cgkit import compilation_counter, torch_hooks
from cgkit.tracing import trace
from tests.tracing.models import Mlp


def run_together(*jobs):
    errors, barrier = [], threading.Barrier(len(jobs))

    def guarded(job):
        try:
            barrier.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("dispatch", ["bytecode", "guard_filter"])
def test_two_threads_trace_and_run_their_own_instance(dispatch):
    models = [Mlp(1), Mlp(4)]
    wrong = []

    def job(model):
        traced = trace(model, torch.randn(3, 8), dispatch=dispatch)
        with torch.no_grad():
            for tokens in [1, 2, 5, 9] * 40:
                x = torch.randn(tokens, 8)
                if not torch.allclose(traced(x), model(x)):
                    wrong.append(model)

    with compilation_counter.expect(num_graphs_seen=2):
        run_together(*[lambda model=model: job(model) for model in models])
    assert not wrong
    assert torch_hooks.count_bytecode_hooks() == 0


@pytest.mark.parametrize("dispatch", ["bytecode", "guard_filter"])
def test_two_threads_with_their_own_executor_of_one_trace(dispatch):
    traced = trace(Mlp(1), torch.randn(3, 8), dispatch=dispatch)
    x = torch.randn(4, 8)
    mixed = []

    def job(number):
        run = traced.bind(lambda *inputs: (number,))
        for _ in range(300):
            if run(x) != number:
                mixed.append(number)

    run_together(lambda: job(1), lambda: job(2))
    assert not mixed


def test_many_threads_call_the_same_function():
    model = Mlp(2)
    traced = trace(model, torch.randn(3, 8))
    run = traced.bind(traced.graph_module)
    wrong = []

    def job(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tokens in range(1, 60):
                x = torch.randn(tokens, 8, generator=generator)
                if not torch.allclose(run(x), model(x)):
                    wrong.append(tokens)

    run_together(*[lambda seed=seed: job(seed) for seed in range(4)])
    assert not wrong


def test_one_thread_runs_while_another_traces():
    model = Mlp(2)
    traced = trace(model, torch.randn(3, 8))
    wrong = []

    def runs():
        with torch.no_grad():
            for tokens in [1, 4, 7] * 100:
                x = torch.randn(tokens, 8)
                if not torch.allclose(traced(x), model(x)):
                    wrong.append(tokens)

    def traces():
        for depth in (1, 3, 5):
            trace(Mlp(depth), torch.randn(3, 8))

    run_together(runs, traces)
    assert not wrong
