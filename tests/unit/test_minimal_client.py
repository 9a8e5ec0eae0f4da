"""The documented third-party client is complete, short, the same in both places, and works."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCE = HERE / "minimal_client.py"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake = load(HERE / "fake_dispatcher.py")


def test_the_specification_prints_exactly_this_client() -> None:
    specification = (HERE.parents[1] / "protocol" / "SPEC.md").read_text()
    _, _, rest = specification.partition("```python\n")
    printed, _, _ = rest.partition("```\n")
    assert printed == SOURCE.read_text()
    assert len(printed.splitlines()) < 60
    assert "tinyloop_serve" not in printed


def test_it_prints_the_answer() -> None:
    dispatcher = fake.FakeDispatcher(answer=fake.echo)
    try:
        run = subprocess.run(
            [sys.executable, str(SOURCE), dispatcher.endpoint, "to be or"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        dispatcher.wait_for("Goodbye")
    finally:
        dispatcher.close()
    assert (run.stdout, run.returncode) == ("to be or END", 0), run.stderr
    assert dispatcher.pings[0]["lease_ms"] == 10_000


def test_it_takes_several_bodies_of_one_message_and_goes_on_after_tokens_it_has() -> None:
    dispatcher = fake.FakeDispatcher()
    answer = load(SOURCE).generate(dispatcher.endpoint, "x", done=bytes(8))
    heard: list[Any] = []
    reader = threading.Thread(target=lambda: heard.extend(answer))
    reader.start()
    try:
        ((peer, body),) = dispatcher.wait_for("Generate")
        assert body["done"] == bytes(8)
        pieces = [fake.tokens(body["id"], 2, [5], "a"), fake.tokens(body["id"], 3, [6], "b")]
        dispatcher.say_together(peer, *pieces, fake.done(body["id"], text="c"))
        reader.join(fake.CAP_S)
    finally:
        dispatcher.close()
    assert heard == [("a", (5,)), ("b", (6,)), ("c", ())]


def test_it_reports_refusals_and_gaps() -> None:
    replies = [[fake.failed("", "overloaded", "later")], [fake.tokens("?", 1, [5])]]

    def answer(body: Any) -> Any:
        if body["type"] != "Generate":
            return []
        return [{**reply, "id": reply["id"] and body["id"]} for reply in replies.pop(0)]

    dispatcher = fake.FakeDispatcher(answer=answer)
    client = load(SOURCE)
    try:
        with pytest.raises(RuntimeError, match="overloaded: later"):
            list(client.generate(dispatcher.endpoint, "x", max_tokens=4))
        with pytest.raises(ConnectionError, match="token 0 was expected, 1 came"):
            list(client.generate(dispatcher.endpoint, "x"))
    finally:
        dispatcher.close()
