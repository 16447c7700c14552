"""Sphinx configuration: Markdown by MyST, theme furo."""

import tomllib
from pathlib import Path

release = tomllib.loads((Path(__file__).parents[1] / "packages/core/pyproject.toml").read_text())["project"]["version"]
project = "megalith"
author = "the megalith authors"
copyright = "the megalith authors, Apache-2.0"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"megalith {release}"
exclude_patterns = ["_build"]
nitpicky = True
