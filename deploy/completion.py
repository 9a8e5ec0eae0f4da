"""`tinyloop completion`: what a shell needs to complete our commands, made from the command line's parser.

A script has one case per command: its words, and what follows those of its flags that take a value. zsh runs
the script of bash. This file must not know which commands there are.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

FILES = {"FILE", "DIR", "PATH", "SOURCE", "TARGET"}  # metavars of what is a path


@dataclass(frozen=True)
class Value:
    """What may follow a flag, or stand in a command's place."""

    choices: tuple[str, ...] = ()
    is_file: bool = False


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    help: str
    value: Value | None  # None: it takes none


@dataclass(frozen=True)
class Command:
    path: tuple[str, ...]  # () = `tinyloop` itself
    help: str
    flags: tuple[Flag, ...]
    subcommands: tuple[str, ...]
    argument: Value  # of all its positional arguments

    @property
    def words(self) -> list[str]:
        return [
            *self.subcommands,
            *self.argument.choices,
            *(name for flag in self.flags for name in flag.names),
        ]


def commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = (), help: str = ""
) -> Iterator[Command]:
    """All of them, each before its subcommands."""
    flags, choices, children = [], list[str](), list[Command]()
    is_file, names = False, tuple[str, ...]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            names = tuple(action.choices)
            for name, child in action.choices.items():
                children += commands(child, (*path, name), helps.get(name, ""))
        elif action.option_strings:
            text = (action.help or "") % {"default": action.default}
            value = None if action.nargs == 0 else _value(action)
            flags.append(Flag(tuple(action.option_strings), text, value))
        else:
            choices += _value(action).choices
            is_file = is_file or _value(action).is_file
    yield Command(path, help, tuple(flags), names, Value(tuple(choices), is_file))
    yield from children


def _value(action: argparse.Action) -> Value:
    return Value(tuple(map(str, action.choices or ())), action.metavar in FILES)


# ------------------------------------------------------------------ bash and zsh

# Not `path`: that is zsh's list of directories with commands.
BASH = """# bash completion of tinyloop
_tinyloop() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local at="" word words="" files=""
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
        case "$at $word" in
            {paths}) at="$at $word" ;;
        esac
    done
    case "$at $previous" in
{values}
        *)
            case "$at" in
{words}
            esac
            ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ -n $files ]]; then
        local IFS=$'\\n'
        COMPREPLY+=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _tinyloop tinyloop
"""
ZSH = "#compdef tinyloop\nautoload -U +X bashcompinit && bashcompinit\n"


def bash(parser: argparse.ArgumentParser) -> str:
    everything = list(commands(parser))
    values, words = [], []
    for command in everything:
        path = "".join(f" {name}" for name in command.path)
        files = " files=yes" if command.argument.is_file else ""
        words.append(f'                "{path}") words={shlex.quote(" ".join(command.words))}{files} ;;')
        for flag in command.flags:
            if flag.value is not None:
                cases = "|".join(f'"{path} {name}"' for name in flag.names)
                follows = f"words={shlex.quote(' '.join(flag.value.choices))}"
                values.append(f"        {cases}) {follows}{' files=yes' if flag.value.is_file else ''} ;;")
    paths = "|".join(f'" {" ".join(command.path)}"' for command in everything if command.path)
    return BASH.format(paths=paths, values="\n".join(values), words="\n".join(words))


def zsh(parser: argparse.ArgumentParser) -> str:
    return ZSH + bash(parser)


# ------------------------------------------------------------------ fish


def fish(parser: argparse.ArgumentParser) -> str:
    return (
        "\n".join(["# fish completion of tinyloop", "complete -c tinyloop -f", *_fish_lines(parser)]) + "\n"
    )


def _fish_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    everything = list(commands(parser))
    helps = {command.path: command.help for command in everything}
    for command in everything:
        seen = [f"__fish_seen_subcommand_from {name}" for name in command.path]
        if command.subcommands:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(command.subcommands)}")
        start = f"complete -c tinyloop -n {shlex.quote('; and '.join(seen))}"
        for name in command.subcommands:
            yield f"{start} -a {name} -d {shlex.quote(helps[(*command.path, name)])}"
        if command.argument.choices:
            yield f"{start} -a {shlex.quote(' '.join(command.argument.choices))}"
        if command.argument.is_file:
            yield f"{start} -F"
        for flag in command.flags:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names)
            yield f"{start} {names}{_fish_value(flag.value)} -d {shlex.quote(flag.help)}"


def _fish_value(value: Value | None) -> str:
    if value is None:
        return ""
    if value.is_file:
        return " -r -F"
    return f" -x -a {shlex.quote(' '.join(value.choices))}" if value.choices else " -x"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
