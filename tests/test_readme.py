"""The README's examples run as they stand, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.mark.parametrize("index", range(len(BLOCKS)), ids=["ops", "drafter"])
def test_example_runs(index):
    done = subprocess.run([sys.executable, "-c", BLOCKS[index]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "generate" in BLOCKS[index]:
        lengths = [float(x) for x in re.findall(r"([\d.]+) tokens a target pass", done.stdout)]
        assert len(lengths) == 2 and min(lengths) >= 1


def test_examples_are_as_short_as_they_say():
    assert len(BLOCKS) == 2
    for block in BLOCKS:
        code = [line for line in block.splitlines() if line.strip()]
        assert len(code) <= 24


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
