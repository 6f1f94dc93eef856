"""What a release says of itself: one version, one date, and every file that it lists."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import yaml

import torchrl_llm

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


class TestCitation:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    def test_has_what_the_format_requires(self):
        assert {"cff-version", "message", "title", "authors"} <= self.citation.keys()
        assert self.citation["cff-version"] == "1.2.0"
        assert all(author.get("name") or author.get("family-names") for author in self.citation["authors"])

    def test_is_of_this_version(self):
        assert self.citation["version"] == torchrl_llm.__version__
        assert self.citation["license"] == PROJECT["project"]["license"]

    def test_has_the_date_of_the_changelog(self):
        dated = re.findall(r"^## (\d\S*) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
        released = {version: date.fromisoformat(day) for version, day in dated}
        # A version whose section is still called "Unreleased" has no date.
        assert released.get(torchrl_llm.__version__, self.citation["date-released"]) == self.citation["date-released"]


class TestPackages:
    def test_the_version_is_said_in_one_place(self):
        assert PROJECT["project"]["dynamic"] == ["version"]
        assert PROJECT["tool"]["hatch"]["version"]["path"] == "torchrl_llm/__init__.py"

    def test_the_source_distribution_has_the_files_of_a_release(self):
        included = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
        assert {"CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "CHANGELOG.md", "LICENSE"} <= included
        assert [name for name in included if not (ROOT / name).exists()] == []
