"""Dialogues to text: the model's own chat template, or a plain rendering where it has none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.checkpoint.base import Checkpoint

Message = dict[str, str]
"""One turn: ``role`` (system, user, assistant) and ``content``."""

TODAY = "01 Jan 2026"
"""What templates that print a date are given: the same tokens on every day."""


@dataclass
class Renderer:
    """Turns dialogues into text.

    Attributes:
        template: Jinja source, or None for the plain rendering (``User: ...`` lines).
        specials: ``bos_token``, ``eos_token`` as text, for the template.
        refused: Why the template refused a dialogue, one entry each; those are rendered plainly.
    """

    template: str | None = None
    specials: Mapping[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def __call__(self, messages: list[Message]) -> str:
        """The dialogue as the model sees it in a conversation."""
        if self.template is None:
            return plain(messages)
        import jinja2

        try:
            return render(self.template, messages, self.specials)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            self.refused.append(" ".join(str(error).split())[:120])
            return plain(messages)


def plain(messages: list[Message]) -> str:
    """``User: ...`` and ``Assistant: ...``, one turn after the other."""
    return "\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages)


def render(template: str, messages: list[Message], specials: Mapping[str, str]) -> str:
    """A template applied in a sandbox: it comes with the model and is not trusted.

    Raises:
        jinja2.TemplateError: the template is wrong, or refuses these messages.
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    room.globals["raise_exception"] = refuse
    room.globals["strftime_now"] = lambda shape: TODAY
    room.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    text = room.from_string(template).render(messages=messages, add_generation_prompt=False, **specials)
    return str(text)


def renderer_of(checkpoint: Checkpoint | None) -> Renderer:
    """The renderer of a model: chat_template.jinja, or the template in tokenizer_config.json."""
    if checkpoint is None:
        return Renderer()
    files, settings = checkpoint.side_files(), tokenizer_settings(checkpoint)
    found: Any = None
    if "chat_template.jinja" in files:
        source = files["chat_template.jinja"]
        found = (source if isinstance(source, bytes) else source.read_bytes()).decode("utf-8", "replace")
    found = found or settings.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found if isinstance(entry, dict) and "name" in entry}
        found = named.get("default")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return Renderer(found if isinstance(found, str) else None, {n: special_token(settings, n) or "" for n in names})


def tokenizer_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where it is missing or unreadable."""
    source = checkpoint.side_files().get("tokenizer_config.json", b"{}")
    try:
        settings = json.loads(source if isinstance(source, bytes) else source.read_bytes())
    except (ValueError, OSError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def special_token(settings: Mapping[str, Any], name: str) -> str | None:
    """A special token's text as tokenizer_config.json gives it (a string, or an object with ``content``)."""
    value = settings.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
