"""The pages of docs/: generated parts are up to date, commands have marks, keys exist, configs are valid."""

import re

import pytest
import yaml

from rl.config.checks import check
from rl.config.declarations import shipped
from rl.config.options import tree_keys
from rl.config.schema import Config, load_config
from rl.run_directory.named_metrics import alternatives, is_documented
from tests.doc_commands import MODES, PAGES, ROOT, blocks
from tools.docs.generate import files

ALL = [(block.place, block) for page in PAGES for block in blocks(page)]
KEY = re.compile(r"(?<!`)`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[:=` ])")
"""A key at the start of code in a text, also with its value."""
METRIC = re.compile(r"(?<!`)`([a-z_-]+/[a-zA-Z0-9_@/*-]+)`")


def test_generated_files_are_up_to_date():
    stale = [str(path.relative_to(ROOT)) for path, text in files().items() if path.read_text() != text]
    assert stale == [], "run python tools/docs/generate.py"


def test_each_block_of_commands_is_run_or_says_why_not():
    unmarked = [place for place, block in ALL if block.kind == ""]
    assert unmarked == [], "see tests/doc_commands.py for the marks"
    known = (*MODES, "not run", "file", "output", "config")
    assert [place for place, block in ALL if block.kind not in known] == []
    assert [place for place, block in ALL if block.kind == "not run" and len(block.argument) < 8] == []


def test_the_keys_that_pages_name_exist():
    keys = tree_keys(Config)
    sections = {key.split(".")[0] for key in keys if "." in key}
    unknown = [
        f"{page.name}: {key}"
        for page in PAGES
        for key in KEY.findall(page.read_text())
        if key.split(".")[0] in sections and key not in keys and not key.startswith("reward.kwargs.")
    ]
    assert unknown == []


def test_the_metrics_that_pages_name_exist():
    known = alternatives()
    groups = {name.split("/")[0] for name in known}

    def exists(name: str) -> bool:
        start = name.partition("*")[0]
        return any(each.startswith(start) for each in known) if "*" in name else is_documented(name)

    unknown = [
        f"{page.name}: {name}"
        for page in PAGES
        if page.name not in ("verl.md", "metrics.md")  # verl.md names verl's keys
        for name in METRIC.findall(page.read_text())
        if name.split("/")[0] in groups and not exists(name)
    ]
    assert unknown == []


@pytest.mark.parametrize("place", [place for place, block in ALL if block.kind == "config"])
def test_a_configuration_of_a_page_passes_the_checks(place, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dict(ALL)[place].text)
    check(load_config(str(path)))


def test_each_algorithm_has_a_page_with_its_details():
    for name in shipped():
        text = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
        assert "## When to use it" in text and "## Implementation details" in text, name


def test_the_files_that_pages_name_exist():
    path = re.compile(
        r"(?<![\w/.-])((?:rl|tests|tools|slurm|launch|configs)/[\w./-]+\.(?:py|sh|yaml|sbatch|txt))"
    )
    made = ("configs/my.yaml", "slurm/site.sh")  # by the reader
    named = {
        (page.name, name)
        for page in PAGES
        if page.name != "extending.md"  # its examples add files
        for name in path.findall(page.read_text())
        if "NAME" not in name and name not in made
    }
    assert len(named) > 100
    assert {(page, name) for page, name in named if not (ROOT / name).exists()} == set()


def test_lines_are_below_150_columns():
    """Except for output of programs in blocks of text."""
    wide = [
        f"{page.name}: {line[:40]}"
        for page in PAGES
        for line in re.sub(r"```text\n.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
        if len(line) >= 150
    ]
    assert wide == []


def test_the_pages_together_stay_below_66_200_words():
    """A page says its rule and links its evidence; CONTRIBUTING.md is not counted."""
    counts = sorted((len(page.read_text().split()), str(page.relative_to(ROOT))) for page in PAGES)
    assert sum(words for words, name in counts if name != "CONTRIBUTING.md") < 66_200, counts


def test_links_between_pages_lead_to_files():
    """mkdocs checks the links within docs/ and their anchors (tests/runs/test_doc_site.py)."""
    outside = [page for page in PAGES if page.parent == ROOT]
    targets = [
        (page.name, target) for page in outside for target in re.findall(r"\]\(([^):#]+)", page.read_text())
    ]
    assert len(targets) > 20
    assert [each for each in targets if not (ROOT / each[1]).exists()] == []


def test_the_readme_has_two_commands_the_job_and_the_tests():
    section = (ROOT / "README.md").read_text().partition("## Two commands")[2].partition("\n## ")[0]
    commands = re.findall(r"```bash\n(.*?)\n```", section, re.DOTALL)
    assert commands == ["bash tools/quickstart.sh", "bash tools/test.sh"]
    ci = ROOT / ".ci" / "run"  # the tests of each change; a release may lack it
    if ci.is_file():
        assert ci.read_text().splitlines()[-1] == f"exec {commands[1]}"


def test_pre_commit_runs_what_the_test_command_lints():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    script = (ROOT / "tools" / "test.sh").read_text()
    lints = re.search(r"if \[ \$# = 0 \]; then\n(.*?)fi\n", script, re.DOTALL)[1].splitlines()
    assert [line.split(" #")[0].strip() for line in lints] == [hook["entry"] for hook in hooks]
