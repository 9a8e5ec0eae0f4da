"""What a caller meets: typed refusals that name the field, callbacks, statistics, threads, closing."""

import json
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native import models, reference
from tinyloop_serve.native import (
    ArtifactError,
    BackendUnavailable,
    ClosedError,
    ConfigError,
    GenerateConfig,
    LimitError,
    ModeError,
    Model,
    ModelBusyError,
    TinyLoopError,
    artifact,
    inspect_artifact,
)

NAME = "concat"
PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "model.tinyloop"
    config = models.FAMILY[NAME]
    artifact.write(path, config, reference.random_model(config, seed=2, dtype="fp16"))
    return path


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model(path) as model:
        yield model


@pytest.mark.parametrize(
    ("error", "field", "change"),
    [
        (ConfigError, "temperature", {"temperature": -0.1}),
        (ConfigError, "temperature", {"temperature": float("nan")}),
        (ConfigError, "top_p", {"top_p": 1.5}),
        (ConfigError, "top_k", {"top_k": -1}),
        (ConfigError, "top_k", {"top_k": 2**40}),
        (ConfigError, "min_p", {"min_p": -1.0}),
        (ConfigError, "repetition_penalty", {"repetition_penalty": 0.0}),
        (ConfigError, "max_tokens", {"max_tokens": 0}),
        (ConfigError, "seed", {"seed": -1}),
        (ConfigError, "seed", {"seed": 2**64}),
        (ConfigError, "cache_mode", {"cache_mode": "fp8"}),
        (ConfigError, "stop_sequences[0][1]", {"stop_sequences": [[1, 61]]}),
        (ConfigError, "stop_sequences[0]", {"stop_sequences": ["ab"]}),
        (LimitError, "loops", {"loops": 17}),
        (LimitError, "max_tokens", {"max_tokens": 509}),
    ],
)
def test_a_bad_field_is_refused_by_name(
    model: Model, error: type[TinyLoopError], field: str, change: dict
) -> None:
    before = model.step_counter
    with pytest.raises(error) as caught:
        model.generate(PROMPT, GenerateConfig(**change))
    assert caught.value.field == field
    assert caught.value.accepted and field in str(caught.value)
    assert model.step_counter == before


@pytest.mark.parametrize("prompt", [[], [61], [-1], [2**40], ["a"], "text", 7])
def test_a_bad_prompt_is_refused(model: Model, prompt: object) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        model.generate(prompt, GenerateConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"cache_window": 8}, {"beam_size": 2}, {"loops": 2}, {"top_k": 5}])
def test_a_batch_refuses_what_its_lanes_cannot_share(model: Model, change: dict) -> None:
    with pytest.raises(ModeError) as caught:
        model.generate_batch([PROMPT, PROMPT], [GenerateConfig(), GenerateConfig(**change)])
    assert caught.value.field == next(iter(change))


def test_lanes_may_differ_in_seed_length_stops_and_eos(model: Model) -> None:
    configs = [
        GenerateConfig(temperature=1.0, seed=1, max_tokens=4),
        GenerateConfig(temperature=1.0, seed=2, max_tokens=9, stop_sequences=[[60, 60]], ignore_eos=True),
    ]
    lanes = model.generate_batch([PROMPT, PROMPT[:2]], configs)
    assert [lane.tokens for lane in lanes] == [
        model.generate(p, c).tokens for p, c in zip([PROMPT, PROMPT[:2]], configs, strict=True)
    ]


def test_statistics(model: Model) -> None:
    stats = model.generate(PROMPT, GenerateConfig(loops=3, max_tokens=5, ignore_eos=True)).stats
    found = stats.asdict()
    assert found["prompt_tokens"] == 4 and found["generated_tokens"] == 5 and found["loops"] == 3
    assert found["stop_reason"] == "max_tokens"
    assert found["cache_bytes"] == model.cache_bytes(9, loops=3) > 0
    assert 0 < found["prefill_ms"] <= found["first_token_ms"] and found["decode_ms"] > 0


def test_eos_ends_the_answer_and_is_delivered(path: Path, model: Model) -> None:
    free = model.generate(
        PROMPT, GenerateConfig(temperature=1.5, seed=8, max_tokens=400, ignore_eos=True)
    ).tokens
    assert 0 in free  # eos_ids of the config
    ended = model.generate(PROMPT, GenerateConfig(temperature=1.5, seed=8, max_tokens=400))
    assert ended.tokens == free[: free.index(0) + 1]
    assert ended.stats.stop_reason == "eos"


def test_a_callback_cancels_and_its_exception_passes_through(model: Model) -> None:
    config = GenerateConfig(max_tokens=20, ignore_eos=True)
    counted: list[int] = []

    def stop_at_three(token: int, position: int) -> bool:
        counted.append(token)
        return len(counted) < 3

    assert model.generate_stream(PROMPT, config, stop_at_three).stats.stop_reason == "cancelled"
    assert len(counted) == 3

    def broken(token: int, position: int) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.generate_stream(PROMPT, config, broken)
    assert len(model.generate(PROMPT, config).tokens) == 20  # and the model is free again


