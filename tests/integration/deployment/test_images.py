"""The images, without a container engine: each image's distributions are installed in an
environment of its own, from which compose.yaml's commands are started.

No container is built here. The test reads the packages of an image from the Dockerfile and installs
them in the same order: third-party packages first, then the project's wheels. torch, which is most
of the bytes, is lent by the environment that runs the tests, and only to images that require it.
Command, environment and secrets of a service are those in compose.yaml, with the container's
addresses and folders replaced by this test's.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from shoal_common.redis.embedded import find_server_binary

ROOT = Path(__file__).resolve().parents[3]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(
    # the default of each variable
    re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "compose.yaml").read_text())
)["services"]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
REQUIREMENTS = runpy.run_path(str(ROOT / "docker/requirements.py"))
DEADLINE_S = 60.0

pytestmark = [pytest.mark.images, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Image:
    """The installation of one target of the Dockerfile."""

    target: str
    bin: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    @property
    def default_command(self) -> list[str]:
        """The Dockerfile's CMD."""
        stage = re.search(rf"(?m)^FROM base AS {self.target}\n((?:.*\n)*?)(?=FROM |\Z)", DOCKERFILE)
        assert stage
        return list(json.loads(re.findall(r"(?m)^CMD (\[.*\])", stage[1])[-1]))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of all distributions of the project."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run(
        [*pip, *(str(ROOT / name) for name in REQUIREMENTS["FOLDERS"])], check=True, timeout=500
    )
    return folder


def install(target: str, wheels: Path, folder: Path) -> Image:
    """Installs the target in the same way as the Dockerfile."""
    stage = re.search(
        rf"AS {target}-packages\n(?:.*\n)*?RUN python docker/requirements.py (\w+)", DOCKERFILE
    )
    assert stage
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    requirements = REQUIREMENTS["third_party"](stage[1])
    if any(requirement.startswith("torch") for requirement in requirements):
        lend("torch", folder)
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(requirements))
    pip = [str(folder / "bin/pip"), "install", "--quiet", "--no-compile"]
    subprocess.run(
        [*pip, "--constraint", str(ROOT / "constraints.txt"), "--requirement", str(listed)],
        check=True,
        timeout=500,
    )
    own = [wheel(wheels, name) for name in REQUIREMENTS["own_distributions"](stage[1])]
    subprocess.run([*pip, "--no-index", "--no-deps", *own], check=True, timeout=180)
    return Image(target, folder / "bin")


def lend(name: str, folder: Path) -> None:
    """Makes a package of this environment, without its dependencies, visible in the environment in
    `folder`. pip regards it as installed there."""
    lent = distribution(name)
    packages = next((folder / "lib").glob("python*/site-packages"))
    for top in sorted(
        {
            path.parts[0]
            for path in lent.files or []
            if not path.parts[0].startswith(("..", "__pycache__"))
        }
    ):
        (packages / top).symlink_to(Path(str(lent.locate_file(top))))


def wheel(wheels: Path, folder: str) -> str:
    name = "shoal" if folder == "sdk" else f"shoal_{folder}"
    return str(next(wheels.glob(f"{name}-*.whl")))


