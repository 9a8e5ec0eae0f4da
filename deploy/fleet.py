"""A local fleet in the foreground: one dispatcher and N replicas as child processes, until a signal.

    starting   all children at once; each says READY on its standard output
    serving    a dead child is started again, with back-off
    stopping   first the dispatcher, which lets running requests end, then the replicas, which then have none

A fault that no restart can mend (a bad flag or artifact, a child that never becomes ready) ends the
fleet. Children die with this process even if it is killed: each asks the kernel for that. The policy of
restarts is in children.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from tinyloop_serve.deploy import endpoints
from tinyloop_serve.deploy.children import EXIT_CONFIG, Child

DISPATCHER_STOP_S = 8.0  # its own drain deadline and something
REPLICA_STOP_S = 6.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FOREVER = float("inf")


@dataclass(frozen=True)
class Plan:
    model: str  # path of the artifact
    endpoint: str  # that clients connect to
    replicas: int = 2
    threads: int = 0  # per replica; 0 = the cores divided among them
    max_seq_len: int = 0  # 0 = the model's
    log: str = ""  # file for the dispatcher's journal, a JSON line per request; "" = nowhere

    def threads_each(self) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.replicas)


def lacking_memory(plan: Plan, available: int | None = None) -> str:
    """ "" if the replicas' weights fit the memory that is free now, else the arithmetic. `available`: bytes,
    None = ask the machine."""
    import psutil  # the one place that needs it

    from tinyloop_serve.native.artifact_file import mapped_bytes
    from tinyloop_serve.native.errors import ArtifactError

    with contextlib.suppress(OSError):  # a model that is not there or not one is the replicas' to report
        shared = 0
        with contextlib.suppress(ArtifactError):
            shared = mapped_bytes(plan.model)
        each = os.path.getsize(plan.model) - shared
        free = psutil.virtual_memory().available if available is None else available
        needed = plan.replicas * each + shared
        if needed > free:
            weights = f"{plan.replicas} replicas x {each >> 20} MiB of weights + {shared >> 20} MiB shared"
            return f"{weights} = {needed >> 20} MiB, but {free >> 20} MiB of memory are free"
    return ""


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
            + [*parent],
        )
        options = ["--threads", str(plan.threads_each()), "--max-seq-len", str(plan.max_seq_len), *parent]
        self._replicas = [
            Child(
                name,
                ["tinyloop_serve.replica", "--model", plan.model, "--endpoint", socket, "--name", name]
                + options,
            )
            for name, socket in sockets.items()
        ]
        self._children = [self._dispatcher, *self._replicas]
        self._selector = selectors.DefaultSelector()
        self._journal: TextIO | None = None
        self._announced = False
        self._stops: list[signal.Signals] = []  # signals received
        self._exit_status: int | None = None  # set: the fleet is stopping
        self._kill_at = FOREVER
        self._told: set[Child] = set()  # those that were asked to stop

    def run(self) -> int:
        """Brings the fleet up and watches over it; returns the exit status."""
        started = time.monotonic()
        with contextlib.ExitStack() as resources:
            if lack := lacking_memory(self._plan):
                _say(lack)
                return EXIT_CONFIG
            try:
                self._claim(resources)
            except (endpoints.UnsafeDirectory, OSError) as error:
                _say(str(error))
                return 1
            resources.enter_context(self._signals())
            resources.callback(self._selector.close)
            resources.callback(self._kill)
            while True:
                now = time.monotonic()
                self._start_due(now)
                self._listen(self._next_start(now))
                now = time.monotonic()
                self._look_after(now)
                self._announce(now - started)
                if self._stops:
                    self._stop(0, f"{self._stops[0].name}: stopping")
                if self._exit_status is not None and self._stopped(now):
                    return self._exit_status

    def _claim(self, resources: contextlib.ExitStack) -> None:
        """One fleet per endpoint, in directories that are this user's alone."""
        endpoints.make_private(endpoints.runtime_directory())
        endpoints.make_private(os.path.dirname(self._lock_path))
        if self._plan.log:
            self._journal = resources.enter_context(open(self._plan.log, "a", buffering=1))
        lock = resources.enter_context(open(self._lock_path, "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"a fleet already serves {self._plan.endpoint}") from None

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals, of children too, wake the loop and are handled there."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(wake_read, selectors.EVENT_READ)
        before = {
            number: signal.signal(number, lambda n, _: self._stops.append(signal.Signals(n)))
            for number in STOP_SIGNALS
        }
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        fd = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake_read)
            os.close(wake_write)

    # ------------------------------------------------------------------ serving

    def _start_due(self, now: float) -> None:
        for child in self._children:
            if self._exit_status is None and child.start_at is not None and child.start_at <= now:
                self._selector.register(child.start(), selectors.EVENT_READ, child)

    def _next_start(self, now: float) -> float:
        """When to look again, seconds from now, if nothing happens before."""
        due = [child.start_at for child in self._children if child.start_at is not None]
        if self._exit_status is not None:
            due = [self._kill_at]
        return max(0.0, min(due, default=now + 3600.0) - now)

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            child: Child | None = key.data
            if child is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            elif self._read(child):
                self._selector.unregister(key.fd)

    def _read(self, child: Child) -> bool:
        was_ready = bool(child.ready_line)
        lines, ended = child.read(time.monotonic())
        for line in lines:
            if not line.startswith("{"):
                _print(f"{child.name}: {line}", sys.stderr)
            elif self._journal:
                self._journal.write(line + "\n")
        if child.ready_line and not was_ready:
            took = child.ready_field("startup_ms")
            again = "is back" if self._announced else "is ready"
            _say(f"{child.name} {again}" + (f" after {took} ms" if took else ""))
        return ended

    def _look_after(self, now: float) -> None:
        """Notices the dead, and whether the fleet can go on without them."""
        for child in self._children:
            if not child.reap(now):
                continue
            if self._exit_status is not None:
                continue
            if child.start_at is not None:
                _say(f"{child.name} {child.how_it_ended()}; it starts again in {child.start_at - now:.2g} s")
            elif child.status == EXIT_CONFIG:
                self._stop(EXIT_CONFIG, f"{child.name} refused its configuration (above)")
            else:
                self._stop(1, f"{child.name} {child.how_it_ended()} and never became ready")

    def _announce(self, took_s: float) -> None:
        """Says once, on standard output, that the fleet serves, and how to use it."""
        if self._announced or self._exit_status is not None or not all(c.ready_line for c in self._children):
            return
        self._announced = True
        plan = self._plan
        endpoint = self._dispatcher.ready_field("endpoint") or plan.endpoint  # with the port filled in
        threads = plan.threads_each()
        flag = "" if endpoint == endpoints.default_endpoint() else f" --endpoint {endpoint}"
        _print(
            f"READY endpoint={endpoint} replicas={plan.replicas} threads={threads}"
            f" startup_ms={took_s * 1000:.0f}"
            f'\n  try:  tinyloop generate{flag} "The definition of"'
            f"\n        tinyloop status{flag}"
            "\n  Ctrl-C stops the fleet",
            sys.stdout,
        )

    # ------------------------------------------------------------------ stopping

    def _stop(self, exit_status: int, why: str) -> None:
        if self._exit_status is None:
            self._exit_status = exit_status
            _say(why)

    def _stopped(self, now: float) -> bool:
        """Goes on stopping: the dispatcher first, then the replicas; a second signal, or time, kills."""
        if len(self._stops) > 1:
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


def _say(text: str) -> None:
    _print(f"tinyloop: {text}", sys.stderr)


def _print(text: str, to: TextIO) -> None:
    with contextlib.suppress(OSError):  # nobody may be left to read it, and the fleet goes on
        print(text, file=to, flush=True)
