"""``--push`` against a fake of the hub client's API: what is uploaded, how a refusal reads, and that no token shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.convert.output import check_push, push
from tests.support import Capt
from tests.unit.convert.models import config, model, tokenizer

TOKEN = "hf_CANARYCANARYCANARY"


class FakeApi:
    """Stand-in for ``HfApi``; ``calls`` are what it was asked for."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    status: int | None = None

    def create_repo(self, repository: str, **options: Any) -> str:
        self.calls.append((repository, options))
        if self.status is not None:
            text = f"{self.status} for url https://huggingface.co/api with Authorization: Bearer {TOKEN}"
            raise HfHubHTTPError(text, response=SimpleNamespace(status_code=self.status, headers={}, request=None))  # type: ignore[arg-type]
        return f"https://huggingface.co/{repository}"

    def upload_folder(self, **options: Any) -> None:
        options["files"] = sorted(path.name for path in Path(options["folder_path"]).iterdir())
        self.calls.append(("upload", options))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[FakeApi]:
    monkeypatch.setattr(FakeApi, "calls", [])
    monkeypatch.setattr(FakeApi, "status", None)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return FakeApi


def test_an_export_is_uploaded_to_a_private_repository(
    api: type[FakeApi], tmp_path: Path, capt: Capt, caplog: pytest.LogCaptureFixture
) -> None:
    from capt.pretrain.convert.dispatch import convert
    from capt.pretrain.convert.encoder import export_encoder

    cfg = config(layers=1)
    export_encoder("hf", model(cfg).state_dict(), cfg, tokenizer(), tmp_path / "hf", "", check=False)
    run = convert(tmp_path / "hf", tmp_path / "run", from_="hf")
    code, out, err = capt("convert", run, tmp_path / "out", "--to", "hf", "--push", "me/mine", "--license", "mit")
    assert code == 0
    (repository, created), (_, uploaded) = api.calls
    assert (repository, created["private"], created["exist_ok"]) == ("me/mine", True, True)
    assert uploaded["repo_id"] == "me/mine"
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= set(uploaded["files"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'from_pretrained("me/mine")' in card
    assert "license: mit" in card
    assert "https://huggingface.co/me/mine" in out
    assert TOKEN not in out + err + caplog.text + card


def test_a_refusal_names_the_status_and_what_to_do_but_no_token(api: type[FakeApi], tmp_path: Path) -> None:
    api.status = 403
    with pytest.raises(ConfigError, match=r"status 403.*hf upload me/mine") as caught:
        push(tmp_path, "me/mine")
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_public_is_asked_for(api: type[FakeApi], tmp_path: Path) -> None:
    push(tmp_path, "me/mine", private=False)
    assert api.calls[0][1]["private"] is False


def test_what_cannot_be_pushed_is_said_before_anything_is_converted(
    api: type[FakeApi], tmp_path: Path, capt: Capt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for repository in ("mine", "a/b/c", "me/mine@main", "../x", "me/ mine"):
        with pytest.raises(ConfigError, match="USER/NAME"):
            check_push(repository)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="hf auth login"):
        check_push("me/mine")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="offline"):
        check_push("me/mine")
    assert capt("convert", "nowhere", tmp_path / "out", "--to", "hf", "--push", "me/mine")[0] == 2
    assert api.calls == []
    assert not (tmp_path / "out").exists()
