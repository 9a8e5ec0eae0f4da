"""What a replica does with the real engine beside plain runs: handles, answers that go on, speculation, its
memory budget, its health. Catches: tokens or text that change when an answer moves to another replica, a cap
that is not kept, an ill engine that goes on taking work."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_replica_process import byte_level_tokenizer, write_model
from tinyloop_serve.dispatcher.ledger import lane_bytes
from tinyloop_serve.native import GenerateConfig, Model
from tinyloop_serve.native.errors import LimitError, OutOfMemoryError
from tinyloop_serve.protocol.codec import TO_CLIENT, tokens_from_bytes, tokens_to_bytes
from tinyloop_serve.protocol.messages import (
    VERSION,
    Build,
    Built,
    Calibrated,
    Calibration,
    Done,
    Drop,
    Failed,
    Lane,
    Run,
    Sampling,
    Stats,
    Step,
    Tokens,
)
from tinyloop_serve.protocol.modes import CACHE_MODES
from tinyloop_serve.replica import budget, prompts, scaffolds
from tinyloop_serve.replica.config import Config, ConfigFault, parse
from tinyloop_serve.replica.executor import Executor, Outcome
from tinyloop_serve.replica.handles import HandleStore
from tinyloop_serve.replica.health import MOST_FAILURES, MOST_PROBES, Health
from tinyloop_serve.replica.speculation import CANDIDATES, Speculation
from tinyloop_serve.replica.text import Vocabulary

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_model(tmp_path_factory.mktemp("model") / "tiny.tinyloop", byte_level_tokenizer())
    with Model(path, threads=1) as loaded:
        yield loaded


class Bench:
    """A decoding thread over a real model."""

    def __init__(self, model: Any, *, prompts: list[list[int]] | None = None, threshold: float = 1.3) -> None:
        self.posted: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.health, self.given_up = Health(), threading.Event()
        self.handles = HandleStore(model, max_handles=2)
        self.speculation = Speculation(prompts or [], loops=2, threshold=threshold)
        vocabulary = Vocabulary(model.metadata["tokenizer"]) if isinstance(model, Model) else None
        self.executor = Executor(
            model,
            vocabulary,
            "r0",
            self.posted.put,
            identity="f00d",
            handles=self.handles,
            speculation=self.speculation,
            health=self.health,
            give_up=lambda why: self.given_up.set(),
            say=lambda text: None,
        )

    def stop(self) -> None:
        assert self.executor.stop(10)

    def run(self, *lanes: Lane, **sampling: Any) -> list[tuple[list[int], str, int, Stats]]:
        """Per lane: tokens, text, the first seq, stats."""
        self.executor.submit(Run(run=1, sampling=Sampling(**{"loops": 2} | sampling), lanes=lanes))
        tokens: dict[int, list[int]] = {lane.key: [] for lane in lanes}
        text = {lane.key: "" for lane in lanes}
        first = {lane.key: -1 for lane in lanes}
        stats: dict[int, Stats] = {}
        while True:
            outcome = self.posted.get(timeout=20)
            if not isinstance(outcome.message, Step):
                continue
            for key, payload in zip(outcome.message.keys, outcome.payloads, strict=True):
                message = TO_CLIENT.decode([VERSION, payload])
                assert isinstance(message, Tokens | Done), message
                text[key] += message.text
                if isinstance(message, Tokens):
                    first[key] = message.seq if first[key] < 0 else first[key]
                    tokens[key] += tokens_from_bytes(message.tokens)
                else:
                    stats[key] = message.stats
            if outcome.message.idle:
                return [(tokens[k], text[k], first[k], stats[k]) for k in tokens]

    def built(self, **fields: Any) -> Built:
        build = {"kind": "prefix", "prompt": tokens_to_bytes(PROMPT), "loops": 2} | fields
        self.executor.build(Build(**build))
        message = self.posted.get(timeout=20).message
        assert isinstance(message, Built)
        return message


@pytest.fixture
def bench(model: Model) -> Iterator[Bench]:
    it = Bench(model)
    yield it
    it.stop()


def lane(key: int = 1, *, done: list[int] | None = None, **fields: Any) -> Lane:
    base: dict[str, Any] = {"prompt": tokens_to_bytes(PROMPT), "max_tokens": 24, "seed": 7}
    return Lane(key=key, id=f"id{key}", done=tokens_to_bytes(done or []), **base | fields)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("fields", [{}, {"stop": ("e",)}, {"stop_tokens": ((33, 34),)}])
def test_an_answer_goes_on_as_if_nothing_had_happened(
    bench: Bench, sampling: dict[str, Any], fields: dict[str, Any]
) -> None:
    [(whole, text, _, _)] = bench.run(lane(**fields), **sampling)
    shown = Bench.run
    for cut in range(len(whole)):
        [(rest, later, first, stats)] = shown(
            bench, lane(done=whole[:cut], failovers=1, **fields), **sampling
        )
        assert whole[:cut] + rest == whole and first in (cut, -1)
        assert text.endswith(later)
        assert (stats.generated_tokens, stats.prompt_tokens, stats.failovers) == (len(whole), 6, 1)


def test_a_stop_that_spans_the_seam(bench: Bench) -> None:
    [(whole, _, _, _)] = bench.run(lane())
    stop = (tuple(whole[9:13]),)
    [(short, _, _, _)] = bench.run(lane(stop_tokens=stop))
    for cut in range(len(short) + 1):
        [(rest, _, _, _)] = bench.run(lane(done=short[:cut], stop_tokens=stop))
        assert short[:cut] + rest == short, "also where the answer had ended already"


def test_lanes_of_a_batch_go_on_each_from_its_own_place(bench: Bench) -> None:
    wholes = [tokens for tokens, *_ in bench.run(lane(1), lane(2, seed=9), temperature=1.0)]
    lanes = [lane(1, done=wholes[0][:5]), lane(2, seed=9, done=wholes[1][:17])]
    rests = bench.run(*lanes, temperature=1.0)
    assert [wholes[0][:5] + rests[0][0], wholes[1][:17] + rests[1][0]] == wholes


@pytest.mark.parametrize("kind", ["prefix", "scaffold", "resume"])
def test_a_handle_saves_work_and_changes_nothing(bench: Bench, kind: Any) -> None:
    longer = PROMPT if kind == "resume" else [*PROMPT, 11, 12]
    [(plain, text, _, _)] = bench.run(lane(prompt=tokens_to_bytes(longer)), temperature=0.7)
    built = bench.built(handle="h", kind=kind)
    assert built.bytes > 0 and not built.code
    [(tokens, same, _, stats)] = bench.run(lane(prompt=tokens_to_bytes(longer), handle="h"), temperature=0.7)
    assert (tokens, same) == (plain, text)
    assert (stats.loops_skipped if kind == "resume" else stats.prefix_tokens) > 0
    [(rest, _, _, _)] = bench.run(
        lane(prompt=tokens_to_bytes(longer), handle="h", done=plain[:7]), temperature=0.7
    )
    assert plain[:7] + rest == plain
    [(tokens, _, _, stats)] = bench.run(lane(prompt=tokens_to_bytes(longer), handle="gone"), temperature=0.7)
    assert tokens == plain and stats.prefix_tokens == 0, "one that is not there harms nobody"


def test_the_cap_is_over_all_kinds_and_the_least_recently_used_goes(bench: Bench) -> None:
    bench.built(handle="a")
    bench.built(handle="b", kind="resume")
    bench.run(lane(handle="a"))
    assert bench.built(handle="c", kind="scaffold").evicted == ("b",)
    assert [held.build.handle for held in bench.handles.held] == ["a", "c"]
    bench.executor.drop(Drop(("a", "unknown")))
    assert bench.built(handle="d").evicted == ()
    assert [held.build.handle for held in bench.handles.held] == ["c", "d"]
    failed = bench.built(handle="e", loops=99)
    assert failed.code == "limit" and failed.evicted == ("c",), "what made room is gone, whatever came of it"


def test_a_cap_of_none_holds_none(model: Model) -> None:
    bench = Bench(model)
    bench.handles.max_handles = 0
    refused = bench.built(handle="a")
    assert refused.code == "limit" and "--max-handles is 0" in refused.message and bench.health.text == "ok"
    assert bench.handles.held == ()
    bench.stop()


def test_a_handle_that_cannot_be_built_is_a_typed_refusal(bench: Bench) -> None:
    built = bench.built(handle="x", prompt=tokens_to_bytes([1] * 1000))
    assert built.code == "limit" and "1000" in built.message and bench.health.text == "ok"
    assert bench.built(handle="y", loops=99).code == "limit"
    assert bench.handles.held == ()


def test_a_building_that_was_given_up_is_not_kept(model: Model) -> None:
    bench = Bench(model)
    blocker = bench.executor.submit(Run(run=1, sampling=Sampling(loops=2), lanes=(lane(),)))
    building = bench.executor.build(Build("h", "prefix", tokens_to_bytes(PROMPT), 2))
    building.give_up()
    bench.stop()
    assert blocker.live == 0 and bench.handles.held == ()


def test_a_building_given_up_while_it_is_made_is_not_kept(model: Model) -> None:
    bench, entered, let_go = Bench(model), threading.Event(), threading.Event()
    build = bench.handles.build

    def slow(asked: Build) -> int:
        size = build(asked)
        entered.set()
        let_go.wait(20)
        return size

    bench.handles.build = slow  # type: ignore[method-assign]
    building = bench.executor.build(Build("h", "prefix", tokens_to_bytes(PROMPT), 2))
    assert entered.wait(20)
    building.give_up()
    let_go.set()
    bench.stop()
    assert bench.handles.held == ()


def test_a_measurement_that_fails_is_the_engines_failure_and_speculation_is_off() -> None:
    bench = Bench(FailingEngine(), prompts=[PROMPT])
    message = bench.posted.get(timeout=20).message
    assert isinstance(message, Calibrated) and not message.calibration.enabled
    assert "could not be measured: still none" in bench.speculation.why_not(2)
    fail(bench, MOST_FAILURES - 1)
    assert bench.health.ill
    bench.stop()


def test_speculation_is_measured_then_used_or_not_and_says_so(model: Model) -> None:
    fast = Bench(model, prompts=[PROMPT, [3, 4, 5]], threshold=0.0)
    [(plain, _, _, _)] = fast.run(lane())
    while fast.speculation.calibration is None:
        assert isinstance(fast.posted.get(timeout=20).message, Calibrated)
    calibration = fast.speculation.calibration
    assert calibration.enabled and calibration.speedup > 0 and calibration.prompts == 2
    for method in ("speculative", "tree_speculative"):
        [(tokens, _, _, stats)] = fast.run(lane(method=method))
        assert tokens == plain and (stats.method, stats.method_reason) == (method, "")
    [(_, _, _, stats)] = fast.run(lane(method="speculative"), loops=1)
    assert stats.method == "plain" and "loops=1 is not more than" in stats.method_reason
    fast.stop()

    slow = Bench(model, prompts=[PROMPT], threshold=1000.0)
    assert isinstance(slow.posted.get(timeout=20).message, Calibrated)
    [(tokens, _, _, stats)] = slow.run(lane(method="speculative"))
    assert tokens == plain and stats.method == "plain" and "not more than 1000" in stats.method_reason
    slow.stop()


def test_speculation_is_measured_one_call_at_a_time_between_requests(model: Model) -> None:
    """So that a request that comes in the middle waits for one short answer, not for a whole prompt's."""
    speculation, steps = Speculation([PROMPT], loops=2, threshold=1.3), []
    while speculation.pending:
        before = model.step_counter
        speculation.measure_some(model)
        steps.append(model.step_counter - before)
    assert max(steps) < sum(steps) / 3
    assert speculation.calibration is not None and speculation.calibration.prompts == 1


