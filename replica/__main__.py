"""`python -m tinyloop_serve.replica`: load the model, bind, say READY, serve until SIGTERM.

    exit status 0    stopped by SIGTERM or SIGINT, or the parent process is gone
                1    failed
                70   the engine kept failing: start a fresh one
                78   a flag, the artifact or the memory budget is wrong: restarting does not help

READY is one line on standard output: `READY name=r0 endpoint=ipc:///... startup_ms=200 rss_mb=40.1`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback

import zmq
from msgspec.structs import replace

from tinyloop_serve import native
from tinyloop_serve.native import errors
from tinyloop_serve.protocol import keys
from tinyloop_serve.protocol.errors import InvalidRequest
from tinyloop_serve.protocol.host import EndpointTaken, Supervisor, allow_many_files, die_with_parent
from tinyloop_serve.protocol.lines import Lines, to_stderr
from tinyloop_serve.protocol.messages import Budget, ModelInfo, Ready
from tinyloop_serve.replica import budget, process, prompts, scaffolds
from tinyloop_serve.replica.config import EXIT_CONFIG, Config, ConfigFault, parse
from tinyloop_serve.replica.executor import Executor
from tinyloop_serve.replica.handles import HandleStore
from tinyloop_serve.replica.health import EXIT_ILL, Health
from tinyloop_serve.replica.server import Mailbox, Server
from tinyloop_serve.replica.session import LifeSigns, Session
from tinyloop_serve.replica.speculation import Speculation
from tinyloop_serve.replica.text import Vocabulary

LAST_STEP_S = 3.0  # for the engine to end a step after it was told to stop
REQUEST_DEFAULTS = ("TINYLOOP_CACHE_MODE", "TINYLOOP_EARLY_EXIT", "TINYLOOP_SPECULATIVE")


def main(arguments: list[str]) -> int:
    with contextlib.closing(to_stderr()) as said:
        try:
            return _serve(arguments, said)
        except Exception as error:  # whatever it is, our supervisor shall know
            said.write(traceback.format_exc().rstrip())
            return _give_up(said, f"{type(error).__name__}: {error}", 1)


def _serve(arguments: list[str], said: Lines) -> int:
    for name in REQUEST_DEFAULTS:  # requests and handles are what the dispatcher says, wherever they run
        os.environ.pop(name, None)
    try:
        config = parse(arguments)
        if config.parent:
            die_with_parent(config.parent)
        mailbox = Mailbox()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, mailbox.request_stop)
        budget.check_file(config)
        model = native.Model(
            config.model,
            max_seq_len=config.max_seq_len,
            threads=config.threads,
            device=config.device,
            weights=config.weights,
            affinity=config.affinity,
        )
        if model.cpus:  # the message loop too keeps off other replicas' processors
            os.sched_setaffinity(0, model.cpus)
        shape = model.config
        allowed = budget.of(model, config, shape.get("max_loops", shape["loops"]))
        vocabulary = _vocabulary(config, model)
        measured_on = prompts.read(config, model, vocabulary)
        speculation = Speculation(measured_on, loops=shape["loops"], threshold=config.speculation_threshold)
        handles = HandleStore(model, config.max_handles)
        scaffolds.register(config, model, vocabulary, handles)
    except ConfigFault as error:
        return _give_up(said, str(error), EXIT_CONFIG)
    except errors.TinyLoopError as error:
        temporary = isinstance(error, errors.OutOfMemoryError | errors.BackendFailed)
        return _give_up(said, f"cannot load {config.model}: {error}", 1 if temporary else EXIT_CONFIG)
    allow_many_files()
    os.umask(0o007)  # the socket is for our group, at most
    try:
        pair, dispatchers = _keys(config)
        server = Server(config.endpoint, mailbox, said.write, pair, dispatchers)
    except ConfigFault as error:
        return _give_up(said, str(error), EXIT_CONFIG)
    except (EndpointTaken, OSError, zmq.ZMQError) as error:
        return _give_up(said, f"cannot bind {config.endpoint}: {error}", 1)

    health = Health()
    ready = _announcement(config, model, vocabulary is not None, allowed)
    executor = Executor(
        model,
        vocabulary,
        config.name,
        mailbox.post,
        identity=ready.model.identity,
        handles=handles,
        speculation=speculation,
        health=health,
        give_up=mailbox.give_up,
        say=said.write,
    )
    session = Session(
        executor,
        announce=lambda: replace(
            ready,
            memory_bytes=process.resident_bytes(),
            calibration=speculation.calibration,
            handles=handles.held,
        ),
        life_signs=lambda: LifeSigns(
            model.step_counter, process.resident_bytes(), health.text, executor.working
        ),
    )
    _say_ready(config)
    server.run(session, config.drain_s, config.stall_s)
    if mailbox.given_up:
        _give_up(said, mailbox.given_up, EXIT_ILL)
    server.close()
    if mailbox.given_up:
        said.close()
        os._exit(EXIT_ILL)  # whatever is wrong with the engine must not keep us from ending
    if not executor.stop(LAST_STEP_S):
        said.close()
        os._exit(0)  # the thread is inside the engine: the interpreter must not be torn down under it
    model.close()
    return 0


def _keys(config: Config) -> tuple[keys.KeyPair | None, list[str]]:
    """Ours, and the public ones of the dispatchers. Raises `ConfigFault`."""
    try:
        pair = keys.read_pair(config.key) if config.key else None
        return pair, [keys.public_key(key, "dispatcher-key") for key in config.dispatcher_keys]
    except InvalidRequest as error:
        raise ConfigFault(f"--{error.message}") from error


def _vocabulary(config: Config, model: native.Model) -> Vocabulary | None:
    tokenizer = model.metadata.get("tokenizer", "")
    if not tokenizer:
        return None
    try:
        return Vocabulary(tokenizer, hidden=model.config["eos_ids"])
    except ValueError as error:
        raise ConfigFault(f"{config.model}: metadata.tokenizer: {error}") from error


def _announcement(config: Config, model: native.Model, has_tokenizer: bool, allowed: Budget) -> Ready:
    shape = model.config
    info = ModelInfo(
        name=os.path.basename(config.model).removesuffix(".tinyloop"),
        fingerprint=model.fingerprint,
        vocab_size=shape["vocab_size"],
        loops=shape["loops"],
        max_loops=shape.get("max_loops", shape["loops"]),
        max_seq_len=model.max_seq_len,
        parameters=model.parameters,
        has_tokenizer=has_tokenizer,
        chat_template=model.metadata.get("chat_template", ""),
        weights=model.weights,
        backend=model.device.partition("/")[0].partition(":")[0],
    )
    return Ready(
        name=config.name,
        pid=os.getpid(),
        device=model.device,
        model=info,
        tokenizer=model.metadata.get("tokenizer", ""),
        add_bos=shape["bos_id"] if shape.get("add_bos") else -1,
        budget=allowed,
    )


def _say_ready(config: Config) -> None:
    numbers = f"startup_ms={process.age_ms():.0f} rss_mb={process.resident_bytes() / 1e6:.1f}"
    Supervisor().ready(f"serving {config.model}")
    print(f"READY name={config.name} endpoint={config.endpoint} {numbers}", flush=True)


def _give_up(said: Lines, reason: str, status: int) -> int:
    Supervisor().status(reason)
    said.write(f"tinyloop-replica: {reason}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