@pytest.fixture(scope="module")
def coordinator_image(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    yield from installed("coordinator", wheels, tmp_path_factory)


@pytest.fixture(scope="module")
def ps_server_image(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    yield from installed("ps-server", wheels, tmp_path_factory)


@pytest.fixture(scope="module")
def worker_image(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    yield from installed("worker", wheels, tmp_path_factory)


def installed(target: str, wheels: Path, factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Yields an installed image and removes it afterwards; each takes some hundred megabytes."""
    folder = factory.mktemp(target)
    yield install(target, wheels, folder)
    shutil.rmtree(folder)


def test_the_coordinators_image_starts_without_torch(coordinator_image: Image) -> None:
    assert (
        coordinator_image.run("python", "-c", "import shoal_coordinator.__main__").returncode == 0
    )
    assert "No module named 'torch'" in coordinator_image.run("python", "-c", "import torch").stderr


def test_programs_accept_the_flags_of_images_and_compose(
    coordinator_image: Image, ps_server_image: Image, worker_image: Image
) -> None:
    commands = [
        (image, image.default_command)
        for image in (coordinator_image, ps_server_image, worker_image)
    ]
    for image, command in [*commands, (worker_image, SERVICES["worker"]["command"])]:
        program = list(itertools.takewhile(lambda word: not word.startswith("-"), command))
        helped = image.run(*program, "--help")
        assert helped.returncode == 0, helped.stderr
        for flag in [word.partition("=")[0] for word in command if word.startswith("--")]:
            assert flag in helped.stdout, f"{' '.join(program)} does not know {flag}"


SCRIPT = """
import sys
import torch
import shoal

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
net = torch.nn.Linear(4, 1)
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 0.1), strategy=sys.argv[1]
)
loader = shoal.ElasticDataLoader(
    data, **({"global_batch_size": 16} if sys.argv[1] == "ddp" else {"batch_size": 8})
)
for epoch in loader.epochs(2):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"{sys.argv[1]} world of {shoal.world_size()} rank {shoal.rank()}", flush=True)
"""


class Cluster:
    """The services of compose.yaml as processes on the loopback interface."""

    def __init__(self, processes: Any, folder: Path) -> None:
        self.processes = processes
        self.folder = folder
        script = shutil.copy(ROOT / "docker/make_secrets.py", folder)
        subprocess.run(
            [sys.executable, str(script)], check=True, timeout=30, stdout=subprocess.DEVNULL
        )
        self.replaced = {
            "/run/secrets": str(folder / "secrets"),
            "0.0.0.0:7000": "127.0.0.1:0",
            "0.0.0.0:7080": "127.0.0.1:0",
            "0.0.0.0:7100": "127.0.0.1:0",
            "0.0.0.0:7180": "127.0.0.1:0",
            "0.0.0.0:9100": "127.0.0.1:0",
        }

    def here(self, text: str) -> str:
        for container, local in self.replaced.items():
            text = text.replace(container, local)
        return text

    def start(
        self, service: str, image: Image, *, name: str | None = None, command: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Starts the service in the same way as compose.yaml, through the image's entry point."""
        name = name or service
        environment = {
            key: self.here(str(value)) for key, value in SERVICES[service]["environment"].items()
        }
        variable = {
            "coordinator": "SHOAL_COORDINATOR_PORT_FILE",
            "ps-server": "SHOAL_PS_SERVER_PORT_FILE",
        }.get(image.target)
        if variable:
            environment[variable] = str(self.processes.port_file(name))
        if "SHOAL_PS_SERVER_ADVERTISE" in environment:  # resolved only within compose
            environment["SHOAL_PS_SERVER_ADVERTISE"] = "127.0.0.1"
        environment["PATH"] = f"{image.bin}:{os.environ['PATH']}"
        environment["HOME"] = str(self.folder)
        words = command or SERVICES[service].get("command") or image.default_command
        volume = self.folder / f"{name}-snapshots"
        words = ["0" if word == "7101" else word for word in words]
        words = [self.here(word).replace("/var/lib/shoal/snapshots", str(volume)) for word in words]
        full = [str(ROOT / "docker/entrypoint.sh"), *words]
        return self.processes.start(name, full, environment=environment, directory=self.folder)

    def train(self, image: Image, strategy: str, *, job: str | None = None) -> None:
        """Runs SCRIPT on two workers to its end; fails unless both finish with a world
        size of 2."""
        words = [*SERVICES["worker"]["command"][:-1], "train.py", strategy]
        for flag, value in (("--nnodes", "2"), *((("--rdzv-id", job),) if job else ())):
            words = [f"{flag}={value}" if word.startswith(f"{flag}=") else word for word in words]
        names = [f"{strategy}-{index}" for index in (1, 2)]
        workers = [self.start("worker", image, name=name, command=words) for name in names]
        said = lambda: "".join(self.processes.log(name) for name in names)  # noqa: E731
        assert [worker.wait(DEADLINE_S) for worker in workers] == [0, 0], said()
        assert {f"{strategy} world of 2 rank {rank}" for rank in (0, 1)} <= set(
            re.findall(rf"{strategy} world of 2 rank \d", said())
        ), said()

    def healthy(self, name: str) -> None:
        """Returns whether the image's health check succeeds."""
        url = f"http://{self.processes.ports(name)['http']}/healthz"
        check = [sys.executable, "-I", str(ROOT / "docker/healthcheck.py"), url]
        self.processes.wait_for(
            lambda: subprocess.run(check, capture_output=True, check=False).returncode == 0,
            f"{name} to be healthy",
        )


def test_compose_services_form_a_cluster_with_tokens_and_a_redis_password(
    coordinator_image: Image,
    ps_server_image: Image,
    worker_image: Image,
    processes: Any,
    tmp_path: Path,
) -> None:
    cluster = Cluster(processes, tmp_path)
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for redis_url in (tmp_path / "secrets").glob("redis_*url"):
        redis_url.chmod(0o644)
        redis_url.write_text(redis_url.read_text().replace("@redis:6379", f"@127.0.0.1:{port}"))
    arguments = [cluster.here(part) for part in SERVICES["redis"]["command"][1:]]
    processes.start(
        "redis",
        [str(find_server_binary()), *arguments, "--port", str(port), "--dir", str(tmp_path)],
    )

    coordinator = cluster.start("coordinator", coordinator_image)
    cluster.healthy("coordinator")
    cluster.replaced["coordinator:7000"] = processes.ports("coordinator")["grpc"]
    servers = [
        cluster.start(name, ps_server_image) for name in SERVICES if name.startswith("ps-server-")
    ]
    (tmp_path / "train.py").write_text(SCRIPT)
    # The parameter servers belong to compose.yaml's job. The peer-to-peer run, which must show that
    # workers may use Redis, is a different job.
    cluster.train(worker_image, "ddp", job="another")
    cluster.train(worker_image, "async_sgd")

    for name, server in zip(
        (name for name in SERVICES if name.startswith("ps-server-")), servers, strict=True
    ):
        assert processes.stop(name, server) == 0, processes.log(name)
    assert processes.stop("coordinator", coordinator) == 0, processes.log("coordinator")
