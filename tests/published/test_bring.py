"""Files of others are brought whole, with their digest checked, and never into the repository."""

import hashlib
import re
import subprocess

import pytest
from vitrine_tests.published import bring
from vitrine_tests.published.bring import NotBroughtError


@pytest.fixture
def public(tmp_path):
    """(folder of repositories, entry of a file of an earlier commit of one of them)."""
    repository = tmp_path / "hosts" / "somebody" / "weights"
    repository.mkdir(parents=True)

    def git(*words):
        identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
        ended = subprocess.run(["git", "-C", repository, *identity, *words], capture_output=True, check=True)
        return ended.stdout.decode().strip()

    git("init", "-q")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    (repository / "folder").mkdir()
    (repository / "folder" / "lora.safetensors").write_bytes(b"weights")
    git("add", ".")
    git("commit", "-q", "-m", "the file")
    commit = git("rev-parse", "HEAD")
    git("rm", "-q", "folder/lora.safetensors")
    git("commit", "-q", "-m", "and gone")
    entry = {
        "repository": "somebody/weights",
        "commit": commit,
        "path": "folder/lora.safetensors",
        "bytes": 7,
        "sha256": hashlib.sha256(b"weights").hexdigest(),
    }
    return tmp_path / "hosts", entry


def test_a_file_of_a_commit_is_fetched_once(public, tmp_path):
    hosts, entry = public
    into = tmp_path / "cache"
    assert bring.bring(entry, into, hosts=str(hosts)) == "fetched"
    path = bring.place(entry, into)
    assert path.read_bytes() == b"weights" and path.relative_to(into).parts[0] == "somebody+weights"
    assert bring.bring(entry, into, hosts="nowhere") == "there"
    assert [p.name for p in path.parent.iterdir()] == ["lora.safetensors"]


@pytest.mark.parametrize("where", ["folder/lora.safetensors", "lora.safetensors"])
def test_a_copy_in_a_folder_spares_the_network(public, tmp_path, where):
    _, entry = public
    copy = tmp_path / "copies" / "somebody+weights" / where
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"weights")
    assert bring.bring(entry, tmp_path / "cache", tmp_path / "copies", "nowhere") == "copied"


def test_a_copy_of_another_digest_is_not_taken(public, tmp_path):
    hosts, entry = public
    copy = tmp_path / "copies" / "somebody+weights" / "lora.safetensors"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"Weights")
    assert bring.bring(entry, tmp_path / "cache", tmp_path / "copies", str(hosts)) == "fetched"


@pytest.mark.parametrize("changed", [{"sha256": "0" * 64}, {"bytes": 8}, {"path": "other"}, {"commit": "0" * 40}])
def test_what_is_not_the_published_file_is_not_kept(public, tmp_path, changed):
    hosts, entry = public
    with pytest.raises(NotBroughtError):
        bring.bring(entry | changed, tmp_path / "cache", hosts=str(hosts))
    assert not list((tmp_path / "cache").rglob("*"))


def test_nothing_is_brought_into_the_repository(public):
    hosts, entry = public
    for into in (bring.ROOT, bring.HERE / "cache"):
        with pytest.raises(NotBroughtError, match="in the repository"):
            bring.bring(entry, into, hosts=str(hosts))


def test_the_table_names_licensed_files_by_commit_and_digest():
    entries = bring.table()
    assert len(entries) == len({(e["repository"], e["path"]) for e in entries})
    for entry in entries:
        assert entry["licence"] in ("MIT", "Apache-2.0") and entry["author"] and entry["what"]
        assert re.fullmatch("[0-9a-f]{40}", entry["commit"]) and re.fullmatch("[0-9a-f]{64}", entry["sha256"])
        assert entry["bytes"] < 2**22 and not entry["path"].startswith("/") and ".." not in entry["path"]
