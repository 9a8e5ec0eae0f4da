"""Completion in the shells themselves: bash runs the script; zsh and fish where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tinyloop_serve.deploy import cli, completion


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "tinyloop.bash"
    path.write_text(completion.bash(cli.parser()))
    return path


def offered(script: Path, *lines: str, cwd: Path | None = None) -> list[set[str]]:
    """What bash offers at the end of each command line."""
    calls = "".join(
        f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _tinyloop;"
        ' printf "%s " "${COMPREPLY[@]}"; echo\n'
        for line in lines
    )
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", f"source {script}\n{calls}"],
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [set(line.split()) for line in done.stdout.split("\n")[:-1]]


def test_every_command_and_flag_is_offered(script: Path) -> None:
    everything = list(completion.commands(cli.parser()))
    assert {" ".join(each.path) for each in everything} >= {"", "up", "top", "keys new", "deploy systemd"}
    lines = [f"tinyloop {' '.join(each.path)} ''" for each in everything]
    for command, found in zip(everything, offered(script, *lines), strict=True):
        assert found >= {*command.subcommands, *(name for flag in command.flags for name in flag.names)}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tinyloop dr", {"drain"}),
        ("tinyloop drain replica-0 --wi", {"--within"}),
        ("tinyloop keys ''", {"new", "list", "-h", "--help"}),
        ("tinyloop keys new --d", {"--dir"}),
        ("tinyloop convert a b --layout ''", {"panels", "plain"}),
        ("tinyloop completion z", {"zsh"}),
        ("tinyloop up --replicas ''", set()),
        ("tinyloop generate up --mod", set()),
        ("tinyloop up --model mo", {"model.tinyloop"}),
        ("tinyloop inspect mo", {"model.tinyloop"}),
        ("tinyloop top mo", set()),
    ],
)
def test_what_is_offered_fits_its_place(script: Path, line: str, words: set[str], tmp_path: Path) -> None:
    (tmp_path / "model.tinyloop").touch()
    assert offered(script, line, cwd=tmp_path) == [words]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_shell_accepts_the_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr


def test_fish_offers_what_fits() -> None:
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    script = completion.fish(cli.parser())
    cases = {"tinyloop dr": "drain", "tinyloop convert --weights ": "bf16", "tinyloop keys n": "new"}
    for line, word in cases.items():
        ask = f"{script}\ncomplete -C '{line}'"
        done = subprocess.run(["fish", "--no-config", "-c", ask], capture_output=True, text=True)
        assert word in [each.split("\t")[0] for each in done.stdout.splitlines()], done.stderr


def test_zsh_runs_the_script_of_bash() -> None:
    """The function, called as bashcompinit does it: in the manner of sh, with bash's variables."""
    if not shutil.which("zsh"):
        pytest.skip("zsh is not installed")
    calls = """
        autoload -U compinit && compinit -u -D
        eval "$1"
        offer() {
            emulate -L sh; setopt kshglob noshglob braceexpand
            COMP_WORDS=(tinyloop "$@"); COMP_CWORD=$#
            _tinyloop; print -r -- "${COMPREPLY[@]}"
        }
        offer keys n
        offer convert --layout pa
        offer up --replicas ''
    """
    script = completion.zsh(cli.parser())
    done = subprocess.run(["zsh", "-f", "-c", calls, "zsh", script], capture_output=True, text=True)
    assert not done.stderr
    keys, layouts, none = (line.split() for line in done.stdout.splitlines())
    assert keys == ["new", "list", "-h", "--help"], "zsh itself takes those that match"
    assert layouts == ["panels", "plain"] and none == []
