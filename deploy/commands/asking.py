"""`tinyloop generate`, `chat`: requests from the command line."""

from __future__ import annotations

import argparse
import sys

from tinyloop_serve.deploy.flags import Subcommands, add_connection, add_request, endpoint, request


def add(commands: Subcommands) -> None:
    generate = commands.add_parser("generate", help="complete a text; `-` reads it from standard input")
    generate.add_argument("text", metavar="TEXT")
    generate.add_argument(
        "--chat", action="store_true", help="TEXT is a question: use the model's chat template"
    )
    generate.add_argument("--system", default="", metavar="TEXT", help="system message, with --chat")
    generate.add_argument(
        "--json", action="store_true", help="one JSON object: text, tokens, stop_reason, stats"
    )
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="a conversation, line by line")
    chat.add_argument("--system", default="", metavar="TEXT", help="system message")
    chat.set_defaults(run=_chat)

    for command in (generate, chat):
        add_request(command)
        add_connection(command)


def _generate(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import ask
    from tinyloop_serve.deploy.outcome import CommandFault

    if flags.system and not flags.chat:
        raise CommandFault("--system: a message of a conversation; expected with --chat")
    text = sys.stdin.read() if flags.text == "-" else flags.text
    messages = ask.conversation(flags.system, text) if flags.chat else None
    return ask.generate(endpoint(flags), text, messages, request(flags), as_json=flags.json)


def _chat(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import ask

    return ask.chat(endpoint(flags), flags.system, request(flags))
