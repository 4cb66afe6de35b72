"""A file of the source without which an export reads or renders text otherwise is noticed."""

import shutil

import pytest

from rl.checks.exports import wrong_texts

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if tools %}{{ tools[0].function.name }}{% endif %}{% endfor %}"
)


@pytest.fixture
def both(toy, tmp_path):
    return tuple(shutil.copytree(toy / "model", tmp_path / name) for name in ("source", "export"))


def test_an_equal_export_is_refused(both):
    assert wrong_texts(*map(str, both)) == ""


def test_another_rendering_of_an_export_goes_unnoticed(both):
    source, export = both
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    assert "tools" in wrong_texts(str(source), str(export))
    shutil.copytree(source / "additional_chat_templates", export / "additional_chat_templates")
    assert wrong_texts(str(source), str(export)) == ""
    (export / "chat_template.jinja").unlink()
    assert "the rendering of a question" in wrong_texts(str(source), str(export))


def test_other_tokens_of_an_export_go_unnoticed(both):
    source, export = both
    file = export / "tokenizer.json"
    file.write_text(file.read_text().replace('"<user>"', '"<another>"'))
    assert "the vocabulary of AutoTokenizer differs" in wrong_texts(str(source), str(export))
