"""Tables in the documents that are copies of data say what the data says."""

import re
from pathlib import Path

from tinyloop_serve.dispatcher import catalogue
from tinyloop_serve.protocol import modes

ROOT = Path(__file__).resolve().parents[2]


def shown(document: str, mark: str) -> str:
    text = (ROOT / "docs" / document).read_text()
    return text.split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0].strip()


def test_the_mode_matrix_in_the_documents_is_the_one_in_the_code() -> None:
    assert shown("engine.md", "modes") == modes.markdown()


def test_the_metrics_in_the_documents_are_those_in_the_code() -> None:
    assert shown("operations.md", "metrics") == catalogue.markdown()


def test_every_event_of_the_log_is_in_the_documents() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "dispatcher").glob("*.py"))
    events = set(re.findall(r'\.event\(\s*"(\w+)"', sources))
    text = (ROOT / "docs" / "operations.md").read_text()
    assert len(events) >= 10 and {event for event in events if f"| `{event}` |" not in text} == set()


def test_every_alert_has_its_first_step_in_the_documents() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy" / "dashboards" / "alerts.yaml").read_text())
    text = (ROOT / "docs" / "operations.md").read_text()
    assert alerts and not [alert for alert in alerts if f"`{alert}`" not in text]
