"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "warning", "fault"]  # a fleet works; works, but not as it could; does not work
    subject: str
    text: str
    remedy: str = ""  # what to do


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def warning(subject: str, text: str, remedy: str = "") -> Finding:
    return Finding("warning", subject, text, remedy)


def fault(subject: str, text: str, remedy: str = "") -> Finding:
    return Finding("fault", subject, text, remedy)
