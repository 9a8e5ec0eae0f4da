"""A model's chat template, rendered as its authors meant: Jinja with the names that Hugging Face
templates use.

A template comes with an artifact, so it is not trusted: it runs in jinja2's sandbox. jinja2 is optional.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from tinyloop_serve.deploy.outcome import CommandFault


def render(template: str, messages: list[dict[str, str]]) -> str:
    """The prompt for the next assistant message. Raises `CommandFault` when it cannot be made."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise CommandFault("chat templates need jinja2: pip install jinja2") from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    names: dict[str, Any] = {
        "messages": messages,
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
    }
    try:
        return environment.from_string(template).render(names)
    except (TemplateError, TypeError, ValueError) as error:
        raise CommandFault(f"the model's chat template failed: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