def test_a_step_callback_sees_every_lane_and_cancels_one(model: Model) -> None:
    configs = [GenerateConfig(max_tokens=n, ignore_eos=True) for n in (2, 9, 9)]
    steps: list[list[int | None]] = []

    def on_step(lanes: list[int | None]) -> list[int] | None:
        steps.append(lanes)
        return [1] if len(steps) == 4 else None

    lanes = model.generate_batch([PROMPT] * 3, configs, on_step)
    assert [lane.stats.stop_reason for lane in lanes] == ["max_tokens", "cancelled", "max_tokens"]
    assert [[step[i] for step in steps if step[i] is not None] for i in range(3)] == [
        lane.tokens for lane in lanes
    ]
    assert [len(lane.tokens) for lane in lanes] == [2, 4, 9]
    with pytest.raises(ConfigError, match="on_step"):
        model.generate_batch([PROMPT], configs[0], lambda lanes: [3])


def test_overlapping_calls_are_refused_and_disturb_nothing(model: Model) -> None:
    config = GenerateConfig(max_tokens=40, ignore_eos=True)
    expected = model.generate(PROMPT, config).tokens
    inside, go_on = threading.Event(), threading.Event()
    result: list[list[int]] = []

    def wait(token: int, position: int) -> None:
        inside.set()
        assert go_on.wait(60)

    worker = threading.Thread(
        target=lambda: result.append(model.generate_stream(PROMPT, config, wait).tokens)
    )
    worker.start()
    assert inside.wait(60)
    with pytest.raises(ModelBusyError):
        model.generate(PROMPT, config)
    with pytest.raises(ModelBusyError):
        model.logits(PROMPT)
    assert model.step_counter > 0  # life signs are readable meanwhile
    go_on.set()
    worker.join(60)
    assert result == [expected]


def test_closing_during_a_call_lets_it_finish_and_later_use_is_refused(path: Path) -> None:
    model = Model(path)
    config = GenerateConfig(max_tokens=5, ignore_eos=True)
    finished = model.generate_stream(PROMPT, config, lambda token, position: model.close())
    assert len(finished.tokens) == 5
    for use in (lambda: model.generate(PROMPT, config), lambda: model.step_counter, lambda: model.config):
        with pytest.raises(ClosedError):
            use()


def test_loading_refuses_by_name(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be cut in the message
    with pytest.raises(ArtifactError, match="nowhere"):
        Model("nowhere.tinyloop")
    with pytest.raises(LimitError, match="max_seq_len"):
        Model(path, max_seq_len=513)
    with pytest.raises(BackendUnavailable, match="portable"):
        Model(path, simd="sse9")
    with pytest.raises(BackendUnavailable, match="device"):
        Model(path, device="cuda")
    monkeypatch.setenv("TINYLOOP_THREADS", "many")
    with pytest.raises(ConfigError, match="TINYLOOP_THREADS"):
        Model(path)
    monkeypatch.setenv("TINYLOOP_THREADS", "3")
    with Model(path) as model:
        assert model.threads == 3
    with Model(path, threads=1, max_seq_len=64) as model:
        assert model.threads == 1 and model.max_seq_len == 64


def test_weights_are_chosen_by_name_or_by_the_environment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINYLOOP_WEIGHTS", raising=False)
    with Model(path) as model:
        stored = model.weights
    for asked in ("fp16", "bf16", "int8", "int4"):
        with Model(path, weights=asked) as model:
            assert model.weights == asked
    for wrong in ("int3", "fp32", "", "INT8"):
        with pytest.raises(ConfigError, match="fp16, bf16, int8 or int4") as refused:
            Model(path, weights=wrong)
        assert refused.value.field == "weights" and refused.value.value == wrong
    monkeypatch.setenv("TINYLOOP_WEIGHTS", "int8")
    with Model(path) as by_default, Model(path, weights="int4") as asked_for:
        assert (by_default.weights, asked_for.weights) == ("int8", "int4")
    monkeypatch.setenv("TINYLOOP_WEIGHTS", "auto")
    with Model(path) as model:
        assert model.weights == stored
    monkeypatch.setenv("TINYLOOP_WEIGHTS", "int5")
    with pytest.raises(ConfigError, match="TINYLOOP_WEIGHTS"):
        Model(path)


def test_affinity_pins_the_team_and_not_its_caller(path: Path) -> None:
    ours = os.sched_getaffinity(0)
    last = max(ours)
    before = set(os.listdir("/proc/self/task"))
    with Model(path, affinity=str(last)) as model:
        assert model.cpus == [last] and model.threads == 1
    with Model(path, threads=2, affinity="auto") as model:
        team = {int(task) for task in set(os.listdir("/proc/self/task")) - before}
        assert model.cpus == (sorted(ours)[:2] if len(ours) > 1 else [])
        assert {frozenset(os.sched_getaffinity(task)) for task in team} == {frozenset(model.cpus[1:] or ours)}
        model.generate([1, 2], GenerateConfig(max_tokens=1))
        assert os.sched_getaffinity(0) == ours
    with Model(path, threads=len(ours) + 1, affinity="auto") as model:
        assert model.cpus == []
    for wrong in ("", "some", "1000000", f"{last},{last}"):
        with pytest.raises(ConfigError, match="affinity"):
            Model(path, affinity=wrong)
    with pytest.raises(ConfigError, match="each of 2 threads"):
        Model(path, threads=2, affinity=str(last))


def test_inspect_tells_what_the_file_holds(path: Path, model: Model) -> None:
    found = inspect_artifact(path)
    assert found["config"]["n_core"] == 2 and found["config"] == model.config
    assert found["file_bytes"] == path.stat().st_size and found["fingerprint"] == model.fingerprint
    assert found["parameters"] == model.parameters
    assert (found["weights"], found["layout"]) == ("fp16", "panels")
    assert {t["name"] for t in found["tensors"]} == set(artifact.expected_tensors(models.FAMILY[NAME]))


def test_inspect_finds_damage_that_loading_does_not_look_for(path: Path, model: Model) -> None:
    changed = path.with_name("changed.tinyloop")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    with pytest.raises(ArtifactError, match="data_sha256"):
        inspect_artifact(changed)
    with Model(changed) as damaged:
        assert damaged.fingerprint == model.fingerprint  # the header's, and the header says what the data was


def test_a_file_without_a_hash_is_named_by_all_its_bytes(path: Path, model: Model) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    del header["__metadata__"]["data_sha256"]
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    names = set()
    for last in (content[-1], content[-1] ^ 1):
        older = path.with_name("older.tinyloop")
        older.write_bytes(len(text).to_bytes(8, "little") + text + content[end:-1] + bytes([last]))
        names.add(inspect_artifact(older)["fingerprint"])
    assert len(names) == 2 and model.fingerprint not in names


def test_errors_survive_a_process_boundary() -> None:
    error = LimitError("no", field="loops", value="9", accepted="1 to 8")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.field, copy.accepted, str(copy)) == (LimitError, "loops", "1 to 8", "no")


