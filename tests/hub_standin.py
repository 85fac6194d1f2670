"""A stand-in for the Hub: what the package asks of `huggingface_hub`, answered from memory."""

from types import SimpleNamespace

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from optimum_neuronal.checkpoint import hub
from optimum_neuronal.model import origin


def refusal(kind, status):
    return kind("refused", response=SimpleNamespace(headers={}, request=None, status_code=status))


class Hub:
    """Repositories of the user `me`, whose token may also write to `lab`. The token hf_read may only read."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.token = folder, "hf_test"
        self.repositories = {}  # id -> branch -> name of a file -> content
        self.private, self.commits = {}, []  # id -> bool; messages
        asked = ("whoami", "auth_check", "create_repo", "create_branch", "list_repo_files", "update_repo_settings")
        for name in (*asked, "create_commit", "model_info"):

            def answer(api, *arguments, name=name, **options):
                return getattr(self, name)(api.token or self.token, *arguments, **options)

            monkeypatch.setattr(HfApi, name, answer)
        monkeypatch.setattr(hub, "is_connected", lambda: True)
        for module in (hub, origin):
            monkeypatch.setattr(module, "snapshot_download", self.snapshot_download)

    def files(self, repo_id, revision=None):
        """The files of a branch, by name."""
        if repo_id not in self.repositories:
            raise refusal(RepositoryNotFoundError, 404)
        if (revision or "main") not in self.repositories[repo_id]:
            raise refusal(RevisionNotFoundError, 404)
        return self.repositories[repo_id][revision or "main"]

    def whoami(self, token):
        if token is None:
            raise LocalTokenNotFoundError
        orgs = [{"name": "lab", "roleInOrg": "write"}, {"name": "library", "roleInOrg": "read"}]
        role = "read" if token == "hf_read" else "write"
        return {"name": "me", "orgs": orgs, "auth": {"accessToken": {"role": role}}}

    def auth_check(self, token, repo_id, write):
        self.files(repo_id)
        if not repo_id.startswith(("me/", "lab/")):
            raise refusal(HfHubHTTPError, 403)

    def create_repo(self, token, repo_id, private, exist_ok):
        self.whoami(token)
        repo_id = repo_id if "/" in repo_id else f"me/{repo_id}"
        self.repositories.setdefault(repo_id, {"main": {".gitattributes": b""}})
        self.private.setdefault(repo_id, private)
        return SimpleNamespace(repo_id=repo_id)

    def update_repo_settings(self, token, repo_id, private):
        self.private[repo_id] = private

    def create_branch(self, token, repo_id, branch, exist_ok):
        self.repositories[repo_id].setdefault(branch, dict(self.files(repo_id)))

    def list_repo_files(self, token, repo_id, revision):
        return list(self.files(repo_id, revision))

    def create_commit(self, token, repo_id, operations, commit_message, revision):
        """All operations, which name each file once, or none."""
        files = self.files(repo_id, revision)
        assert len({change.path_in_repo for change in operations}) == len(operations)
        for change in operations:
            if isinstance(change, CommitOperationAdd):
                with change.as_file() as file:
                    files[change.path_in_repo] = file.read()
            else:
                del files[change.path_in_repo]
        self.commits.append(commit_message)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/{len(self.commits)}")

    def model_info(self, token, repo_id, timeout):
        return SimpleNamespace(card_data=ModelCard(self.files(repo_id)["README.md"].decode()).data)

    def snapshot_download(
        self, repo_id, revision=None, token=None, cache_dir=None, local_files_only=False, **patterns
    ):
        validate_repo_id(repo_id)
        files, folder = (
            self.files(repo_id, revision),
            self.folder / repo_id / (revision or "main") / str(len(self.commits)),
        )
        for name in filter_repo_objects(files, **patterns):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(files[name])
        return folder
