"""Waiting over descriptors. Catches: a message that waits unseen because its news was taken by a send, a
poll, or a read of something else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tinyloop_serve.dispatcher.poller import Poller, Socket

LONG_S = 20.0  # far more than any message takes


def wait(poller: Poller) -> set[Socket | int]:
    deadline = time.monotonic() + LONG_S
    while not (ready := poller.poll(deadline - time.monotonic())):
        assert time.monotonic() < deadline
    return ready


class Pair:
    """A router that is watched, and a dealer that is its peer."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str, poller: Poller) -> None:
        self.router, self.dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        self.router.bind(endpoint)
        poller.register(self.router)
        self.dealer.connect(endpoint)
        self.dealer.send(b"hello")
        assert self.router in wait(poller)
        self.peer, _ = self.router.recv_multipart()

    def close(self) -> None:
        self.router.close(0)
        self.dealer.close(0)


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def pair(poller: Poller, tmp_path: Path) -> Iterator[Pair]:
    with zmq.Context() as context:
        pair = Pair(context, f"ipc://{tmp_path}/s", poller)
        yield pair
        pair.close()


def arrive(pair: Pair, count: int) -> None:
    """The dealer's messages are in the router's pipe, and the router has not been asked."""
    for number in range(count):
        pair.dealer.send(b"%d" % number)
    time.sleep(0.05)


def test_it_sleeps_while_there_is_no_message(pair: Pair, poller: Poller) -> None:
    begin, looks = time.monotonic(), 0
    while time.monotonic() < begin + 0.2:
        assert poller.poll(0.05) == set()
        looks += 1
    assert looks < 20


def test_a_send_that_takes_the_news_does_not_hide_a_message(pair: Pair, poller: Poller) -> None:
    assert poller.poll(0.0) == set()
    for _ in range(50):
        arrive(pair, 1)
        poller.used(pair.router)
        pair.router.send_multipart([pair.peer, b"x"])  # the descriptor is silent from here on
        assert pair.router in wait(poller)
        assert pair.router.recv_multipart() == [pair.peer, b"0"]
        assert poller.poll(0.0) == set()


def test_what_was_left_unread_is_ready_again(pair: Pair, poller: Poller) -> None:
    arrive(pair, 3)
    for number in range(3):
        assert pair.router in wait(poller)
        assert pair.router.recv_multipart()[1] == b"%d" % number
    assert not poller.readable(pair.router) and poller.poll(0.0) == set()


def test_a_message_after_the_last_look_wakes_it(pair: Pair, poller: Poller) -> None:
    for number in range(20):
        assert not poller.readable(pair.router)
        pair.dealer.send(b"%d" % number)
        assert pair.router in wait(poller)
        assert pair.router.recv_multipart()[1] == b"%d" % number


def test_plain_descriptors_and_sockets_that_leave(pair: Pair, poller: Poller) -> None:
    read_end, write_end = os.pipe()
    poller.register(read_end)
    os.write(write_end, b"x")
    assert wait(poller) == {read_end}
    arrive(pair, 1)
    assert pair.router in wait(poller)
    poller.unregister(pair.router)
    assert poller.poll(0.0) == {read_end}
    os.close(read_end)
    os.close(write_end)
