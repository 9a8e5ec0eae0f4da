"""What a user sees of a running fleet: text that is cut in the right place, and commands that end as they
say. Fixtures are in conftest.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from tinyloop_serve.native import demo_model_path

pytestmark = pytest.mark.integration

PROMPT = "The definition of"


# ------------------------------------------------------------------ text


def test_a_stop_string_may_span_tokens(shared_fleet: Any, reference: Any) -> None:
    """From the middle of one token to the middle of a later one; the decode ends with the token that
    completes it."""
    tokens = reference.tokens(PROMPT, max_tokens=60, loops=4, ignore_eos=True)
    ends = [len(reference.text(tokens[: n + 1])) for n in range(len(tokens))]  # text length after each token
    text = reference.text(tokens)
    for first in range(10, 50):
        start, stop = ends[first] - 1, ends[first + 2] - 1
        if stop - start >= 3 and text.find(text[start:stop]) == start:
            break
    else:
        pytest.fail("no stop string of the kind that the test needs")
    needed = next(n for n, end in enumerate(ends) if end >= stop) + 1
    for stream in (True, False):
        with shared_fleet.client() as client:
            ask = client.stream if stream else client.generate
            answer = ask(PROMPT, max_tokens=60, loops=4, ignore_eos=True, stop=[text[start:stop]])
            if stream:
                pieces = [chunk.text for chunk in answer]
                answer = answer.result()
                assert "".join(pieces) == answer.text
        assert answer.text == text[:start]
        assert answer.stop_reason == "stop_sequence"
        assert list(answer.tokens) == tokens[:needed]


def test_no_half_characters_are_sent(shared_fleet: Any, reference: Any) -> None:
    """At this temperature bytes come in any order: valid characters arrive whole, the rest as U+FFFD,
    none is lost."""
    options = {"max_tokens": 80, "loops": 2, "temperature": 50.0, "ignore_eos": True}
    with shared_fleet.client() as client:
        for seed in range(4):
            with client.stream("日本 😀", seed=seed, **options) as stream:
                text = "".join(chunk.text for chunk in stream)
                answer = stream.result()
            assert list(answer.tokens) == reference.tokens("日本 😀", seed=seed, **options)
            assert text == answer.text == reference.text(answer.tokens)
            assert text.encode().decode() == text


# ------------------------------------------------------------------ commands


def test_generate_streams_text_and_then_statistics(shared_fleet: Any, reference: Any) -> None:
    done = shared_fleet.run("generate", "--loops", "4", "--max-tokens", "20", PROMPT)
    assert done.returncode == 0
    tokens = reference.tokens(PROMPT, loops=4, max_tokens=20)
    assert done.stdout == reference.text(tokens) + "\n"
    assert f"+ {len(tokens)} tokens, 4 loops" in done.stderr and "first token" in done.stderr


def test_generate_as_json_and_from_standard_input(shared_fleet: Any, reference: Any) -> None:
    flags = "generate --json --max-tokens 12 --seed 7 --temperature 0.8 --top-k 20 -".split()
    done = shared_fleet.run(*flags, text=PROMPT)
    assert done.returncode == 0 and done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["tokens"] == reference.tokens(PROMPT, max_tokens=12, seed=7, temperature=0.8, top_k=20)
    assert answer["text"] == reference.text(answer["tokens"])
    assert answer["stop_reason"] in ("eos", "max_tokens")
    assert answer["stats"]["replica"].startswith("replica-")


def test_an_interrupted_generate_gives_its_lane_back(shared_fleet: Any, eventually: Any) -> None:
    command = shared_fleet.command(
        "generate", "--max-tokens", "400", "--ignore-eos", "--temperature", "1", PROMPT
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=shared_fleet.environment
    ) as running:
        assert running.stdout is not None and running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 130 and b"Traceback" not in errors
    eventually(lambda: shared_fleet.status().running == 0)


@pytest.mark.parametrize(
    ("flags", "status", "field"),
    [
        (["--max-tokens", "100000"], 2, "max_tokens"),
        (["--max-tokens", "0"], 2, "max_tokens"),
        (["--loops", "1000"], 2, "sampling.loops"),
        (["--temperature", "nan"], 2, "sampling.temperature"),
        (["--cache-mode", "int3"], 2, "sampling.cache_mode"),
        (["--deadline-s", "0.001"], 75, None),
    ],
)
def test_a_refused_request_says_what_would_be_accepted(
    shared_fleet: Any, flags: list[str], status: int, field: str | None
) -> None:
    done = shared_fleet.run("generate", "--json", *flags, PROMPT)
    assert done.returncode == status, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["message"] in done.stderr and "Traceback" not in done.stderr
    if field:
        assert error["field"] == field and error["accepted"]


def test_chat_without_a_template_is_refused(shared_fleet: Any, reference: Any) -> None:
    if reference.model.metadata.get("chat_template"):
        pytest.skip("the demo model has a chat template")
    done = shared_fleet.run("generate", "--chat", "hello")
    assert done.returncode == 2 and "no chat template" in done.stderr


def test_status_for_people_and_for_programs(shared_fleet: Any, reference: Any) -> None:
    shown = shared_fleet.run("status")
    assert shown.returncode == 0
    for word in ("replica-0", "replica-1", "ready", "demo", "MEMORY"):
        assert word in shown.stdout
    found = json.loads(shared_fleet.run("status", "--json").stdout)
    assert found["endpoint"] == shared_fleet.endpoint
    assert found["model"]["fingerprint"] == reference.model.fingerprint
    assert [replica["state"] for replica in found["replicas"]] == ["ready", "ready"]


def test_without_a_fleet_the_commands_say_how_to_start_one(shared_fleet: Any) -> None:
    for command in (["generate", "x"], ["status"], ["chat"]):
        done = shared_fleet.run(
            *command, "--endpoint", f"ipc://{shared_fleet.directory}/nobody.sock", text="x\n"
        )
        assert done.returncode == 69
        assert "tinyloop up" in done.stderr and "Traceback" not in done.stderr


def test_inspect_describes_the_artifact(shared_fleet: Any, reference: Any) -> None:
    path = str(demo_model_path())
    shown = shared_fleet.run("inspect", path)
    assert shown.returncode == 0
    assert reference.model.fingerprint in shown.stdout and "embed.weight" in shown.stdout
    found = json.loads(shared_fleet.run("inspect", "--json", path).stdout)
    assert found["config"] == reference.model.config
    assert found["parameters"] == reference.model.parameters
    assert found["weights"] == "fp16" and "weights        fp16" in shown.stdout
    missing = shared_fleet.run("inspect", "/nowhere.tinyloop")
    assert missing.returncode == 78 and "/nowhere.tinyloop" in missing.stderr


def test_a_fleet_says_how_to_use_it_and_how_fast_it_was(shared_fleet: Any) -> None:
    fields = dict(word.split("=", 1) for word in shared_fleet.ready.split()[1:])
    assert fields["endpoint"] == shared_fleet.endpoint and fields["replicas"] == "2"
    assert 0 < float(fields["startup_ms"]) < 60_000
