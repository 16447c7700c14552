"""A pytest plugin, `-p docs.examples`: runs the `python` blocks of README.md and docs/, one namespace a page.

A block that starts with `>>>` is a doctest: what it prints is compared, `...` standing for anything.
"""

from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from pathlib import Path

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE), SkipParser()],
    path=str(Path(__file__).resolve().parents[1]),
    patterns=["README.md", "docs/*.md"],
).pytest()