@pytest.mark.parametrize("context", [2, 16, 40])
def test_a_short_context_is_measured_with_what_fits(tmp_path: Path, context: int) -> None:
    path = write_model(tmp_path / "tiny.tinyloop", byte_level_tokenizer())
    with Model(path, max_seq_len=context, threads=1) as short:
        vocabulary = Vocabulary(short.metadata["tokenizer"])
        found = prompts.read(config(short), short, vocabulary)
        speculation = Speculation(found, loops=2, threshold=0.0)
        while speculation.pending:
            speculation.measure_some(short)
    assert speculation.calibration is not None and speculation.calibration.prompts == len(found) == 5


@pytest.mark.parametrize(("lines", "why"), [(4, "4 prompts"), (11, "11 prompts"), (None, "No such file")])
def test_prompts_to_measure_on_are_5_to_10(model: Model, tmp_path: Path, lines: int | None, why: str) -> None:
    path = tmp_path / "prompts.txt"
    if lines is not None:
        path.write_text("\n\n".join(f"prompt {number}" for number in range(lines)))
    with pytest.raises(ConfigFault, match=f"--calibration-prompts {path}: .*{why}"):
        prompts.read(config(model, "--calibration-prompts", str(path)), model, None)
    path.write_text("a\nb\nc\nd\ne\n")
    assert len(prompts.read(config(model, "--calibration-prompts", str(path)), model, None)) == 5


