"""A stand-in for a cloud's metadata service: answers over HTTP as AWS, GCP and Azure document."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
GCP_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class Metadata:
    """Stand-in of one provider's service on a port of the loopback interface."""

    def __init__(self, provider: str) -> None:
        """`provider`: aws, gcp or azure."""
        self.provider = provider
        self.pages: dict[str, str] = {}
        """Path -> text. AWS answers other paths with 404, as it does while there is no notice."""
        if provider == "gcp":
            self.pages = {GCP_PREEMPTED: "FALSE", GCP_MAINTENANCE: "NONE"}
        if provider == "azure":
            self.pages = {AZURE_NAME: "vmss_1"}
            self.schedule()
        self.tokens = 0
        """Number of the newest session token of AWS. Older tokens have expired."""
        self.asked: list[str] = []
        """Answered paths."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = service.answer(self.path, self.headers)
                self.reply(status, text)

            def do_PUT(self) -> None:
                known = service.provider == "aws" and self.path == "/latest/api/token"
                if not known or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
                    self.reply(400 if known else 404, "")
                    return
                service.tokens += 1
                self.reply(200, f"token-{service.tokens}")

            def reply(self, status: int, text: str) -> None:
                self.send_response(status)
                if service.provider == "gcp":
                    self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, headers: Any) -> tuple[int, str]:
        expected = {
            "aws": ("X-aws-ec2-metadata-token", f"token-{self.tokens}", 401),
            "gcp": ("Metadata-Flavor", "Google", 403),
            "azure": ("Metadata", "true", 400),
        }
        name, value, refusal = expected[self.provider]
        if headers.get(name) != value:
            return refusal, ""
        self.asked.append(path)
        return (200, self.pages[path]) if path in self.pages else (404, "")

    def schedule(self, *events: tuple[str, str]) -> None:
        """Announces events of Azure, each a kind and the name of the machine."""
        self.pages[AZURE_EVENTS] = json.dumps(
            {
                "DocumentIncarnation": len(events),
                "Events": [
                    {
                        "EventId": f"C7061BAC-AFDC-4513-B24B-AA5F13A16123-{number}",
                        "EventStatus": "Scheduled",
                        "EventType": kind,
                        "ResourceType": "VirtualMachine",
                        "Resources": [machine],
                        "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
                        "Description": "",
                        "EventSource": "Platform",
                        "DurationInSeconds": -1,
                    }
                    for number, (kind, machine) in enumerate(events)
                ],
            }
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def metadata_service(provider: str) -> Iterator[Metadata]:
    """Serves the stand-in of a provider within the block."""
    service = Metadata(provider)
    try:
        yield service
    finally:
        service.close()
