"""The invariants between the dispatcher's books, true after every event. Tests ask; it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinyloop_serve.dispatcher.requests import State

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.core import Core


def check(core: Core, now: float) -> None:
    """Raises AssertionError unless all books agree."""
    for book in (core.requests, core.admission, core.replicas, core.handles):
        book.check()
    live = core.requests.live()
    ended, given = core.metrics.requests.total(), core.metrics.tokens_of.total()
    assert ended == core.requests.finished + core.requests.failed, "each that ended is counted once"
    assert core.metrics.tokens == given + sum(each.delivered for each in live), "each token is counted once"
    waiting = sorted(request.key for request in live if request.state is State.WAITING)
    queued = sorted(request.key for bucket in core.buckets for request in bucket)
    assert queued == waiting, "every waiting request is in one bucket, once"
    running = [request for request in live if request.state is State.RUNNING]
    assert core.admission.running == len(running), "running count"
    assert core.admission.waiting == len(live) - len(running), "waiting count"
    for request in live:
        lanes = [replica.endpoint for replica in core.replicas if request.key in replica.lanes]
        assert lanes == ([request.replica] if request.replica else []), "every running one has one lane"
        shown = len(request.done) // 4 - len(request.asked.done) // 4
        assert shown <= request.delivered, "nothing is gone on from that was not delivered"
    for replica in core.replicas:
        held = {each.name: each.holders[replica.endpoint] for each in core.handles.held_by(replica.endpoint)}
        assert replica.alive or not held, f"{replica.endpoint} is lost, and so is what it held"
        books = (replica.ledger.handles, replica.ledger.handle_bytes)
        assert books == (len(held), sum(held.values())), f"handles of {replica.endpoint}"
    core.buckets.check([replica.shape for replica in core.replicas if replica.shape is not None])
    vacancies = [core.vacancy(replica, now) for replica in core.replicas.idle()]
    vain = [r for bucket in core.buckets.ripe(now) for r in bucket for each in vacancies if each.room([r])]
    assert not vain, "nothing ripe waits in vain"
