"""Lines written aside. Catches: a reader that stopped and holds up a server, a full disk that ends it."""

from __future__ import annotations

import os
import threading

from tinyloop_serve.protocol.lines import MOST_BYTES, Lines


def test_a_reader_that_stopped_holds_up_nobody_and_misses_what_had_no_room() -> None:
    why: list[str] = []
    read_fd, write_fd = os.pipe()
    lines = Lines(write_fd, why.append)
    sent = 0
    while not why:
        lines.write(f"{sent:09d}")
        sent += 1
        assert sent <= 2 * MOST_BYTES // 10, "it keeps all that nobody reads"
    lines.write("lost too")
    assert why == ["nobody reads them"], "said once"
    closing = threading.Thread(target=lines.close)
    closing.start()
    heard = b""
    while not heard.endswith(b"%09d\n" % (sent - 2)):
        heard += os.read(read_fd, 1 << 20)
    closing.join()
    assert heard == b"".join(b"%09d\n" % n for n in range(sent - 1))
    os.close(read_fd)
    os.close(write_fd)


def test_a_full_disk_costs_the_lines_alone() -> None:
    told = threading.Event()
    why: list[str] = []

    def lost(reason: str) -> None:
        why.append(reason)
        told.set()

    full = os.open("/dev/full", os.O_WRONLY)
    lines = Lines(full, lost)
    lines.write("one")
    assert told.wait(30)
    lines.write("two")
    lines.close()
    assert why == ["No space left on device"]
    os.close(full)
