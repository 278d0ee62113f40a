"""A chat template that whoever serves gives in place of the model's own."""

from __future__ import annotations

import os

import jinja2

from engine.errors import ConfigError, InvalidRequestError
from engine.frontend.chat_template import parsed
from engine.limits import Limits


def given_template(setting: str, limits: Limits) -> str:
    """Its text. `setting`: a file's name, or the template itself. Raises `ConfigError`."""
    text = _text_of(setting, limits.template_chars + 1)
    try:
        limits.check("template_chars", len(text), "chat_template")
        parsed(text)
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from None
    except (jinja2.TemplateError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(f"chat_template does not parse{line}: {error}") from None
    return text


def _text_of(setting: str, most: int) -> str:
    path = os.path.expanduser(setting)
    if any(mark in setting for mark in "{}\n") and not os.path.exists(path):
        return setting
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(most)
    except (OSError, ValueError) as error:
        what = f"cannot read {setting[:200]!r}, which is no template either: {error}"
        raise ConfigError(f"chat_template: {what}") from None