# ------------------------------------------------------------------ defaults from the environment


def test_the_environment_sets_defaults_and_a_given_field_wins(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model.generate(PROMPT, GenerateConfig(max_tokens=8, loops=3))
    monkeypatch.setenv("TINYLOOP_CACHE_MODE", "int8")
    monkeypatch.setenv("TINYLOOP_EARLY_EXIT", "0.25")
    config = GenerateConfig(max_tokens=8)
    assert (config.cache_mode, config.exit_threshold) == ("int8", 0.25)
    prefix = model.create_prefix_cache(PROMPT)
    assert model.generate_from_prefix_cache(prefix, [5], config).tokens, "made of the same defaults"
    assert model.cache_bytes(16) == model.cache_bytes(16, "int8")
    prefix.close()
    given = GenerateConfig(cache_mode="fp16", exit_threshold=0.0, max_tokens=8, loops=3)
    assert model.generate(PROMPT, given).tokens == plain.tokens


def test_speculation_by_default_gives_the_same_tokens_where_it_may(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model.generate(PROMPT, GenerateConfig(max_tokens=12, loops=4))
    beams = model.generate(PROMPT, GenerateConfig(max_tokens=4, beam_size=2))
    assert plain.stats.drafted == 0
    monkeypatch.setenv("TINYLOOP_SPECULATIVE", "1")
    faster = model.generate(PROMPT, GenerateConfig(max_tokens=12, loops=4))
    assert faster.tokens == plain.tokens and faster.stats.drafted > 0
    streamed: list[int] = []
    model.generate_stream(PROMPT, GenerateConfig(max_tokens=12, loops=4), lambda t, _: streamed.append(t))
    assert streamed == plain.tokens
    assert model.generate(PROMPT, GenerateConfig(max_tokens=4, beam_size=2)).tokens == beams.tokens, "may not"
    assert model.generate(PROMPT, GenerateConfig(max_tokens=4, loops=1)).stats.drafted == 0, (
        "nothing to draft"
    )
    off = GenerateConfig(max_tokens=12, loops=4, speculative=False)
    assert model.generate(PROMPT, off).stats.drafted == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("TINYLOOP_CACHE_MODE", "fp8"), ("TINYLOOP_EARLY_EXIT", "much"), ("TINYLOOP_SPECULATIVE", "yes")],
)
def test_a_bad_default_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        GenerateConfig()
    assert (caught.value.field, caught.value.value) == (name, value)
    given = GenerateConfig(cache_mode="int8", exit_threshold=0.25, speculative=True)
    assert (given.cache_mode, given.exit_threshold, given.speculative) == ("int8", 0.25, True), "it wins"


def test_a_resume_handle_is_built_without_the_environments_early_exit(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GenerateConfig(max_tokens=12, exit_threshold=0.0)
    plain = model.generate(PROMPT, config).tokens
    monkeypatch.setenv("TINYLOOP_EARLY_EXIT", "0.9")
    handle = model.create_resume_handle(PROMPT, 2)
    assert model.resume_generate(handle, model.config["loops"], config).tokens == plain
    handle.close()
