"""A local fleet in the foreground: one dispatcher and N replicas as child processes, until a signal.

    starting   all children at once; each says READY on its standard output
    serving    a dead child is started again, with back-off; one that gives no sign of life is killed first
    stopping   first the dispatcher, which lets running requests end, then the replicas, which then have none

A fault that no restart can mend (a bad flag or artifact, a child that never becomes ready) ends a fleet that
is starting; one that serves goes on without that replica and tries it again from time to time. SIGUSR1
brings in a changed model file (renewal.py). Children die with this process even if it is killed: each asks
the kernel for that. The policy of restarts is in children.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import time

from tinyloop_serve.deploy import endpoints
from tinyloop_serve.deploy.children import BREAKER_S, EXIT_CONFIG, NEVER, Child
from tinyloop_serve.deploy.local import Papers
from tinyloop_serve.deploy.plan import Plan, lacking_memory, replica_options
from tinyloop_serve.deploy.renewal import Renewal
from tinyloop_serve.deploy.signals import Signals
from tinyloop_serve.deploy.voice import Voice

DISPATCHER_STOP_S = 8.0  # its own drain deadline and something
REPLICA_STOP_S = 6.0
LATE_S = 1.0  # later than any load makes us
RELOAD_LOOK_S = 0.1  # how often a reload in progress is looked at


class Fleet:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        directory = endpoints.replica_directory(plan.endpoint)
        self._lock_path = f"{directory}/lock"
        sockets = {f"replica-{n}": f"ipc://{directory}/replica-{n}.sock" for n in range(plan.replicas)}
        parent = ("--die-with-parent", str(os.getpid()))
        self._dispatcher = Child(
            "dispatcher",
            ["tinyloop_serve.dispatcher", "--front", plan.endpoint]
            + [part for socket in sockets.values() for part in ("--replica", socket)]
            + (["--config", plan.config] if plan.config else [])
            + [*parent],
            f"{directory}/dispatcher.signs",
        )
        options = replica_options(plan)
        self._replicas = [
            Child(
                name,
                ["tinyloop_serve.replica", "--endpoint", socket, "--name", name, *options[n], *parent],
                f"{directory}/{name}.signs",
            )
            for n, (name, socket) in enumerate(sockets.items())
        ]
        self._children = [self._dispatcher, *self._replicas]
        self._selector = selectors.DefaultSelector()
        self._papers = Papers(plan.endpoint, plan.model)
        self._signals = Signals()
        self._voice = Voice()
        self._say = self._voice.say
        self._renewal = Renewal(plan.model, self._replicas, self._papers, self._say)
        self._announced = False
        self._endpoint = plan.endpoint  # from the announcement on with its port filled in
        self._exit_status: int | None = None  # set: the fleet is stopping
        self._kill_at = NEVER
        self._told: set[Child] = set()  # those that were asked to stop

    def run(self) -> int:
        """Brings the fleet up and watches over it; returns the exit status. Raises `UnsafeDirectory`, or
        OSError when another fleet has the endpoint or the log cannot be written."""
        started = time.monotonic()
        with contextlib.ExitStack() as resources:
            resources.callback(self._voice.close)
            resources.callback(self._selector.close)
            if lack := lacking_memory(self._plan):
                self._say(lack)
                return EXIT_CONFIG
            self._claim(resources)
            for child in self._children:
                child.listen()
            resources.enter_context(self._signals.heard_by(self._selector))
            resources.callback(self._papers.remove)
            self._papers.write()  # from here on a signal to us is handled
            resources.callback(self._kill)
            for child in self._children:
                resources.callback(child.close)
                self._selector.register(child.signs, selectors.EVENT_READ, child)
            while True:
                now = self._turn()
                self._announce(now - started)
                if self._announced:
                    self._renewal.go_on(self._endpoint, now, wanted=self._signals.wanted_reload)
                if stops := self._signals.stops:
                    self._stop(0, f"{stops[0].name}: stopping")
                if self._exit_status is not None and self._stopped(now):
                    return self._exit_status

    def _claim(self, resources: contextlib.ExitStack) -> None:
        """One fleet per endpoint, in directories that are this user's alone."""
        endpoints.make_private(endpoints.runtime_directory())
        endpoints.make_private(os.path.dirname(self._lock_path))
        if self._plan.log:
            resources.enter_context(self._voice.log_to(self._plan.log))
        lock = resources.enter_context(open(self._lock_path, "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                f"a fleet already serves {self._plan.endpoint}; stop it, or give this one an --endpoint"
            ) from None

    # ------------------------------------------------------------------ serving

    def _turn(self) -> float:
        """Waits until something happens or is due, and sees to the children; returns the time."""
        now = time.monotonic()
        self._start_due(now)
        awake_by = now + (patience_s := self._next_start(now))
        self._listen(patience_s)
        now = time.monotonic()
        self._look_after(now, late_s=max(0.0, now - awake_by))
        return now

    def _start_due(self, now: float) -> None:
        for child in self._children:
            if self._exit_status is None and child.start_at is not None and child.start_at <= now:
                try:
                    self._selector.register(child.start(now), selectors.EVENT_READ, child)
                except OSError as error:  # the machine has no process to give, say
                    self._say(f"{child.name} cannot be started: {error}")
                    self._mourn(child, now)

    def _next_start(self, now: float) -> float:
        """When to look again, seconds from now, if nothing happens before."""
        due = [child.start_at for child in self._children if child.start_at is not None]
        due += [child.silent_until for child in self._children]
        due += [now + RELOAD_LOOK_S] if self._renewal.goes_on else []
        if self._exit_status is not None:
            due = [self._kill_at]
        return max(0.0, min(due, default=now + 3600.0) - now)

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            child: Child | None = key.data
            if child is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            elif key.fd == child.signs.fileno():
                child.read_signs(time.monotonic())
            elif self._read(child):
                self._selector.unregister(key.fd)

    def _read(self, child: Child) -> bool:
        was_ready = bool(child.ready_line)
        lines, ended = child.read(time.monotonic())
        for line in lines:
            self._voice.pass_on(child.name, line)
        if child.ready_line and not was_ready:
            took = child.ready_field("startup_ms")
            again = "is back" if self._announced else "is ready"
            self._say(f"{child.name} {again}" + (f" after {took} ms" if took else ""))
        return ended

    def _look_after(self, now: float, *, late_s: float) -> None:
        """Notices the dead, and whether the fleet can go on without them. When we woke `late_s` too late, we
        were stopped, and perhaps so was the whole machine: that convicts nobody."""
        for child in self._children:
            if late_s > LATE_S:
                child.excuse(now)
            if now >= child.silent_until:
                silent_s = child.condemn(now)
                self._say(f"{child.name} gave no sign of life for {silent_s:.1f} s: killed")
            if child.has_ended:  # asked once: it may end at any moment
                self._hear_the_last(child)
                child.reap(now)
                if self._exit_status is None:
                    self._mourn(child, now)

    def _hear_the_last(self, child: Child) -> None:
        """Of a child that ended after the last look at its output. Closed but still registered, its
        descriptor would be refused to the child that gets the same number next."""
        if child.output in self._selector.get_map():
            self._read(child)
            self._selector.unregister(child.output)

    def _mourn(self, child: Child, now: float) -> None:
        """Says how it ended, and decides what follows."""
        refused = child.status == EXIT_CONFIG
        if not self._announced and refused:
            self._stop(EXIT_CONFIG, f"{child.name} refused its configuration (above)")
        elif not self._announced and child.restarts.broken:
            self._stop(1, f"{child.name} {child.how_it_ended()} and never became ready")
        elif refused or child.restarts.broken:
            child.start_at = now + BREAKER_S
            without = f"the fleet goes on without it for {BREAKER_S:g} s"
            self._say(f"{child.name} {child.how_it_ended()}; {without}")
        elif child.start_at is not None:
            self._say(f"{child.name} {child.how_it_ended()}; it starts again in {child.start_at - now:.2g} s")

    def _announce(self, took_s: float) -> None:
        """Says once, on standard output, that the fleet serves, and how to use it."""
        if self._announced or self._exit_status is not None or not all(c.ready_line for c in self._children):
            return
        self._announced = True
        plan = self._plan
        endpoint = self._endpoint = self._dispatcher.ready_field("endpoint") or plan.endpoint
        http = self._dispatcher.ready_field("http")
        # Free ports were taken: a dispatcher that is started again must be found where the first one was.
        self._dispatcher.arguments += ["--front", endpoint, *(["--http", http] if http else [])]
        self._voice.announce(plan, endpoint, http, took_s)

    # ------------------------------------------------------------------ stopping

    def _stop(self, exit_status: int, why: str) -> None:
        if self._exit_status is None:
            self._exit_status = exit_status
            self._say(why)

    def _stopped(self, now: float) -> bool:
        """Goes on stopping: the dispatcher first, then the replicas; a second signal, or time, kills."""
        if len(self._signals.stops) > 1:
            self._kill()
        for group, patience_s in (([self._dispatcher], DISPATCHER_STOP_S), (self._replicas, REPLICA_STOP_S)):
            running = [child for child in group if child.running]
            if not running:
                continue
            for child in running:
                if child not in self._told:
                    self._told.add(child)
                    self._kill_at = now + patience_s
                    child.signal(signal.SIGTERM)
                elif now >= self._kill_at:
                    child.signal(signal.SIGKILL)
            if now >= self._kill_at:
                self._kill_at = now + 1.0
            return False
        return True

    def _kill(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)