def test_without_prompts_speculation_is_off() -> None:
    off = Speculation([], loops=8, threshold=1.3)
    assert off.calibration == Calibration(threshold=1.3) and "off" in off.why_not(8)
    assert "one loop" in Speculation([PROMPT], loops=1, threshold=1.3).why_not(1)
    assert Speculation([PROMPT], loops=2, threshold=1.3).why_not(2) == "not measured yet"


# ---------------------------------------------------------------- memory


def config(model: Model, *flags: str) -> Config:
    return parse(["--model", "/nowhere", "--endpoint", "ipc:///x/r.sock", *flags])


def test_the_ledgers_arithmetic_is_the_engines(model: Model) -> None:
    found = budget.of(model, config(model), max_loops=8)
    for mode in CACHE_MODES:
        cost = found.costs[mode]
        for tokens in (1, 16, 17, 100, 128):
            for loops in (1, 3, 8):
                rounded = -(-tokens // cost.round_to) * cost.round_to
                expected = rounded * (cost.fixed + loops * cost.per_loop)
                assert model.cache_bytes(tokens, mode, loops) == expected, (mode, tokens, loops)
    window = model.cache_bytes(100_000, "fp16", 2, 40)
    cost = found.costs["fp16"]
    rows = -(-(40 + found.window_rows) // cost.round_to) * cost.round_to
    assert window <= rows * (cost.fixed + 2 * cost.per_loop) <= window * 1.1


SHAPES: list[dict[str, Any]] = [{}, {"beam_size": 2}, {"beam_size": 5}, {"cache_window": 20}]


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_no_run_takes_more_than_the_ledger_reserves(model: Model, mode: str) -> None:
    found = budget.of(model, config(model), max_loops=8)
    drafts = found.weight_bytes - model.weight_bytes  # what is set aside for them
    for shape in SHAPES:
        sampling = Sampling(loops=3, cache_mode=mode, **shape)
        asked = GenerateConfig(loops=3, max_tokens=30, cache_mode=mode, ignore_eos=True, **shape)
        taken = model.generate([5, 6, 7], asked).stats.cache_bytes
        assert taken == lane_bytes(found, sampling, 33), shape
    for draft in CANDIDATES:
        asked = GenerateConfig(loops=3, max_tokens=29, cache_mode=mode, ignore_eos=True)
        reserved = lane_bytes(found, Sampling(loops=3, cache_mode=mode), 32)
        most = reserved + drafts - model.states_bytes(1 + draft.draft_ahead * draft.branches)
        for speculate in (model.generate_speculative, model.generate_tree_speculative):
            taken = speculate([5, 6, 7], draft, asked).stats.cache_bytes
            assert reserved < taken <= most


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_no_handle_takes_more_than_was_set_aside_for_it(model: Model, mode: str) -> None:
    found = budget.of(model, config(model, "--max-handles", "3"), max_loops=8)
    prompt = [5] * (model.max_seq_len - 1)
    for kind in ("resume", "prefix"):
        store = HandleStore(model, 3)
        size = store.build(Build("h", kind, tokens_to_bytes(prompt), 8, mode))
        assert 0 < size <= found.handle_bytes // 3, kind
        store.drop(["h"])


def test_a_budget_that_does_not_fit_shows_its_arithmetic(model: Model) -> None:
    largest = max(model.cache_bytes(128, mode, 8) for mode in CACHE_MODES)
    handle = largest + model.states_bytes(128)
    enough = (model.weight_bytes + 2 * handle + largest + (1 << 20)) >> 20
    found = budget.of(model, config(model, "--memory-mib", str(enough), "--max-handles", "2"), 8)
    assert found.max_handles == 2 and found.handle_bytes == 2 * handle
    assert found.cache_bytes == (enough << 20) - found.weight_bytes - 2 * handle >= largest
    many = str((enough << 20) // largest + 1)
    with pytest.raises(ConfigFault, match=r"budget of .* < .* weights .* handles x .* lower --max-handles"):
        budget.of(model, config(model, "--memory-mib", str(enough), "--max-handles", many), 8)


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "big.tinyloop"
    with path.open("wb") as file:
        file.truncate(3 << 20)
    flags = ["--model", str(path), "--endpoint", "ipc:///x/r.sock", "--memory-mib", "2"]
    with pytest.raises(ConfigFault, match=r"3\.0 MiB of weights, the memory budget is 2\.0 MiB"):
        budget.check_file(parse(flags))
    budget.check_file(parse([*flags, "--weights", "int4"]))  # a quarter of it: judged once loaded


def test_the_memory_that_is_free_is_that_of_the_narrowest_group_around_us(tmp_path: Path) -> None:
    def group(place: str, limit: str, used: int) -> None:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "memory.max").write_text(f"{limit}\n")
        (tmp_path / place / "memory.current").write_text(f"{used}\n")
        (tmp_path / place / "memory.stat").write_text("anon 7\nactive_file 100\ninactive_file 20\n")

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:   9 kB\nMemAvailable:   8 kB\nHugePages_Total:   0\n")
    free = functools.partial(budget._available, tmp_path / "proc", tmp_path / "groups")
    assert free() == 8192, "no control groups of version 2"
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/all.slice/tinyloop.service\n")
    assert free() == 8192
    group("groups/all.slice/tinyloop.service", "max", 10)
    assert free() == 8192, "no limit"
    group("groups/all.slice", "6000", 1000)
    assert free() == 6000 - 1000 + 120
    group("groups/all.slice/tinyloop.service", "5000", 1000)
    assert free() == 5000 - 1000 + 120
    group("groups", "3000", 4000)
    assert free() == 0
    group(".", "1", 4000)  # outside: a folder that happens to be there
    group("groups", "max", 4000)
    assert free() == 5000 - 1000 + 120
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")  # in a container
    group("groups", "4500", 1000)
    assert free() == 4500 - 1000 + 120


class OnDevice:
    """The model, were it on a device with `free` bytes left of its own."""

    def __init__(self, model: Model, free: int) -> None:
        self.weight_bytes, self.max_seq_len = model.weight_bytes, model.max_seq_len
        self.cache_bytes, self.states_bytes = model.cache_bytes, model.states_bytes
        self.device_free_bytes = free


def test_on_a_device_the_budget_is_its_memory_shared_by_those_on_it(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    total, used = 1 << 30, 100 << 20
    found = [{"name": "cpu", "total_bytes": 0}, {"name": "cuda:0", "total_bytes": total}]
    monkeypatch.setattr(budget, "devices", lambda: found)

    def limit(*flags: str, free: int) -> int:
        return budget.of(OnDevice(model, free), config(model, *flags), 8).memory_bytes

    left = total - used - model.weight_bytes
    assert limit("--device", "cuda:0", free=left) == total - used, "what others took is not ours"
    assert limit("--device", "cuda", "--device-share", "2", free=left) == total // 2
    assert (
        limit("--device", "cuda", "--device-share", "2", free=200 << 20) == (200 << 20) + model.weight_bytes
    )
    assert limit("--device", "cuda", "--memory-mib", "300", free=left) == 300 << 20
    with pytest.raises(ConfigFault, match=r"budget of 1\.0 MiB < .* MiB of weights and work space"):
        limit("--device", "cuda:0", "--device-share", "1024", free=left)

    path = tmp_path / "big.tinyloop"
    with path.open("wb") as file:
        file.truncate(600 << 20)
    flags = ["--model", str(path), "--endpoint", "ipc:///x/r.sock", "--device", "cuda"]
    budget.check_file(parse(flags))
    with pytest.raises(ConfigFault, match=r"600\.0 MiB of weights, the memory budget is 512\.0 MiB"):
        budget.check_file(parse([*flags, "--device-share", "2"]))


# ---------------------------------------------------------------- health


class FailingEngine:
    """Every call fails while `broken`."""

    config: dict[str, Any] = {"eos_ids": []}  # noqa: RUF012
    cpus: list[int] = []  # noqa: RUF012
    step_counter = 0
    max_seq_len = 128
    broken = True
    error: Exception = OutOfMemoryError("no memory for the cache")

    def generate_stream(self, *_: object) -> Any:
        raise self.error

    def create_prefix_cache(self, *_: object) -> Any:
        raise OutOfMemoryError("no memory for the handle")

    def generate(self, *_: object) -> Any:
        if self.broken:
            raise OutOfMemoryError("still none")


def fail(bench: Bench, times: int) -> list[str]:
    codes = []
    for _ in range(times):
        bench.executor.submit(Run(run=1, sampling=Sampling(loops=2), lanes=(lane(),)))
        outcome = bench.posted.get(timeout=20)
        message = TO_CLIENT.decode([VERSION, outcome.payloads[0]])
        assert isinstance(message, Failed)
        codes.append(message.code)
    return codes


@pytest.mark.timeout(60)
def test_an_engine_that_keeps_failing_is_ill_and_in_the_end_given_up() -> None:
    bench = Bench(FailingEngine())
    assert fail(bench, MOST_FAILURES - 1) == ["engine"] * (MOST_FAILURES - 1) and bench.health.text == "ok"
    fail(bench, 1)
    assert bench.given_up.wait(30)
    assert "in a row" in bench.health.text and "OutOfMemoryError" in bench.health.text
    bench.stop()


@pytest.mark.timeout(60)
def test_runs_that_fail_while_it_is_ill_neither_end_it_nor_its_trials() -> None:
    engine = FailingEngine()
    bench = Bench(engine)
    fail(bench, MOST_FAILURES + 2 * MOST_PROBES)  # in no time, and before anybody can hear that it is ill
    assert bench.health.ill and not bench.health.hopeless
    engine.broken = False
    while bench.health.ill:
        assert not bench.given_up.wait(0.05)
    bench.stop()


@pytest.mark.parametrize("refused", [False, True])
def test_a_run_that_never_reached_the_engine_says_nothing_of_its_health(refused: bool) -> None:
    engine = FailingEngine()
    bench = Bench(engine)
    fail(bench, MOST_FAILURES)
    if refused:
        engine.error = LimitError("too long")
    job = bench.executor.submit(Run(run=1, sampling=Sampling(loops=2), lanes=(lane(),)))
    if not refused:
        job.cancel()
    while not bench.posted.get(timeout=20).message.idle:  # type: ignore[union-attr]
        pass
    assert bench.health.ill
    bench.stop()


@pytest.mark.timeout(60)
def test_an_engine_that_works_again_is_well_again() -> None:
    engine = FailingEngine()
    bench = Bench(engine)
    fail(bench, MOST_FAILURES)
    assert bench.health.ill
    engine.broken = False
    while bench.health.ill:
        assert not bench.given_up.wait(0.05)
    bench.stop()


def test_no_memory_for_a_handle_makes_it_ill_at_once_until_it_works_again() -> None:
    engine = FailingEngine()
    bench = Bench(engine)
    built = bench.built(handle="h")
    assert built.code == "engine" and "no memory for the handle" in built.message
    assert bench.health.ill and "no memory for the handle" in bench.health.text
    engine.broken = False
    while bench.health.ill:
        assert not bench.given_up.wait(0.05)
    bench.stop()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("at", ["run", "build", "trial", "queue"])
def test_whatever_the_thread_hangs_in_it_is_at_work(at: str) -> None:
    bench, entered, let_go = Bench(engine := FailingEngine()), threading.Event(), threading.Event()

    def hang(*_: object) -> Any:
        entered.set()
        let_go.wait(50)
        raise OutOfMemoryError("at last")

    engine.generate_stream = engine.create_prefix_cache = hang  # type: ignore[method-assign]
    if at == "trial":
        engine.generate = hang  # type: ignore[method-assign]
        bench.health.failed("it", now=True)
        bench.executor.drop(Drop(("unknown",)))  # it looks at its health after this
    elif at == "build":
        bench.executor.build(Build("h", "prefix", tokens_to_bytes(PROMPT), 2))
    else:
        bench.executor.submit(Run(run=1, sampling=Sampling(loops=2), lanes=(lane(),)))
    assert entered.wait(20) and bench.executor.working
    if at == "queue":
        bench.executor._at_work = False  # as if it were stopped before it has taken the next
        bench.executor.submit(Run(run=2, sampling=Sampling(loops=2), lanes=(lane(),)))
        assert bench.executor.working
    let_go.set()
    bench.stop()


@pytest.mark.timeout(60)
def test_a_thread_with_nothing_to_do_is_not_at_work(bench: Bench) -> None:
    bench.run(lane())
    while bench.executor.working:
        pass


# ------------------------------------------------------------------ scaffolds from the configuration


def with_scaffolds(*places: str) -> Config:
    return parse(["--model", "m", "--endpoint", "ipc:///x", *(f"--scaffold={place}" for place in places)])


def test_scaffolds_of_the_configuration_are_the_same_handles_on_every_replica(
    model: Model, tmp_path: Path
) -> None:
    (tmp_path / "system.txt").write_text("the definition of")
    place = str(tmp_path / "system.txt")
    stores = [HandleStore(model, max_handles=2) for _ in range(2)]
    vocabulary = Vocabulary(model.metadata["tokenizer"])
    for store in stores:
        scaffolds.register(with_scaffolds(place, f"{place}@4"), model, vocabulary, store)
    builds = [[held.build for held in store.held] for store in stores]
    assert builds[0] == builds[1] and [build.loops for build in builds[0]] == [2, 4]
    for build in builds[0]:
        assert tokens_from_bytes(build.prompt) == vocabulary.encode("the definition of")
        assert build.kind == "scaffold" and build.shared and build.lease_ms == 0
    for store in stores:
        store.drop([build.handle for build in builds[0]])


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("{0}/missing.txt", "missing.txt"),
        ("{0}/empty.txt", "it is empty"),
        ("{0}/long.txt", "max_seq_len"),
        ("{0}/short.txt@99", "@99"),
    ],
)
def test_a_scaffold_that_cannot_be_built_is_a_configuration_fault(
    place: str, named: str, model: Model, tmp_path: Path
) -> None:
    for name, text in (("empty", ""), ("long", "a word " * 200), ("short", "a")):
        (tmp_path / f"{name}.txt").write_text(text)
    flags = with_scaffolds(place.format(tmp_path))
    with pytest.raises(ConfigFault, match=named):
        scaffolds.register(
            flags, model, Vocabulary(model.metadata["tokenizer"]), HandleStore(model, max_handles=2)
        )


def test_more_scaffolds_than_handles_are_a_configuration_fault(model: Model) -> None:
    with pytest.raises(ConfigFault, match="9 scaffolds, but only 8 handles"):
        scaffolds.register(with_scaffolds(*"abcdefghi"), model, None, HandleStore(model, max_handles=8))
