"""Tables in the documents that are copies of data say what the data says."""

from pathlib import Path

from tinyloop_serve.protocol import modes

ROOT = Path(__file__).resolve().parents[2]


def test_the_mode_matrix_in_the_documents_is_the_one_in_the_code() -> None:
    text = (ROOT / "docs" / "engine.md").read_text()
    shown = text.split("<!-- modes -->")[1].split("<!-- /modes -->")[0].strip()
    assert shown == modes.markdown()
