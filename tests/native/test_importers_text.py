"""The tokenizer, the chat template and the special tokens of a folder come along as its own code has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.vectors import looped_checkpoints
from tinyloop_serve.native.errors import ArtifactError
from tinyloop_serve.native.importers.convert import convert


def tokenizer(*, start: str = "", end: str = "") -> Tokenizer:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>", "<|im_end|>"])  # 3, 4, 5
    if start or end:
        dressed = f"{start} $A {end}".strip()
        special = [(token, made.token_to_id(token)) for token in (start, end) if token]
        made.post_processor = processors.TemplateProcessing(single=dressed, special_tokens=special)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config, _ = looped_checkpoints.MODELS["llama"]
    return looped_checkpoints.write_folder(tmp_path / "hf", config, looped_checkpoints.tensors("llama"))


def imported(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(config, metadata) of the artifact."""
    target = folder.parent / "t"
    config = convert(folder, target)
    with safe_open(target, "numpy") as file:
        return config, file.metadata()


def write(folder: Path, name: str, tree: Any) -> None:
    (folder / name).write_text(json.dumps(tree))


def test_a_folder_without_tokenizer_is_a_model_of_token_ids(folder: Path) -> None:
    config, metadata = imported(folder)
    assert "tokenizer" not in metadata and "chat_template" not in metadata
    assert (config["bos_id"], config["eos_ids"], config["add_bos"]) == (1, [2], False)


@pytest.mark.parametrize(
    ("start", "settings", "bos", "add_bos"),
    [
        ("", {}, 1, False),
        ("<s>", {}, 3, True),
        ("<s>", {"add_bos_token": False}, 1, False),
        ("", {"add_bos_token": True, "bos_token": "<s>"}, 3, True),
        ("", {"add_bos_token": True, "bos_token": {"content": "<s>"}}, 3, True),
        ("", {"add_bos_token": True}, 1, True),
        ("", {"add_bos_token": None, "add_eos_token": False}, 1, False),
    ],
)
def test_whether_a_text_starts_with_a_token(
    folder: Path, start: str, settings: dict[str, Any], bos: int, add_bos: bool
) -> None:
    tokenizer(start=start).save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", settings)
    config, _ = imported(folder)
    assert (config["bos_id"], config["add_bos"]) == (bos, add_bos)


def test_all_tokens_that_end_a_text_are_collected(folder: Path) -> None:
    tokenizer().save(str(folder / "tokenizer.json"))
    write(folder, "generation_config.json", {"eos_token_id": [4, 2], "bos_token_id": 3})
    config, _ = imported(folder)
    assert (config["bos_id"], config["eos_ids"]) == (3, [4, 2, 5])


def test_truncation_and_padding_of_the_training_run_are_dropped(folder: Path) -> None:
    made = tokenizer()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    made.save(str(folder / "tokenizer.json"))
    _, metadata = imported(folder)
    assert Tokenizer.from_str(metadata["tokenizer"]).encode("a b a b").ids == [0, 1, 0, 1]


def test_where_the_chat_template_may_be(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": "one"})
    assert imported(folder)[1]["chat_template"] == "one"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    write(folder, "tokenizer_config.json", {"chat_template": several})
    assert imported(folder)[1]["chat_template"] == "two"
    (folder / "chat_template.jinja").write_text("three é")
    assert imported(folder)[1]["chat_template"] == "three é"


def test_the_licence_comes_from_the_model_card(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\nlicense: no\n")
    assert json.loads(imported(folder)[1]["card"])["licence"] == "apache-2.0"


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ({"tokenizer.model": "x"}, "tokenizer.json"),
        ({"tokenizer.json": "{}"}, "tokenizer.json"),
        ({"tokenizer.json": "no"}, "tokenizer.json"),
        ({"tokenizer_config.json": '{"chat_template": 3}'}, "tokenizer_config.json chat_template"),
        ({"generation_config.json": '{"eos_token_id": "</s>"}'}, "eos_token_id"),
        ({"generation_config.json": '{"eos_token_id": 99}'}, "config.eos_ids"),
        ({"generation_config.json": "[]"}, "generation_config.json"),
        (
            {"tokenizer.json": tokenizer(end="</s>").to_str()},
            "tokenizer.json post_processor",
        ),
        (
            {"tokenizer.json": tokenizer().to_str(), "tokenizer_config.json": '{"add_eos_token": true}'},
            "tokenizer.json post_processor",
        ),
        (
            {
                "tokenizer.json": tokenizer().to_str(),
                "tokenizer_config.json": '{"add_bos_token": true, "bos_token": "<other>"}',
            },
            "tokenizer_config.json bos_token",
        ),
        (
            {"tokenizer.json": tokenizer().to_str().replace('"a":0', '"a":40').replace('"a": 0', '"a": 40')},
            "tokenizer",
        ),
    ],
)
def test_text_files_that_cannot_be_carried_over_are_refused(
    folder: Path, files: dict[str, str], field: str
) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ArtifactError) as caught:
        convert(folder, folder.parent / "t")
    assert caught.value.field == field
    assert not (folder.parent / "t").exists()
