"""Artefacts as folders and repositories of the Hugging Face hub: one file and a card each.

As huggingface_hub's ``ModelHubMixin``, whose three methods these are. That mixin writes attributes into new objects,
which frozen dataclasses refuse, and its import takes longer than all of this pack's.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import printable, refuse
from .files import write_text
from .folders import has_ending

if TYPE_CHECKING:
    from typing_extensions import Self

CARD = "README.md"
ENDINGS = (".safetensors", ".json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TEXT = """---
library_name: vitrine
tags:
- vitrine
- {tag}
---

# {title}

`{shown}`

{about}

```python
from {module} import {name}

{name}.from_pretrained("{source}")
```

In ComfyUI: put `{file}` into `models/{folder}`.
"""


class Shared:
    """An artefact that travels.

    Attributes:
        FILE: name of its one file in a folder or repository.
        TITLE, ABOUT: first line and paragraph of its card.
        FOLDER: ComfyUI's folder for such files, below ``models``.
    """

    FILE: ClassVar[str]
    TITLE: ClassVar[str]
    ABOUT: ClassVar[str]
    FOLDER: ClassVar[str]

    def save(self, path: str | Path) -> Path:
        """Writes the file; each kind has its own."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what :meth:`save` wrote."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes a folder that :meth:`from_pretrained` reads: the file, and a card unless there is one."""
        return self._saved(Path(folder), Path(folder).name)  # a card names no folder of this machine

    def _saved(self, folder: Path, source: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder / self.FILE)
        if not (folder / CARD).exists():
            write_text(folder / CARD, self._card(source))
        return folder

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Reads a folder of :meth:`save_pretrained`, a file, or a repository of the hub.

        Args:
            source: folder, file, or hub id such as ``name/repository``.
            revision: branch, tag or commit of the repository.
        """
        options = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        return cls.load(local_file(source, cls.FILE, **options))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload with Vitrine",
    ) -> str:
        """Makes the repository if there is none, uploads the file and its card, and returns the commit's address."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self._saved(Path(folder), repo_id)  # an artefact that cannot be saved makes no repository
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if api.file_exists(repo_id, CARD, revision=revision):
                Path(folder, CARD).unlink()  # what its owner wrote stays
            return str(
                api.upload_folder(
                    repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
                ).commit_url
            )

    def _card(self, source: str) -> str:
        facts = {"title": self.TITLE, "about": self.ABOUT, "file": self.FILE, "folder": self.FOLDER, "source": source}
        facts |= {"tag": self.TITLE.lower().replace(" ", "-"), "shown": printable(repr(self))}
        package = ".".join(type(self).__module__.split(".")[:3])
        return TEXT.format(module=package, name=type(self).__name__, **facts)


def local_file(source: str | Path, name: str, **options: Any) -> Path:
    """The file ``name`` of a folder or hub repository, on this machine; any other path is taken as a file's.

    Args:
        options: ``revision``, ``token``, ``cache_dir`` and ``local_files_only`` of huggingface_hub.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / name).is_file():
            raise refuse("folder", path.name, f"one with {name}", "save_pretrained writes it")
        return path / name
    if path.exists() or not _HUB_ID.fullmatch(str(source)) or has_ending(path, ENDINGS):
        return path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    accepted = f"a file, a folder with {name}, or a hub id of a repository with it"
    try:
        return Path(hf_hub_download(str(source), name, **options))
    except LocalEntryNotFoundError as e:
        raise refuse("source", str(source), accepted, "it is not here and the hub cannot be reached") from e
    except (EntryNotFoundError, HfHubHTTPError) as e:
        raise refuse("source", str(source), accepted, "check the name; a private one needs `hf auth login`") from e
