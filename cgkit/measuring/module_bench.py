"""One step of anybody's model in every mode, ready to be timed: what ``DecodeBench`` is for the Llama of cgkit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cgkit.capturing import capture
from cgkit.capturing.static_inputs import as_call
from cgkit.compiling import compile_pieces
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import ConfigError
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.measuring.decode_bench import Step
from cgkit.measuring.roofline import Work
from cgkit.splitting import split_graph
from cgkit.tracing import trace


class ModuleBench:
    """A model that is traced, split, compiled and recorded at every batch size.

    Args:
        model: any module that cgkit traces.
        make_inputs: batch -> the arguments of a call of that size, as :func:`cgkit.capture` takes it.
        batches: the sizes.
        config: splitting operators, compiler; its graph mode and sizes are set here.
        metadata: the ``attn_metadata`` of every step, or a function of the :class:`BatchDescriptor`.
        dynamic_arg_dims: as :func:`cgkit.trace` takes it.
    """

    def __init__(
        self,
        model: nn.Module,
        make_inputs: Callable[[int], Any],
        batches: Sequence[int],
        *,
        config: CompilationConfig | None = None,
        metadata: Any = None,
        dynamic_arg_dims: Any = None,
    ) -> None:
        self.model, self.make_inputs, self.batches, self.metadata = (
            model,
            make_inputs,
            sorted(batches),
            metadata,
        )
        weights = [*model.parameters(), *model.buffers()]
        if not weights:
            raise ConfigError(f"{type(model).__name__} has no weights: there is no device to measure on")
        self.device, self.cuda = weights[0].device.type, weights[0].is_cuda
        self.device_name = torch.cuda.get_device_name() if self.cuda else f"{self.device} (emulated)"
        self.config = replace(config or CompilationConfig(), cudagraph_capture_sizes=tuple(self.batches))
        self.dynamic_arg_dims = dynamic_arg_dims

    def capture(self) -> None:
        """Goes the whole road; in both modes if a splitting operator is in the model, else whole."""
        args, kwargs = as_call(self.make_inputs(self.batches[-1]))
        with torch.no_grad(), set_forward_context(self._metadata_for(BatchDescriptor(self.batches[-1]))):
            traced = trace(self.model, *args, dynamic_arg_dims=self.dynamic_arg_dims, **kwargs)
            split = split_graph(traced, self.config.splitting_ops)
            self.compiled = compile_pieces(split, self.config)
            cut = any(piece.is_splitting for piece in split.pieces)
            mode = CUDAGraphMode.FULL_AND_PIECEWISE if cut else CUDAGraphMode.FULL
            self.captured = capture(
                self.compiled,
                self.batches,
                mode=mode,
                make_inputs=self.make_inputs,
                context=self._metadata_for,
            )
        self.modes = [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL] if cut else [CUDAGraphMode.FULL]

    def _metadata_for(self, key: BatchDescriptor) -> Any:
        return self.metadata(key) if callable(self.metadata) else self.metadata

    def steps(self, batch: int) -> dict[str, Step]:
        """The step of each mode, on the buffers that the graphs read."""
        assert self.captured.inputs is not None
        args, kwargs = self.captured.inputs.at(batch)
        model, run, compiled = self.model, self.captured.run, self.compiled.bind()

        def in_context(call: Callable[..., Any], mode: CUDAGraphMode, key: BatchDescriptor) -> Step:
            metadata = self._metadata_for(key)
            replayed = key if mode is not CUDAGraphMode.NONE else None

            def step() -> Any:
                with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=replayed):
                    return call(*args, **kwargs)

            return step

        plain = BatchDescriptor(batch)
        steps = {
            "eager": in_context(model, CUDAGraphMode.NONE, plain),
            "compiled": in_context(compiled, CUDAGraphMode.NONE, plain),
        }
        for mode in self.modes:
            found, key, _ = self.captured.dispatcher.route(batch, mode is CUDAGraphMode.FULL)
            assert found is mode and key is not None
            steps[mode.name] = in_context(run, mode, key)
        return steps

    def work(self) -> Work:
        """Weights and buffers once; FLOPs a token of what torch's counter knows (no operator of your own)."""
        from torch.utils.flop_counter import FlopCounterMode

        batch = self.batches[-1]
        step = self.steps(batch)["eager"]
        with FlopCounterMode(display=False) as counter:
            step()
        held = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return Work(sum(tensor.nbytes for tensor in held.values()), 0.0, counter.get_total_flops() / batch)

    def about(self) -> dict[str, Any]:
        """What the measurement says of itself."""
        return {"model": type(self.model).__name__}

    def free(self) -> None:
        """Gives the graphs' memory back."""
        self.captured.free()
