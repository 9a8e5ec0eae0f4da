"""`tinyloop generate` and `tinyloop chat`: the client library at a terminal.

Text goes to standard output as it arrives, statistics to standard error. This file must not know messages
or sockets.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from tinyloop_serve.deploy.connect import connect
from tinyloop_serve.deploy.outcome import CommandFault
from tinyloop_serve.protocol.calls import Completion
from tinyloop_serve.protocol.client import Client

Messages = list[dict[str, str]]  # {"role": ..., "content": ...}


def conversation(system: str, question: str) -> Messages:
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": question}]


def generate(
    endpoint: str, text: str, messages: Messages | None, options: dict[str, Any], *, as_json: bool
) -> int:
    """Completes `text`, or with `messages` the conversation; returns the exit status."""
    with connect(endpoint) as client:
        prompt = text if messages is None else _rendered(client, messages)
        if as_json:
            print(json.dumps(msgspec.to_builtins(client.generate(prompt, **options)), ensure_ascii=False))
        else:
            print(_statistics(_show(client, prompt, options)), file=sys.stderr)
    return 0


def chat(endpoint: str, system: str, options: dict[str, Any]) -> int:
    """Answers line after line, with all that was said before as context, until the end of input."""
    messages = conversation(system, "")[:-1]
    with connect(endpoint) as client:
        while True:
            try:
                question = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return 0
            if question.strip():
                messages.append({"role": "user", "content": question})
                answer = _show(client, _rendered(client, messages), options)
                messages.append({"role": "assistant", "content": answer.text.strip()})


def _show(client: Client, prompt: str, options: dict[str, Any]) -> Completion:
    with client.stream(prompt, **options) as stream:
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        return stream.result()


def _statistics(answer: Completion) -> str:
    stats = answer.stats
    decoded = stats.generated_tokens - 1  # the first comes with the prefill
    rate = f", then {1000 * decoded / stats.decode_ms:.0f}/s" if decoded > 0 and stats.decode_ms > 0 else ""
    return (
        f"[{stats.prompt_tokens} + {stats.generated_tokens} tokens, {stats.loops} loops;"
        f" {answer.stop_reason}; first token {stats.first_token_ms:.0f} ms{rate};"
        f" waited {stats.queue_ms:.0f} ms, {stats.replica}, batch of {stats.batch_size}]"
    )


def _rendered(client: Client, messages: Messages) -> str:
    """The prompt that the model's own chat template makes of `messages`."""
    model = client.status().model
    if model is None:
        raise CommandFault("no replica has announced its model yet; try again in a moment")
    if not model.chat_template:
        raise CommandFault(f"the model {model.name} has no chat template; ask without --chat")
    from tinyloop_serve.deploy.chat_template import render

    return render(model.chat_template, messages)
