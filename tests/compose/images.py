"""The images that compose.yaml starts: this repository's own, from docker/Dockerfile, and stand-ins
for third-party ones.

Third-party images come from a registry, which may be unreachable. The stand-ins have the same names
and tags, the same programs and the same entry points. That of python is Debian with its python3,
that of Valkey has the server from the tests' own wheel (and a compatible redis-cli), and that of
Prometheus has the program from this machine's package. Grafana has no stand-in.

In a build, pip uses the indexes that it uses on this machine: its settings are read when the build
starts, and mounted.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml
from shoal_common.redis.embedded import find_server_binary

from tests.compose.engine import Engine, EngineError

ROOT: Final = Path(__file__).resolve().parents[2]
SERVICES: Final[dict[str, dict[str, Any]]] = yaml.safe_load((ROOT / "compose.yaml").read_text())[
    "services"
]
BUILT: Final = ("coordinator", "ps-server-1", "worker")
"""One service of each image that is built."""
_DEBIAN: Final = "localhost/debian"
_PACKAGES: Final = (
    "busybox",
    "python-is-python3",
    "python3",
    "python3-pip",
    "python3-venv",
    "redis-tools",
)
_BUILD_S: Final = 900.0
_VALKEY: Final = f"""
FROM {_DEBIAN}
COPY valkey-server entrypoint /usr/local/bin/
RUN ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli \\
    && useradd --system valkey \\
    && install --directory --owner valkey --group valkey /data
VOLUME /data
WORKDIR /data
ENTRYPOINT ["entrypoint"]
"""
# As in Valkey's image: if started by root, it gives the data to its own user and continues as that
# user.
_VALKEY_ENTRYPOINT: Final = """#!/bin/sh
set -e
[ "$(id -u)" = 0 ] || exec "$@"
find . ! -user valkey -exec chown valkey {} +
exec setpriv --reuid=valkey --regid=valkey --clear-groups -- "$@"
"""
_PROMETHEUS: Final = f"""
FROM {_DEBIAN}
COPY prometheus /bin/prometheus
RUN ln -s /bin/busybox /usr/local/bin/wget \\
    && install --directory --owner nobody --group nogroup /prometheus
USER nobody
VOLUME /prometheus
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
"""


def make_base(engine: Engine, cache: Path) -> None:
    """Creates the base image of all others and starts a container from it.

    Raises:
        EngineError: no base is available, or the engine starts no container. Neither can be this
            repository's fault.
    """
    archive = _debian(cache)
    engine.podman("import", "--quiet", str(archive), _DEBIAN)
    engine.podman("run", "--rm", "--init", "--network", "none", _DEBIAN, "true")


def _debian(cache: Path) -> Path:
    """Returns a small Debian (or Ubuntu) as an archive, with this machine's release and mirrors. It
    is kept for the next run."""
    places = [
        Path("/etc/apt/sources.list"),
        *(Path("/etc/apt/sources.list.d") / f"{name}.sources" for name in ("debian", "ubuntu")),
    ]
    sources = [place for place in places if place.is_file() and place.read_text().strip()]
    release = re.search(r"(?m)^VERSION_CODENAME=(\S+)", Path("/etc/os-release").read_text())
    if not sources or release is None:
        raise EngineError(
            "this machine has no apt sources of Debian or Ubuntu, from which base images are made"
        )
    key = "\0".join((release[1], *_PACKAGES, *(source.read_text() for source in sources)))
    archive = cache / f"{release[1]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.tar"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = archive.with_name(f"unfinished-{archive.name}")
        included = f"--include={','.join(_PACKAGES)}"
        command = [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            included,
            release[1],
            str(unfinished),
            *map(str, sources),
        ]
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_BUILD_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"mmdebstrap made no base image in {_BUILD_S:g} s") from None
        if ended.returncode != 0:
            raise EngineError(f"mmdebstrap makes no base image: {ended.stderr[-2000:]}")
        unfinished.rename(archive)
    return archive


def stand_in(engine: Engine) -> None:
    """Creates the images that compose.yaml and docker/Dockerfile would pull, under the same
    names."""
    python = re.search(r"(?m)^ARG PYTHON_IMAGE=(\S+)", (ROOT / "docker/Dockerfile").read_text())
    assert python
    engine.podman("tag", _DEBIAN, f"docker.io/library/{python[1]}")
    context = engine.folder / "context"
    context.mkdir()
    shutil.copy(find_server_binary(), context / "valkey-server")
    (context / "entrypoint").write_text(_VALKEY_ENTRYPOINT)
    (context / "entrypoint").chmod(0o755)
    program = shutil.which("prometheus")
    assert program
    shutil.copy(program, context / "prometheus")
    for service, text in (("redis", _VALKEY), ("prometheus", _PROMETHEUS)):
        (context / "Containerfile").write_text(text)
        engine.podman(
            "build",
            "--network",
            "none",
            "--tag",
            f"docker.io/{SERVICES[service]['image']}",
            str(context),
        )


def build(engine: Engine, checkout: Path) -> None:
    """Builds this repository's images with compose from its copy in `checkout`."""
    flags = shlex.join(
        ["--network", "host", *(f"--volume={volume}" for volume in _pip_settings(engine.folder))]
    )
    command = ["podman-compose", f"--podman-build-args={flags}", "--profile", "servers", "build"]
    for service in BUILT:
        engine.run(*command, service, online=True, directory=checkout, timeout_s=_BUILD_S)


def _pip_settings(folder: Path) -> list[str]:
    """Returns volumes that make pip in a container use this machine's indexes and trusted hosts."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    settings: dict[str, str] = {}
    for kind in ("global", ":env:"):  # the environment has priority
        for name, value in re.findall(rf"(?m)^{kind}\.([\w-]+)=(.*)$", listed):
            settings[name] = " ".join(ast.literal_eval(value).split())
    mounted = folder / "pip.conf"
    mounted.write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    )
    named = {
        Path(word.removeprefix("file://")) for value in settings.values() for word in value.split()
    }
    local = sorted(path for path in named if path.is_absolute() and path.exists())
    # pages of an index refer to files beside it
    indexes = {path.parent if path.name == "simple" else path for path in local}
    return [f"{mounted}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(indexes))]
