"""`make pin-images` pins the images of others by digest."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pin_images", ROOT / "docker/pin_images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pin_images = load()
SHA = "sha256:" + "0" * 64


def test_every_service_is_pinned_by_its_image_or_its_base_image() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    asked: list[str] = []

    def digest_of(image: str) -> str:
        asked.append(image)
        return f"{image.partition(':')[0]}@{SHA}"

    pinned = pin_images.pin(compose, "python:3.11-slim", digest_of)["services"]
    assert pinned.keys() == compose["services"].keys()
    assert pinned["redis"] == {"image": f"valkey/valkey@{SHA}"}
    assert pinned["worker"] == {"build": {"args": {"PYTHON_IMAGE": f"python@{SHA}"}}}
    assert not [image for image in asked if image.startswith("shoal-")]


@pytest.mark.parametrize(
    ("image", "digests"),
    [
        ("valkey/valkey:9.1.4", f'["docker.io/valkey/valkey@{SHA}"]'),
        ("python:3.11-slim", f'["other/python2@{SHA}", "docker.io/library/python@{SHA}"]'),
        ("registry:5000/a/b:1", f'["registry:5000/a/b@{SHA}"]'),
    ],
)
def test_the_digest_is_that_of_the_images_own_repository(image: str, digests: str) -> None:
    found = pin_images.by_digest(image, digests)
    assert found.endswith(f"{image.rpartition(':')[0]}@{SHA}")


@pytest.mark.parametrize("digests", ["null", "[]", f'["localhost/other@{SHA}"]'])
def test_an_image_without_a_digest_is_refused(digests: str) -> None:
    with pytest.raises(pin_images.PinError, match="none is of valkey/valkey: pull it"):
        pin_images.by_digest("valkey/valkey:9.1.4", digests)


def test_missing_container_engine_is_named_with_the_remedy() -> None:
    with pytest.raises(
        pin_images.PinError, match="no-such-engine is not installed; use another engine"
    ):
        pin_images.pull("no-such-engine", "valkey/valkey:9.1.4")
