"""The Hub's stub, with the real client of huggingface_hub pointed at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hub_stub import HubStub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """A Hub of its own, an empty cache in tmp_path/hub, no token, short waits."""
    from hub_stub import HubStub
    from huggingface_hub import constants

    from mfs_decompose.source import hub_cache, hub_client

    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(variable, raising=False)
    with HubStub() as stub:
        for name, value in {
            "ENDPOINT": stub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": stub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HOME": str(tmp_path),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_STORED_TOKENS_PATH": str(tmp_path / "stored_tokens"),
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_DOWNLOAD_TIMEOUT": 2,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hub_client, "FIRST_WAIT", 0.01)
        monkeypatch.setattr(hub_cache, "LOCK_PATIENCE", 0.05)
        monkeypatch.setattr(hub_cache, "_known", {})
        yield stub
