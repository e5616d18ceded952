import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from leyden.config.folder import resolve
from leyden.errors import CheckpointError


def test_a_folder_is_taken_as_it_is(tmp_path) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path), revision="main") == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing-there", "nothing", "a/b/c"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(name)


def test_hub_gives_the_files_of_a_checkpoint(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (name, revision, allow_patterns) == ("owner/name", "v1", ["*.json", "*.jinja", "*.safetensors"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name", "v1") == tmp_path


def test_offline_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("Cannot find a cached snapshot.\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError) as error:
        resolve("owner/name", "v1")
    text = str(error.value)
    assert "'owner/name' (revision v1)" in text
    assert "Cannot find a cached snapshot." in text and "more lines" not in text
    assert "hf download owner/name" in text and "HF_HUB_OFFLINE" in text


def test_real_hub_client_offline(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="hf download leyden-test/absent"):
        resolve("leyden-test/absent")
