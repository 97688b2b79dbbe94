"""Dialogue to text: templates in a sandbox, what they may use, and what happens when they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from compressor.calibration.chat import Renderer, plain, render, renderer_of
from compressor.checkpoint.base import Checkpoint

HELLO = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
SIMPLE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"


def model(files: dict[str, Any]) -> Checkpoint:
    return cast(Checkpoint, SimpleNamespace(label="m", side_files=lambda: files))


def test_plain_names_the_roles() -> None:
    assert plain(HELLO) == "User: Hi?\nAssistant: Yes."
    assert Renderer()(HELLO) == plain(HELLO)


def test_template_gets_messages_and_special_tokens() -> None:
    assert Renderer(SIMPLE, {"eos_token": "</s>"})(HELLO) == "<user>Hi?</s>\n<assistant>Yes.</s>\n"


def test_template_agrees_with_transformers() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    template = (
        "{{ bos_token }}{%- for message in messages %}\n    {%- if loop.first and message.role == 'user' %}\n"
        "        {{- '[INST] ' + message.content | trim + ' [/INST]' }}\n    {%- else %}\n"
        "{{ message | tojson }}{% continue %}\n    {%- endif %}\n{%- endfor %}\n"
    )
    judge = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    messages = [{"role": "user", "content": " Grüße <b>? "}, {"role": "assistant", "content": "A & B 'c'"}]
    expected = judge.apply_chat_template(messages, tokenize=False)
    assert render(template, messages, {"bos_token": "<s>", "eos_token": "</s>"}) == expected
    assert "\"A & B 'c'\"" in expected


def test_template_that_prints_the_date_prints_the_same_every_day() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}", HELLO, {}) == "01 Jan 2026"


def test_template_may_refuse_and_the_dialogue_is_rendered_plainly() -> None:
    renderer = Renderer("{{ raise_exception('no system role here') }}")
    assert renderer(HELLO) == plain(HELLO)
    assert renderer.refused == ["no system role here"]
    with pytest.raises(TemplateError, match="no system role here"):
        render(renderer.template or "", HELLO, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
    ],
)
def test_template_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises(SecurityError):
        render(template, HELLO, {})
    renderer = Renderer(template)
    assert renderer(HELLO) == plain(HELLO)
    assert len(renderer.refused) == 1


def test_broken_template_is_told() -> None:
    renderer = Renderer("{% for %}")
    assert renderer(HELLO) == plain(HELLO)
    assert len(renderer.refused) == 1


def test_renderer_comes_from_file_or_settings(tmp_path: Path) -> None:
    jinja = tmp_path / "chat_template.jinja"
    jinja.write_text("from file")
    settings = {"chat_template": "from settings", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    stored = json.dumps(settings).encode()
    assert (
        renderer_of(model({"chat_template.jinja": jinja, "tokenizer_config.json": stored})).template == "from file"
    )
    found = renderer_of(model({"tokenizer_config.json": stored}))
    assert found.template == "from settings"
    assert (found.specials["bos_token"], found.specials["eos_token"]) == ("<s>", "</s>")
    named = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    assert renderer_of(model({"tokenizer_config.json": json.dumps(named).encode()})).template == "d"


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": b"{"}, {"tokenizer_config.json": b"[]"}])
def test_model_without_template_renders_plainly(files: dict[str, bytes]) -> None:
    assert renderer_of(model(files)).template is None
    assert renderer_of(None).template is None
