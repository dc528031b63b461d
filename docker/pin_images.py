"""Writes compose.pinned.yaml, which names third-party images by digest: `make pin-images`.

Pulls each third-party image and records its current digest in the registry. Images that are built
here are in no registry, so `docker compose config --resolve-image-digests` fails for them; instead,
their base image is pinned.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PINNED = ROOT / "compose.pinned.yaml"
_BASE = re.compile(r"^ARG PYTHON_IMAGE=(\S+)$", re.MULTILINE)


class PinError(Exception):
    """The digest of an image cannot be determined."""


def pin(compose: Mapping[str, Any], base: str, digest_of: Callable[[str], str]) -> dict[str, Any]:
    """Returns the contents of the additional compose file. `base`: base image of the images that
    are built here."""
    services: dict[str, Any] = {}
    for name, service in compose["services"].items():
        if "build" in service:
            services[name] = {"build": {"args": {"PYTHON_IMAGE": digest_of(base)}}}
        else:
            services[name] = {"image": digest_of(service["image"])}
    return {"services": services}


def by_digest(image: str, digests: str) -> str:
    """Returns the image's name with its digest. `digests`: the RepoDigests in the output of
    `image inspect`. Raises PinError if none of them belongs to the image's repository."""
    repository = image.rpartition(":")[0] or image
    found = [
        each
        for each in json.loads(digests) or []
        if f"/{each}".partition("@")[0].endswith(f"/{repository}")
    ]
    if not found:
        raise PinError(
            f"{image} has the digests {digests.strip()}, and none is of {repository}: pull it "
            "from its registry"
        )
    return str(found[0])


def pull(engine: str, image: str) -> str:
    """Pulls the image and returns its name with its digest. Raises PinError on failure."""
    try:
        subprocess.run(
            [engine, "pull", "--quiet", image], check=True, capture_output=True, text=True
        )
        digests = subprocess.run(
            [engine, "image", "inspect", "--format", "{{json .RepoDigests}}", image],
            check=True,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as error:
        raise PinError(
            f"{engine} is not installed; use another engine, as in make pin-images ENGINE=podman"
        ) from error
    except subprocess.CalledProcessError as error:
        raise PinError(f"{engine} cannot pull {image}: {error.stderr.strip()}") from error
    return by_digest(image, digests.stdout)


def main(engine: str) -> int:
    """Writes the pinned compose file. Returns the exit status."""
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    base = _BASE.search((ROOT / "docker/Dockerfile").read_text(encoding="utf-8"))
    assert base is not None, "the Dockerfile names its base image"
    digests: dict[str, str] = {}

    def digest_of(image: str) -> str:
        if image not in digests:
            digests[image] = pull(engine, image)
            print(f"{image} is {digests[image]}")
        return digests[image]

    try:
        content = pin(compose, base[1], digest_of)
    except PinError as error:
        print(f"pin-images: {error}", file=sys.stderr)
        return 1
    PINNED.write_text(yaml.safe_dump(content), encoding="utf-8")
    print(
        f"written: {PINNED.name}; use it as in docker compose -f compose.yaml -f {PINNED.name} up"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "docker"))
