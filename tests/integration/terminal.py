"""A command in a terminal: a pseudo-terminal, and a screen that shows what was written to it."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

PATIENCE_S = 60.0
# The command gets the terminal as its controlling one, so that Ctrl-C and new sizes reach it as signals.
LAUNCH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
CONTROL = rb"\x1b(?:\[(?P<args>[?\d;]*)(?P<final>[@-~])|[()][A-Z0-9]|[=>78])"
SEQUENCE = re.compile(CONTROL + rb"|[^\x1b]")


class Screen:
    """As much of an xterm as curses uses here. What it does not know is an error, not a guess."""

    def __init__(self, rows: int, columns: int) -> None:
        self.alternate = False
        self.cursor_shown = True
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        self.columns = columns
        self.cells = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def write(self, data: bytes) -> bytes:
        """Returns the beginning of a sequence whose rest is still to come."""
        at = 0
        while found := SEQUENCE.match(data, at):
            at = found.end()
            if found["final"]:
                self._control(found["args"].decode(), found["final"].decode())
            elif len(found[0]) == 1:
                self._character(found[0].decode("ascii"))
        return data[at:]

    def _character(self, character: str) -> None:
        match character:
            case "\r":
                self.column = 0
            case "\n":
                self.row = min(self.row + 1, len(self.cells) - 1)
            case "\b":
                self.column = max(0, self.column - 1)
            case "\t":
                self.column = min((self.column // 8 + 1) * 8, self.columns - 1)
            case _ if character >= " ":
                assert self.column < self.columns, "written beyond the last column"
                self.cells[self.row][self.column] = character
                self.column += 1

    def _control(self, arguments: str, final: str) -> None:
        if final in "hl" and arguments.startswith("?"):
            on = final == "h"
            self.alternate = on if "1049" in arguments else self.alternate
            self.cursor_shown = on if "25" in arguments.strip("?").split(";") else self.cursor_shown
            return
        numbers = [int(each or 0) for each in arguments.split(";")] if arguments else []
        count = max(1, numbers[0]) if numbers else 1
        rest = self.columns - self.column
        match final:
            case "H":
                self.row, self.column = (max(1, each) - 1 for each in (numbers or [1, 1]))
            case "d":
                self.row = count - 1
            case "G":
                self.column = count - 1
            case "A" | "B":
                self.row += count if final == "B" else -count
            case "C" | "D":
                self.column += count if final == "C" else -count
            case "J":
                first = 0 if numbers == [2] else self.row + 1
                for row in range(first, len(self.cells)):
                    self.cells[row] = [" "] * self.columns
                if numbers != [2]:
                    self.cells[self.row][self.column :] = [" "] * rest
            case "K" if count == 1 and numbers == [1]:
                self.cells[self.row][: self.column + 1] = [" "] * (self.column + 1)
            case "K":
                self.cells[self.row][self.column :] = [" "] * rest
            case "X":
                self.cells[self.row][self.column : self.column + count] = [" "] * min(count, rest)
            case "P" | "@":
                row = self.cells[self.row]
                blank, kept = [" "] * count, row[self.column :]
                kept = kept[count:] + blank if final == "P" else blank + kept
                self.cells[self.row] = (row[: self.column] + kept)[: self.columns]
            case "L" | "M":
                blanks = [[" "] * self.columns for _ in range(count)]
                below = self.cells[self.row :]
                below = below[count:] + blanks if final == "M" else blanks + below
                self.cells = (self.cells[: self.row] + below)[: len(self.cells)]
            case "b":
                for _ in range(count):
                    self._character(self.cells[self.row][self.column - 1])
            case "r":
                assert not numbers or numbers[0] == 1, "a part of the screen scrolls"
            case "m" | "t" | "h" | "l":
                pass  # colours, titles, modes
            case _:
                raise AssertionError(f"the screen does not know ESC [ {arguments} {final}")


class Terminal:
    """Runs the command from `__enter__` on; leaving kills it if it has not ended."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        rows: int,
        columns: int,
        term: str = "xterm",
    ) -> None:
        self._master, self._slave = os.openpty()
        self.screen = Screen(rows, columns)
        self._set_size(rows, columns)
        self._attributes = termios.tcgetattr(self._slave)
        self._unfinished = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *command],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            env={**environment, "TERM": term},
        )
        os.set_blocking(self._master, False)

    def until(self, seen: Callable[[Screen], Any]) -> Any:
        """The first true value of `seen`, as the screen changes."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := seen(self.screen)):
            running = self.process.poll() is None
            self._read()
            assert running and time.monotonic() < deadline or seen(self.screen), self.screen.text
            time.sleep(0.01)
        return found

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, rows: int, columns: int) -> None:
        self._read()
        self.screen.resize(rows, columns)
        self._set_size(rows, columns)

    def ended(self) -> int:
        """Waits for the end; returns the exit status."""
        self.until(lambda _: self.process.poll() is not None)
        self._read()
        return self.process.wait()

    @property
    def restored(self) -> bool:
        """The terminal is as it was before the command."""
        as_before = termios.tcgetattr(self._slave) == self._attributes
        return as_before and not self.screen.alternate and self.screen.cursor_shown

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self._unfinished = self.screen.write(self._unfinished + data)
        except BlockingIOError:
            pass

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)
