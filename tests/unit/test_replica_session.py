"""Who a replica works for: the newest dispatcher, and nobody else gets or disturbs anything."""

from __future__ import annotations

from tinyloop_serve.protocol.messages import (
    Build,
    CancelLanes,
    Drop,
    Goodbye,
    Hello,
    Lane,
    ModelInfo,
    Ping,
    Pong,
    Ready,
    Run,
    Sampling,
    Step,
)
from tinyloop_serve.replica.executor import Building, Job, Outcome
from tinyloop_serve.replica.session import STUCK, LifeSigns, Session

READY = Ready("r0", 1, "cpu", ModelInfo("m", "f", 10, 4, 8, 100))
OLD, NEW = b"old", b"new"


class Submitted:
    """An executor that only notes what it was given."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.builds: list[Building] = []
        self.dropped: list[Drop] = []

    def submit(self, run: Run) -> Job:
        self.jobs.append(Job(run, None, frozenset()))
        return self.jobs[-1]

    def build(self, build: Build) -> Building:
        self.builds.append(Building(build))
        return self.builds[-1]

    def drop(self, drop: Drop) -> None:
        self.dropped.append(drop)


def session() -> tuple[Session, Submitted]:
    jobs = Submitted()
    return Session(jobs, announce=lambda: READY, life_signs=lambda: LifeSigns(42, 1000, "ok")), jobs


def run(*keys: int) -> Run:
    lanes = tuple(Lane(key=key, id=f"id{key}", prompt=b"\1\0\0\0", max_tokens=4) for key in keys)
    return Run(run=1, sampling=Sampling(), lanes=lanes)


def outcome(job: Job, *, idle: bool = False) -> Outcome:
    return Outcome(job, Step(run=job.run.run, idle=idle), [])


def cancelled(job: Job) -> list[bool]:
    return [answer.cancelled for answer in job.answers]


def test_hello_is_answered_by_the_announcement() -> None:
    replica, _ = session()
    assert replica.handle(NEW, Hello("d")) == [(NEW, READY)]


def test_nothing_is_done_for_one_who_did_not_say_hello() -> None:
    replica, jobs = session()
    replica.handle(NEW, Hello("d"))
    for message in (run(1), CancelLanes((1,)), Ping(1), Goodbye()):
        assert replica.handle(OLD, message) == []
    assert not jobs.jobs
    assert replica.handle(NEW, Ping(1)) != []


def test_a_ping_is_answered_with_the_life_signs() -> None:
    replica, jobs = session()
    replica.handle(NEW, Hello("d"))
    assert replica.handle(NEW, Ping(3)) == [(NEW, Pong(3, 42, 0, 1000))]
    replica.handle(NEW, run(1, 2))
    assert replica.handle(NEW, Ping(4)) == [(NEW, Pong(4, 42, 2, 1000))]
    jobs.jobs[0].answers[0].ended = True
    assert replica.handle(NEW, Ping(5)) == [(NEW, Pong(5, 42, 1, 1000))]


def test_frames_go_to_the_one_who_ordered_the_run() -> None:
    replica, jobs = session()
    replica.handle(NEW, Hello("d"))
    replica.handle(NEW, run(1))
    assert replica.busy
    assert replica.relay(outcome(jobs.jobs[0])) == NEW
    assert replica.relay(outcome(jobs.jobs[0], idle=True)) == NEW
    assert not replica.busy


def test_cancel_marks_the_lanes_it_names() -> None:
    replica, jobs = session()
    replica.handle(NEW, Hello("d"))
    replica.handle(NEW, run(1, 2, 3))
    replica.handle(NEW, CancelLanes((2, 9)))
    assert cancelled(jobs.jobs[0]) == [False, True, False]


def test_the_newest_hello_wins_and_the_former_run_is_given_up() -> None:
    replica, jobs = session()
    replica.handle(OLD, Hello("a"))
    replica.handle(OLD, run(1, 2))
    assert replica.handle(NEW, Hello("b")) == [(OLD, Goodbye()), (NEW, READY)]
    assert cancelled(jobs.jobs[0]) == [True, True]
    replica.handle(NEW, run(1))
    assert replica.relay(outcome(jobs.jobs[0], idle=True)) is None
    assert replica.relay(outcome(jobs.jobs[1], idle=True)) == NEW
    assert replica.handle(OLD, Ping(1)) == []


def test_hello_again_starts_afresh() -> None:
    replica, jobs = session()
    replica.handle(NEW, Hello("d"))
    replica.handle(NEW, run(1))
    assert replica.handle(NEW, Hello("d")) == [(NEW, READY)]
    assert cancelled(jobs.jobs[0]) == [True]
    assert not replica.busy
    assert replica.relay(outcome(jobs.jobs[0], idle=True)) is None


def test_goodbye_and_a_lost_peer_leave_nobody_to_work_for() -> None:
    for said in (True, False):
        replica, jobs = session()
        replica.handle(NEW, Hello("d"))
        replica.handle(NEW, run(1))
        if said:
            replica.handle(NEW, Goodbye())
        else:
            replica.lost(NEW)
        assert cancelled(jobs.jobs[0]) == [True] and not replica.busy
        assert replica.handle(NEW, Ping(1)) == []
        assert replica.handle(NEW, Hello("d")) == [(NEW, READY)]


def test_losing_a_former_peer_changes_nothing() -> None:
    replica, jobs = session()
    replica.handle(OLD, Hello("a"))
    replica.handle(NEW, Hello("b"))
    replica.handle(NEW, run(1))
    replica.lost(OLD)
    assert cancelled(jobs.jobs[0]) == [False]


def test_leaving_says_goodbye_once() -> None:
    replica, jobs = session()
    assert replica.leave() == []
    replica.handle(NEW, Hello("d"))
    replica.handle(NEW, run(1))
    assert replica.leave() == [(NEW, Goodbye())]
    assert cancelled(jobs.jobs[0]) == [True]
    assert replica.relay(outcome(jobs.jobs[0], idle=True)) is None
    assert replica.leave() == []


def test_how_long_the_engine_has_made_no_step_at_work() -> None:
    signs = LifeSigns(5, 0, "ok")
    replica = Session(Submitted(), announce=lambda: READY, life_signs=lambda: signs)
    assert replica.stalled_s(10.0) == 0.0 and replica.stalled_s(99.0) == 0.0, "nothing to do"
    signs = signs._replace(working=True)
    assert replica.stalled_s(101.0) == 2.0
    signs = signs._replace(step_counter=6)
    assert replica.stalled_s(102.0) == 0.0 and replica.stalled_s(104.5) == 2.5
    signs = signs._replace(working=False)
    assert replica.stalled_s(200.0) == 0.0


def test_one_that_hangs_in_what_nobody_waits_for_is_not_well() -> None:
    """Its dispatcher has lost it for that, and greets it again at once: it must not get the next run."""
    jobs, signs = Submitted(), LifeSigns(5, 0, "ok", working=True)
    replica = Session(jobs, announce=lambda: READY, life_signs=lambda: signs)
    replica.handle(OLD, Hello("d"))
    replica.handle(OLD, run(1))
    replica.stalled_s(10.0)
    replica.stalled_s(20.0)
    replica.handle(OLD, Ping(1))
    assert replica.health == "ok" and replica.news() == [], "that is for the one who waits to judge"
    [*_, (_, ready)] = replica.handle(NEW, Hello("d"))
    assert isinstance(ready, Ready) and ready.health == STUCK
    [(_, pong)] = replica.handle(NEW, Ping(1))
    assert isinstance(pong, Pong) and pong.health == STUCK
    signs = signs._replace(step_counter=6)  # it was slow, no more
    replica.stalled_s(21.0)
    [(_, pong)] = replica.news()
    assert isinstance(pong, Pong) and pong.health == "ok"
    signs = signs._replace(health="failing")
    replica.stalled_s(30.0)
    assert replica.health == "failing"


def test_another_health_is_told_at_once_and_once() -> None:
    signs = LifeSigns(0, 0, "failing")
    replica = Session(Submitted(), announce=lambda: READY, life_signs=lambda: signs)
    assert replica.news() == [], "nobody is there to tell"
    [(_, ready)] = replica.handle(NEW, Hello("d"))
    assert isinstance(ready, Ready) and ready.health == "failing"

    def news() -> list[str]:
        replica.stalled_s(0.0)
        return [message.health for peer, message in replica.news() if isinstance(message, Pong)]

    assert news() == []
    signs = signs._replace(health="worse")
    assert news() == ["worse"] and news() == []
    signs = signs._replace(health="ok")
    replica.handle(NEW, Ping(1))
    assert news() == [], "the answer to the ping has told it"


def test_a_run_that_is_given_up_and_ends_soon_is_no_ailment() -> None:
    signs = LifeSigns(5, 0, "ok", working=True)
    replica = Session(Submitted(), announce=lambda: READY, life_signs=lambda: signs)
    replica.handle(OLD, Hello("d"))
    replica.handle(OLD, run(1))
    replica.stalled_s(10.0)
    replica.stalled_s(10.5)
    assert replica.handle(NEW, Hello("e"))[-1] == (NEW, READY)
