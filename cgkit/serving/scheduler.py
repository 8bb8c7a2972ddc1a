"""Continuous batching: which requests a step serves, and with how many tokens each.

Knows no model and no device. Rules:

- Running requests come first, one token each; then the prompt that was begun; then waiting requests in the order
  of their arrival, while seats, tokens and blocks last. A prompt that does not fit into a step is cut
  (chunked prefill), so at most one is begun at any time.
- Blocks are handed out as tokens come, not for the longest answer. Where none are left, the youngest request gives
  all of its blocks back and returns to the front of the queue; its tokens are computed again later (preemption by
  recomputation). The oldest request is never the victim of another, so somebody always gets on.
- A step may be planned before the tokens of the step before it are known: it is then assumed that every request
  goes on, and :meth:`Scheduler.update` sets right what stopped, one step later. Blocks given back meanwhile may be
  handed out at once: all device work stands on one stream, so whoever gets them writes after the step in flight.

Orca's iteration-level scheduling (Yu et al., OSDI 2022); preemption by recomputation after Kwon et al., SOSP
2023.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter

from cgkit.errors import ServingError
from cgkit.serving.kv_cache import BlockAllocator, blocks_needed
from cgkit.serving.request import Request


@dataclass(slots=True)
class ScheduledStep:
    """What one step does. Row i of the batch is ``requests[i]``, whose last ``counts[i]`` computed tokens it runs.

    ``wants[i]``: the step reaches the request's last token, so that a new one comes out. ``counts`` and ``wants``
    are None where every request has one token and wants one (a plain decode step).
    """

    requests: list[Request]
    counts: list[int] | None
    wants: list[bool] | None
    num_tokens: int
    #: The same requests in the same rows as in the step before.
    same_rows: bool
    #: Requests that gave their blocks back so that this step could be made.
    preempted: tuple[Request, ...] = ()
    admitted: int = 0

    @property
    def uniform(self) -> bool:
        """Whether every request has one token, so that the attention may take its decode path."""
        return self.num_tokens == len(self.requests)


class Scheduler:
    """Holds all requests from :meth:`add` until they are finished; :meth:`schedule` and :meth:`update` in turn.

    Attributes:
        waiting: in the order in which they will be admitted.
        running: row by row. Who leaves is replaced by the last row, so that few rows change.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        if not 0 < max_num_seqs <= max_num_batched_tokens:
            raise ServingError(
                f"max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens}: use at least 1 "
                "request, and at least one token for each of them"
            )
        self.allocator, self.block_size = allocator, block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._begun: Request | None = None  # whose prompt is partly computed: it is running
        self._changed = True
        self._arrived = 0

    # --- coming and going ------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Puts ``request`` at the end of the queue.

        Raises:
            ServingError: it is empty, or at its longest it would not fit into the cache even alone.
        """
        longest, room = (
            len(request.prompt) + request.max_tokens,
            (self.allocator.num_blocks - 1) * self.block_size,
        )
        if not request.prompt or request.max_tokens < 1:
            raise ServingError(
                f"a request of {len(request.prompt)} tokens that may get {request.max_tokens} more: both must be at "
                "least 1"
            )
        if longest > room:
            raise ServingError(
                f"a request may reach {longest} tokens, and the KV cache holds {room}: it could never be served to "
                "its end, even alone"
            )
        self._arrived += 1
        request.arrival = self._arrived
        self.waiting.append(request)

    def abort(self, request: Request, reason: str = "abort") -> bool:
        """Ends ``request`` wherever it stands; tokens that are on their way are dropped. False: it has ended before."""
        if request.finish_reason:
            return False
        request.finish_reason = reason
        self._remove(request)
        return True

    def _remove(self, request: Request) -> None:
        if request in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _leave(self, request: Request) -> None:
        """Takes a running request out of its row and gives its blocks back."""
        running = self.running
        row, last = running.index(request), running.pop()
        if last is not request:
            running[row] = last
        if request is self._begun:
            self._begun = None
        self._changed = True
        self.allocator.free(request.blocks)
        request.blocks, request.room = [], 0

    # --- a step ----------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if nobody can be served now. Requests are moved on as if it had run."""
        growing = self._who_needs_blocks()
        running, begun = self.running, self._begun
        decoding = len(running) - (begun is not None)
        share = min(begun.num_pending, self.max_num_batched_tokens - decoding) if begun else 0
        preempted = self._find_room(growing, share) if growing or begun else ()
        if preempted:
            begun = self._begun
            decoding, share = len(running) - (begun is not None), share if begun else 0
        counts: list[int] = []
        admitted = 0
        if self.waiting and not preempted and len(running) < self.max_num_seqs:
            admitted = self._admit(self.max_num_batched_tokens - decoding - share, counts)
        if begun is None and not admitted:
            return self._decode(preempted) if running else None
        counts[:0] = [1] * (len(running) - admitted)
        if begun is not None:
            counts[running.index(begun)] = share
        return self._step(counts, preempted, admitted)

    def _who_needs_blocks(self) -> list[Request]:
        """Decoding requests whose next token has no place. Those whose last token is on its way leave: they are not
        served again, and their blocks are free for others."""
        growing = [request for request in self.running if request.num_computed >= request.room]
        for request in growing:
            if request.num_computed >= request.end:
                self._leave(request)
        return [request for request in growing if request.blocks and request is not self._begun]

    def _find_room(self, growing: list[Request], share: int) -> tuple[Request, ...]:
        """Blocks for the next token of each of ``growing``, and for ``share`` tokens of the prompt that was begun."""
        if self._begun is not None:
            growing.append(self._begun)
        if sum(self._lacking(request, share) for request in growing) > self.allocator.num_free:
            return tuple(self._preempt_for(sorted(growing, key=attrgetter("arrival")), share))
        for request in growing:
            self._grow(request, self._lacking(request, share))
        return ()

    def _lacking(self, request: Request, share: int) -> int:
        """Blocks that ``request`` needs for this step and does not have."""
        count = share if request is self._begun else 1
        return blocks_needed(request.num_computed + count, self.block_size) - len(request.blocks)

    def _preempt_for(self, growing: Sequence[Request], share: int) -> Iterator[Request]:
        """The oldest first: what each lacks is taken from the youngest, from itself at the last."""
        for request in growing:
            if not request.blocks:
                continue  # it was a victim meanwhile
            lacking = self._lacking(request, share)
            while lacking > self.allocator.num_free:
                victim = max(self.running, key=attrgetter("arrival"))
                self._preempt(victim)
                yield victim
                if victim is request:
                    break
            else:
                self._grow(request, lacking)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.num_computed = 0
        request.preemptions += 1
        self.waiting.appendleft(request)  # victims come youngest first, so the queue stays in order

    def _grow(self, request: Request, lacking: int) -> None:
        if lacking > 0:
            request.blocks += self.allocator.alloc(lacking)
            request.room = min(len(request.blocks) * self.block_size, request.end)

    def _admit(self, budget: int, counts: list[int]) -> int:
        """Seats those of the queue that find a seat, tokens, and blocks for all that is known of them."""
        admitted = 0
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            # Blocks are taken chunk by chunk, but who could not even finish its prompt would only be in the way.
            if (
                request.num_in_flight
                or blocks_needed(len(request.token_ids), self.block_size) > self.allocator.num_free
            ):
                break
            self.waiting.popleft()
            count = min(request.num_pending, budget)
            self._grow(request, blocks_needed(count, self.block_size))
            self.running.append(request)
            self._changed = True
            counts.append(count)
            budget -= count
            admitted += 1
        return admitted

    def _decode(self, preempted: tuple[Request, ...]) -> ScheduledStep:
        """One token for everybody who runs: by far the most frequent step."""
        requests = self.running.copy()
        for request in requests:
            request.num_computed += 1
            request.num_in_flight += 1
        same, self._changed = not self._changed, False
        return ScheduledStep(requests, None, None, len(requests), same, preempted)

    def _step(self, counts: list[int], preempted: tuple[Request, ...], admitted: int) -> ScheduledStep:
        requests, wants = self.running.copy(), []
        self._begun = None
        for request, count in zip(requests, counts):
            reaches = count == request.num_pending
            request.num_computed += count
            request.num_in_flight += reaches
            wants.append(reaches)
            if not reaches:
                self._begun = request
        same, self._changed = not self._changed, False
        return ScheduledStep(requests, counts, wants, sum(counts), same, preempted, admitted)

    # --- its tokens ------------------------------------------------------------------------------

    def update(self, step: ScheduledStep, tokens: Sequence[int]) -> list[tuple[Request, int]]:
        """Takes the tokens of ``step``, one a row, and lets those go that are finished.

        Rows that wanted none, and requests that ended meanwhile, are passed over. Returns who got what.
        """
        taken: list[tuple[Request, int]] = []
        rows = zip(step.requests, tokens)
        for request, token in rows if step.wants is None else compress(rows, step.wants):
            request.num_in_flight -= 1
            if request.finish_reason:
                continue
            ids = request.token_ids
            ids.append(token)
            taken.append((request, token))
            if token in request.stop_ids:
                request.finish_reason = "stop"
                self._remove(request)
            elif len(ids) > request.end:
                request.finish_reason = "length"
                self._remove(request)
        return taken
