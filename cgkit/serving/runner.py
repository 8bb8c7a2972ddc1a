"""The runner: persistent buffers, ``capture_model``, and steps that turn batches into tokens.

Implements the article's "capture_model：runner 侧的编排" (capture_model: the runner's part) and the
runner's half of "BatchDescriptor 与 forward context：回放 key 的设计" (the replay key).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral
from operator import index
from typing import Any, Self

import torch

from cgkit import events, marks
from cgkit.capturing import Ledgers
from cgkit.config import AttentionCGSupport, CompilationConfig
from cgkit.errors import ServingError
from cgkit.forward_context import set_forward_context
from cgkit.serving.executor import ATTENTION_SUPPORT, Executor
from cgkit.serving.input_batch import InputBatch
from cgkit.serving.kv_cache import PagedKVCache, blocks_needed
from cgkit.serving.request import Completion, Request, Scheduled, StepOutput
from cgkit.serving.sampling import GREEDY, SamplingParams, sample
from cgkit.serving.weights import ServedModel

Prompt = str | Sequence[int]


class Runner:
    """Serves one model: several requests at a time, through whatever ``config`` asks for.

    ::

        loaded = load_model("smollm2-135m-instruct")
        runner = Runner(loaded.model, loaded.tokenizer, CompilationConfig(level=3))
        runner.capture_model()
        runner.generate(["Why is the sky blue?"], max_tokens=32)

    :meth:`execute` runs one step of any batch and knows nothing of who waits: a scheduler can drive
    it. :meth:`generate` is the simplest driver: prefill everybody, then decode all together.

    All inputs stand in persistent buffers (:class:`InputBatch`), so recorded graphs read them in place
    and ``cudagraph_copy_inputs`` is off here whatever ``config`` says.

    **Batch 1.** The model is traced once, with a symbolic number of tokens that Dynamo takes to be at
    least 2 (it would freeze sizes 0 and 1). The graph is right for 1 all the same, because of what
    freezing would have bought: a size of 1 may broadcast, so code for "2 or more" may only differ where
    a tensor with a token dimension meets another size in that dimension. In this model each operator
    works token by token, the token dimension of every operand is the same symbol, and sizes enter the
    compiled code only as loop bounds and strides, for which 1 is a number like any other. Tests compare
    batch 1 with the eager model.

    Args:
        model: its parameters tell device and type; see :func:`cgkit.serving.load_model` and :func:`cgkit.adopt`.
        tokenizer: needed for prompts that are text; a :class:`cgkit.serving.tokenizer.Tokenizer`.
        config: how it is compiled and recorded; None: the defaults.
        max_num_seqs: requests in one step; None: what ``config`` says.
        max_model_len: tokens of one request, prompt and answer; None: the model's, at most 2048.
        max_num_batched_tokens: tokens in one step; longer prompts are prefilled in several. None:
            what ``config`` says, else ``max_model_len`` or the largest recorded size. At least
            ``max_num_seqs``.
        block_size: tokens of one block of the KV cache.
        kv_cache_tokens: room in the KV cache; None: every request at its longest, at most 1 GiB.
        attention_support: for which batches attention may stand in a graph. Ours for any; less shows what
            becomes of a mode then (:func:`cgkit.capturing.modes.resolve_cudagraph_mode`).

    Raises:
        ServingError: the numbers do not fit one another or the model.
        ConfigError: the graph mode is one that ``attention_support`` rules out.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Any = None,
        config: CompilationConfig | None = None,
        *,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        kv_cache_tokens: int | None = None,
        attention_support: AttentionCGSupport = ATTENTION_SUPPORT,
    ) -> None:
        config = config or CompilationConfig()
        weight = model.lm_head.weight
        self.model, self.tokenizer = model, tokenizer
        self.device, self.dtype = weight.device, weight.dtype
        longest, why = model.config.max_position_embeddings, getattr(model.config, "limited_by", "")
        self.max_num_seqs = _at_least_1("max_num_seqs", _given(max_num_seqs, config.max_num_seqs))
        self.max_model_len = _at_least_1("max_model_len", _given(max_model_len, min(longest, 2048)))
        if self.max_model_len > longest:
            raise ServingError(
                f"max_model_len={max_model_len} is beyond the {longest} positions of {model.config.name}"
                f"{why and f': {why}'}"
            )
        given = _given(max_num_batched_tokens, config.max_num_batched_tokens)
        self.config = replace(
            config,
            cudagraph_copy_inputs=False,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=None if given is None else _at_least_1("max_num_batched_tokens", given),
        )
        self.executor = Executor(model, self.config, attention_support)
        most = max(self.max_model_len, self.executor.largest_size) if given is None else given
        self.max_num_batched_tokens = max(most, self.max_num_seqs)
        self.kv_cache = self._make_kv_cache(block_size, kv_cache_tokens)
        self.inputs = InputBatch(
            self.executor.pad(self.max_num_seqs),
            max(self.executor.largest_size, self.max_num_batched_tokens),
            self.max_model_len,
            block_size,
            self.kv_cache.caches,
            self.device,
        )
        marks.register(self)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"Runner of {self.model.config.name}, {dtype} on {self.device}: at most {self.max_num_seqs} requests and "
            f"{self.max_num_batched_tokens:,} tokens a step, {self.max_model_len:,} tokens a request\n"
            f"  {self.executor!r}\n  {self.kv_cache!r}"
        )

    def put_marks(self, marker: marks.Marker, undo: ExitStack) -> None:
        """Marks what a step does beside the model: preparing its inputs, and sampling. See :mod:`cgkit.marks`."""
        marks.swap_attribute(self.inputs, "fill", marker.function(self.inputs.fill, "prepare"), undo)
        marks.swap_attribute(self, "_next_tokens", marker.function(self._next_tokens, "sample"), undo)

    def _make_kv_cache(self, block_size: int, tokens: int | None) -> PagedKVCache:
        config = self.model.config
        _at_least_1("block_size", block_size)
        if tokens is None:
            per_token = 2 * config.num_key_value_heads * config.head_dim * self.dtype.itemsize
            affordable = 2**30 // (per_token * config.num_hidden_layers)
            whole = blocks_needed(self.max_model_len, block_size) * block_size
            tokens = max(min(self.max_num_seqs * whole, affordable), whole)
        return PagedKVCache(
            config.num_hidden_layers,
            1 + blocks_needed(_at_least_1("kv_cache_tokens", tokens), block_size),  # block 0 is nobody's
            block_size,
            config.num_key_value_heads,
            config.head_dim,
            self.dtype,
            self.device,
            layer_names=self.model.attention_layers,
        )

    # --- recording -------------------------------------------------------------------------------

    def capture_model(self) -> Self:
        """Compiles what the level asks for and records every size in every mode; then locks. Returns the runner.

        See :meth:`Executor.capture_model`. Without it nothing is ever recorded: steps of levels 2 and 3
        run compiled, without graphs.
        """
        self.executor.capture_model(self.inputs)
        return self

    @property
    def ledgers(self) -> Ledgers:
        """What is noted for free about the recorded graphs: addresses, dispatch decisions, modes, the lock.

        Raises:
            ServingError: nothing is recorded.
        """
        if self.executor.captured is None:
            raise ServingError("nothing is recorded, so there are no ledgers: call capture_model() first")
        return self.executor.captured.ledgers

    # --- one step --------------------------------------------------------------------------------

    @torch.no_grad()
    def execute(self, batch: Sequence[Scheduled]) -> StepOutput:
        """Runs one step: each request's share of tokens, and the next token of those that reach their end.

        The requests' blocks must hold their tokens, the new ones included. Requests are only read:
        the caller moves them on with :meth:`Request.advance`.

        Raises:
            ServingError: the batch is empty or does not fit the buffers or the requests' blocks.
        """
        started = time.perf_counter()
        num_tokens, num_reqs = self._check(batch), len(batch)
        self.executor.compile(self.inputs)
        uniform = num_tokens == num_reqs
        mode, key, padded = self.executor.route(num_tokens, uniform)
        # A recorded graph froze its attention's path; beside graphs the batch itself decides.
        metadata = self.inputs.fill(batch, padded, decode_only=uniform)
        with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
            hidden = self.executor.forward(*self.inputs.front(padded))
        tokens = self._next_tokens(hidden, batch, uniform)
        kind, seconds = "decode" if uniform else "prefill", time.perf_counter() - started
        if events.has_readers(events.StepRan):
            events.emit(events.StepRan(kind, num_reqs, num_tokens, padded, mode.name, seconds))
        return StepOutput(tokens, kind, mode, key, num_reqs, num_tokens, padded, seconds)

    def _check(self, batch: Sequence[Scheduled]) -> int:
        """The number of tokens of ``batch``, if it can be run."""
        num_tokens = sum(each.num_tokens for each in batch)
        if not 0 < len(batch) <= self.max_num_seqs or num_tokens > self.max_num_batched_tokens:
            raise ServingError(
                f"a step of {len(batch)} requests and {num_tokens} tokens: it takes 1 to {self.max_num_seqs} "
                f"requests (max_num_seqs) and up to {self.max_num_batched_tokens} tokens "
                "(max_num_batched_tokens)"
            )
        for request, count in batch:
            end = request.num_computed + count
            if not 0 < count <= request.num_pending:
                raise ServingError(
                    f"{count} tokens scheduled of a request with {request.num_pending} pending"
                )
            if end > self.max_model_len:
                raise ServingError(
                    f"a request would reach {end} tokens; max_model_len is {self.max_model_len}: finish it "
                    "before, or build the runner with a larger max_model_len"
                )
        return num_tokens

    def _next_tokens(
        self, hidden: torch.Tensor, batch: Sequence[Scheduled], uniform: bool
    ) -> list[int | None]:
        """One token for each request that wants one. Reading them is where the host waits for the step."""
        rows = hidden[: len(batch)] if uniform else hidden[self.inputs.last_token_rows(len(batch))]
        requests = [each.request for each in batch]
        wanted = [each.wants_token for each in batch]
        # Rows without a wish are computed and dropped: nearly all steps have none.
        params = [r.sampling if wish else GREEDY for r, wish in zip(requests, wanted)]
        seeds, numbers = [r.seed for r in requests], [len(r.token_ids) - len(r.prompt) for r in requests]
        tokens = sample(self.model.compute_logits(rows), params, seeds, numbers).tolist()
        return [token if wish else None for token, wish in zip(tokens, wanted)]

    # --- whole answers ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_tokens: int = 32,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        stop_at_eos: bool = True,
    ) -> list[Completion]:
        """Answers prompts (texts or token ids), several at a time.

        All that fit are prefilled, then decoded together; who is finished leaves, so the batch shrinks,
        and who waited for room takes it. Everything is checked before anything runs.

        Raises:
            ServingError: a prompt is empty, is text without a tokenizer, holds an unknown token, or with
                ``max_tokens`` does not fit ``max_model_len`` or the KV cache. The runner stays usable.
        """
        requests = self._requests(prompts, max_tokens, sampling, stop_at_eos)
        waiting, running = deque(requests), list[Request]()
        try:
            while waiting or running:
                running += (newcomers := self._admit(waiting, len(running)))
                self._prefill(newcomers)
                running = self._leave(running)
                if running:
                    self._step([Scheduled(request, 1) for request in running])
                    running = self._leave(running)
        finally:
            for request in requests:
                self._release(request)
        return [self._completion(request) for request in requests]

    def _requests(self, prompts: Any, max_tokens: int, sampling: Any, stop_at_eos: bool) -> list[Request]:
        if hasattr(prompts, "tolist"):
            prompts = prompts.tolist()
        if not isinstance(prompts, (str, Sequence)):
            raise ServingError(f"prompts={prompts!r} is neither a text nor a list of texts or token ids")
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
            prompts = [prompts]
        if not isinstance(sampling, (SamplingParams, Sequence)):
            raise ServingError(f"sampling={sampling!r} is neither SamplingParams nor a list of them")
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(prompts):
            raise ServingError(
                f"{len(params)} sampling parameters for {len(prompts)} prompts; give one, or one each"
            )
        return [
            self.make_request(prompt, max_tokens, each, stop_at_eos=stop_at_eos, name=f"prompt {number}")
            for number, (prompt, each) in enumerate(zip(prompts, params))
        ]

    def make_request(
        self,
        prompt: Prompt,
        max_tokens: int = 32,
        sampling: SamplingParams = GREEDY,
        *,
        stop_at_eos: bool = True,
        stop_token_ids: Iterable[int] = (),
        name: str = "the prompt",
    ) -> Request:
        """One request, checked: what :meth:`generate` makes of each prompt. ``name`` is what errors call it.

        Raises:
            ServingError: the prompt is empty, is text without a tokenizer, holds an unknown token, or with
                ``max_tokens`` does not fit ``max_model_len`` or the KV cache; or an argument is not what it should be.
        """
        _at_least_1("max_tokens", max_tokens)
        if not isinstance(sampling, SamplingParams):
            raise ServingError(f"sampling={sampling!r} of {name}: give SamplingParams")
        ids = self._token_ids(prompt, name)
        stops = {*self._known(stop_token_ids, f"stop_token_ids of {name}")}
        stops.update(self.model.config.eos_token_ids if stop_at_eos else ())
        self._check_length(len(ids), max_tokens, name)
        return Request(ids, max_tokens, sampling, frozenset(stops), seed=sampling.request_seed())

    def _token_ids(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ServingError(
                    f"{name} is text, and the runner has no tokenizer; give token ids, or Runner(model, tokenizer)"
                )
            prompt = self.tokenizer.encode(prompt) if prompt else []
        ids = self._known(prompt, name)
        if not ids:
            raise ServingError(f"{name} is empty; a request needs at least one token")
        return ids

    def _known(self, tokens: Iterable[int], name: str) -> list[int]:
        """``tokens`` as a list of tokens that the model has."""
        try:
            ids = [index(token) for token in tokens]
        except Exception as error:  # whatever its iterator raises
            raise ServingError(
                f"{name} is neither text nor a list of token ids: {type(error).__name__}: {error}"
            ) from error
        size = self.model.config.vocab_size
        if wrong := [token for token in ids if not 0 <= token < size]:
            raise ServingError(f"{name} has token {wrong[0]}, and the vocabulary ends at {size - 1}")
        return ids

    def _check_length(self, length: int, max_tokens: int, name: str) -> None:
        room = min(self.max_model_len, self.kv_cache.max_tokens)
        if length + max_tokens > room:
            limit = "max_model_len" if room == self.max_model_len else "the KV cache"
            raise ServingError(
                f"{name} has {length} tokens and may get {max_tokens} more, but {limit} "
                f"holds {room}: shorten the prompt, lower max_tokens"
                f"{f' to {room - length}' if length < room else ''}, or build the runner with a larger "
                f"{'max_model_len' if room == self.max_model_len else 'kv_cache_tokens'}"
            )

    def _admit(self, waiting: deque[Request], num_running: int) -> list[Request]:
        """Those of ``waiting``, in order, that find a seat and blocks for their longest answer."""
        admitted: list[Request] = []
        while waiting and num_running + len(admitted) < self.max_num_seqs:
            request = waiting[0]
            count = blocks_needed(len(request.prompt) + request.max_tokens, self.kv_cache.block_size)
            if count > self.kv_cache.allocator.num_free:
                break
            request.blocks = self.kv_cache.allocator.alloc(count)
            admitted.append(waiting.popleft())
        return admitted

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Runs whole prompts, packed into steps; one that is longer than a step takes several."""
        batch, room = list[Scheduled](), self.max_num_batched_tokens
        for request in requests:
            left = request.num_pending
            while left:
                if room == 0:
                    self._step(batch)
                    batch, room = [], self.max_num_batched_tokens
                share = min(left, room)
                batch.append(Scheduled(request, share))
                room, left = room - share, left - share
        if batch:
            self._step(batch)

    def _step(self, batch: Sequence[Scheduled]) -> None:
        output = self.execute(batch)
        for (request, count), token in zip(batch, output.tokens):
            request.advance(count, token)

    def _leave(self, running: list[Request]) -> list[Request]:
        """Frees the blocks of finished requests; returns the others, order kept."""
        for request in running:
            if request.finish_reason:
                self._release(request)
        return [request for request in running if not request.finish_reason]

    def _release(self, request: Request) -> None:
        self.kv_cache.allocator.free(request.blocks)
        request.blocks = []

    def _completion(self, request: Request) -> Completion:
        shown = [token for token in request.answer if token not in request.stop_ids]
        text = None if self.tokenizer is None else self.tokenizer.decode(shown)
        return Completion(list(request.prompt), request.answer, text, request.finish_reason)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _at_least_1(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ServingError(f"{name}={value!r}: use a positive whole number")
    return value
