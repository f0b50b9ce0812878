"""`RequestQueues`: which requests there are, and in which state: waiting, prefilling or running.

Owns the queue, the running batch and the slots of the page table. Decides nothing: admission.py chooses who starts,
the scheduler who ends. The queue is in the order of arrival; a request that comes back keeps its place.

    add ──► waiting ──► leave_waiting, take_slot, begin_prefill ──► prefilling ──► join_running ──► running
               ▲                                                                                       │
               └───────── requeue ◄──────────────────────────────────────── stop ◄─────────────────────┘
                                                                              └──► remove

Prompts of requests that stream are computed beside the others', chunk by chunk and in turn.
"""

from __future__ import annotations

from collections import deque

from sglang.srt.managers.schedule_batch import Req


class RequestQueues:
    """num_slots: the most requests that run at a time."""

    def __init__(self, num_slots: int) -> None:
        self.waiting: deque[Req] = deque()
        # The prompt that is computed chunk by chunk; one at a time.
        self.prefilling: Req | None = None
        # Those of requests that stream, the one whose turn it is first.
        self.streaming: list[Req] = []
        self.running: list[Req] = []
        # Counts changes of `running`.
        self.running_version = 0
        self.next_order = 0
        self._by_rid: dict[str, Req] = {}
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots))[::-1]

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def get(self, rid: str) -> Req | None:
        return self._by_rid.get(rid)

    def is_waiting(self, req: Req) -> bool:
        """Whether it has neither started nor ended."""
        return req.hold is None and self._by_rid.get(req.rid) is req

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def has_decode(self) -> bool:
        """Whether a running request has a token left to sample."""
        return any(r.length < r.max_len for r in self.running)

    def all(self) -> list[Req]:
        """Those that wait, and those that hold device memory, by age."""
        return sorted(self._by_rid.values(), key=lambda req: req.order)

    def active(self) -> list[Req]:
        """Requests that hold device memory."""
        return self.prompts() + self.running

    def prompts(self) -> list[Req]:
        """Requests whose prompts are being computed, those that stream last."""
        return ([self.prefilling] if self.prefilling else []) + self.streaming

    def is_prefilling(self, req: Req) -> bool:
        return req is self.prefilling or req in self.streaming

    def add(self, req: Req) -> None:
        assert req.rid not in self._by_rid and req.order == self.next_order
        self.next_order += 1
        self._by_rid[req.rid] = req
        self.waiting.append(req)

    def requeue(self, req: Req) -> None:
        """Back among the waiting, at the request's age."""
        at = next((i for i, other in enumerate(self.waiting) if other.order > req.order), len(self.waiting))
        self.waiting.insert(at, req)

    def leave_waiting(self, req: Req) -> None:
        self.waiting.remove(req)

    def take_slot(self, req: Req) -> None:
        req.slot = self._free_slots.pop()

    def begin_prefill(self, req: Req, streams: bool) -> None:
        if streams:
            self.streaming.append(req)
        else:
            self.prefilling = req

    def note_streaming(self, req: Req) -> None:
        """The request streams from now on."""
        if req is self.prefilling:
            self.prefilling = None
            self.streaming.append(req)

    def end_turn(self, req: Req) -> None:
        """A chunk of a request that streams is computed: next time it is another one's turn."""
        if req in self.streaming:
            self.streaming.remove(req)
            self.streaming.append(req)

    def join_running(self, req: Req) -> None:
        """Its prompt is computed by the launches that are issued."""
        self._end_prefill(req)
        self.running.append(req)
        self.running_version += 1

    def stop(self, req: Req) -> None:
        """The request holds no device memory any more; its slot is free."""
        self._free_slots.append(req.slot)
        req.slot = -1
        if self.is_prefilling(req):
            self._end_prefill(req)
        else:
            self.running.remove(req)
            self.running_version += 1

    def remove(self, req: Req) -> None:
        """The request has ended; it neither waits nor runs."""
        del self._by_rid[req.rid]

    def _end_prefill(self, req: Req) -> None:
        if req is self.prefilling:
            self.prefilling = None
        else:
            self.streaming.remove(req)

    def namespaces(self) -> set[str]:
        return {r.namespace for r in self._by_rid.values()}

    def check_invariants(self) -> None:
        active = self.active()
        assert len({r.slot for r in active} | set(self._free_slots)) == self._num_slots
        assert len(self._free_slots) + len(active) == self._num_slots
        orders = [r.order for r in self.waiting]
        assert orders == sorted(orders)
        assert all(r.hold is None and r.slot == -1 for r in self.waiting)
        assert all(r.preload is None and self._by_rid[r.rid] is r for r in active)
        assert len(self._by_rid) == len(self.waiting) + len(active)
