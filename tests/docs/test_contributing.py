"""What contributors, citing authors and maintainers are told: files that exist, one version, a release by one tag."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
yaml = pytest.importorskip("yaml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_citation_has_the_version_and_the_five_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == PROJECT["project"]["version"] and cited["license"] == PROJECT["project"]["license"]
    papers = {i["value"] for paper in cited["references"] for i in paper["identifiers"]}
    assert len(papers) == 5 and all(paper["authors"] and paper["title"] for paper in cited["references"])
    assert all({"given-names", "family-names"} == set(a) for paper in cited["references"] for a in paper["authors"])


def test_the_changelog_begins_with_this_version():
    (first, *_) = re.findall(r"^## (\S+), (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first[0] == PROJECT["project"]["version"]
    assert first[1] == "not yet released" or re.fullmatch(r"\d{4}-\d\d-\d\d", first[1])


def test_a_release_names_the_repository_it_is_made_in(tmp_path):
    """What the registry asks for is complete once .ci/address has run, and it runs twice as once."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    where = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "some/where"}
    for _ in range(2):
        subprocess.run([str(ROOT / ".ci" / "address")], cwd=tmp_path, env=os.environ | where, check=True)
        written = tomllib.loads((tmp_path / "pyproject.toml").read_text())
        urls = written["project"].pop("urls")
        assert urls["Repository"] == "https://example.org/some/where" and len(urls) == 4
        assert all(url.startswith(urls["Repository"]) for url in urls.values())
        assert written == PROJECT
    comfy, project = PROJECT["tool"]["comfy"], PROJECT["project"]
    assert comfy["PublisherId"] and comfy["DisplayName"] and re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"]) and "comfyui" not in project["name"].lower()
    jobs = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())["jobs"]
    assert all(".ci/address" in [step.get("run") for step in jobs[job]["steps"]] for job in ("build", "registry"))
