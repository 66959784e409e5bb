"""The network behind ``kvbench.tasks.fetch``: the Hugging Face hub, and plain addresses."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.base.errors import KvbenchError

TIMEOUT_S = 60
"""Seconds to wait for an address that does not answer."""
# the files of a model that are downloaded; weights in other formats often lie beside these in a repository
MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]


class HuggingFace:
    """Downloads through huggingface_hub, with the user's login if there is one."""

    def find_commit(self, repo: str, kind: str, revision: str) -> str:
        """Return the commit that a revision of a repo means now.

        kind: ``dataset``, ``model`` or ``space``.
        """
        from huggingface_hub import HfApi

        with _explain_failure(f"{repo} at {revision}"):
            info = HfApi().repo_info(repo, revision=revision, repo_type=kind)
        if not info.sha:
            raise KvbenchError(f"the hub names no commit for {repo} at {revision}")
        return str(info.sha)

    def download_file(self, repo: str, kind: str, name: str, commit: str, folder: Path) -> Path:
        """Download one file of a repo at a commit into ``folder`` and return its path.

        kind: ``dataset``, ``model`` or ``space``.
        """
        from huggingface_hub import hf_hub_download

        with _explain_failure(f"{name} of {repo} at {commit}"):
            return Path(hf_hub_download(repo, name, repo_type=kind, revision=commit, local_dir=folder))

    def download_url(self, url: str, folder: Path) -> Path:
        """Download the content of an address into ``folder`` and return its path."""
        path = folder / "download"
        with _explain_failure(url), urllib.request.urlopen(url, timeout=TIMEOUT_S) as content, path.open("wb") as out:
            shutil.copyfileobj(content, out)
        return path

    def download_model(self, repo: str, revision: str) -> str:
        """Download a model's safetensors and tokenizer into the hub's cache and return the folder there.

        Files in folders of the repository are left out.
        """
        from huggingface_hub import snapshot_download

        with _explain_failure(f"{repo} at {revision}"):
            return str(snapshot_download(repo, revision=revision, allow_patterns=MODEL_FILES, ignore_patterns=["*/*"]))


def find_cache_state(repo: str, revision: str) -> str:
    """Return how much of a model is in the hub's cache: ``here``, ``partly`` or ``missing``. No network is used."""
    from huggingface_hub import try_to_load_from_cache

    def find(name: str) -> str | None:
        location = try_to_load_from_cache(repo, name, revision=revision)
        # besides a path or None, the function may return an object: the hub is known not to have the file
        if not isinstance(location, str):
            return None
        return location

    if find("config.json") is None:
        return "missing"
    # a small model is one file, a large one has an index of its shards
    shards = {"model.safetensors"}
    index = find("model.safetensors.index.json")
    if index:
        try:
            shards = set(json.loads(Path(index).read_bytes())["weight_map"].values())
        # the errors of a file that is not there, of text that is not JSON, and of JSON of another form
        except (OSError, ValueError, KeyError, AttributeError):
            return "partly"
    if all(find(shard) for shard in shards):
        return "here"
    return "partly"


@contextmanager
def _explain_failure(wanted: str) -> Iterator[None]:
    """While the context is open, turn any error into a KvbenchError: ``wanted`` could not be fetched, and a remedy.

    wanted: the file, address or revision that is downloaded, in words.
    """
    try:
        yield
    except Exception as error:
        # downloads fail in too many ways to name them, so every error becomes one line with a remedy. This error is
        # recognised by its name, since huggingface_hub is imported only for downloads
        if type(error).__name__ == "GatedRepoError":
            remedy = "accept its terms on its page on huggingface.co and log in with: hf auth login"
        else:
            remedy = "check the network, or put the file there yourself"
        # the hub's errors have several lines, and may quote a whole page
        reason = " ".join(str(error).split()) or "no reason given"
        kind = type(error).__name__
        raise KvbenchError(f"{wanted} could not be fetched ({kind}: {reason[:300]}): {remedy}") from None
