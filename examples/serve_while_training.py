"""Serves the newest weights of a model during its training: a small network for handwritten
digits, on parameter servers.

Train:  shoal up --workers 2 --servers 2 examples/serve_while_training.py
Serve:  with the command that the training prints first or, if its cluster was started separately,
        python examples/serve_while_training.py --serve COORDINATOR --job JOB

The serving process is not a member of the job: no worker waits for it, and it may start and exit at
any time. A token with the reader role (SHOAL_TOKEN) is sufficient. The response to `GET /` is the
accuracy of the newest weights on held-out digits.
"""

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import shoal
import torch
from sklearn.datasets import load_digits
from torch import nn

HELD_OUT = 200


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    return torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target)


def train(epochs: int) -> None:
    shoal.init()
    if shoal.is_main_process() and "SHOAL_COORDINATOR" in os.environ:
        print(
            f"python {__file__} --serve {os.environ['SHOAL_COORDINATOR']} --job "
            f"{os.environ['SHOAL_JOB_ID']}",
            flush=True,
        )
    net = network()
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 1e-3), strategy="async_sgd"
    )
    images, labels = digits()
    dataset = torch.utils.data.TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])
    loader = shoal.ElasticDataLoader(dataset, batch_size=32)
    for epoch in loader.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        print(f"rank {shoal.rank()}: epoch {epoch} is over", flush=True)


class Answers:
    """Computes the responses of the serving process."""

    def __init__(self, reader: shoal.ModelReader) -> None:
        self._reader = reader
        self._net = network()
        images, labels = digits()
        self._images, self._labels = images[:HELD_OUT], labels[:HELD_OUT]

    def answer(self) -> dict[str, float]:
        state = self._reader.state_dict()  # only values that have changed are sent
        with torch.no_grad():
            guesses = torch.func.functional_call(self._net, state, self._images).argmax(1)
        return {
            "accuracy": float((guesses == self._labels).float().mean()),
            "updates": max(self._reader.versions.values()) - 1,
        }


def serve(coordinator: str, job: str, port: int) -> None:
    with shoal.ModelReader(
        shoal.ChannelSettings(address=coordinator, token=os.environ.get("SHOAL_TOKEN")), job
    ) as reader:
        answers = Answers(reader)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                try:
                    status, body = 200, json.dumps(answers.answer())
                except shoal.ShoalError as error:
                    status, body = 503, json.dumps({"error": str(error)})
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body.encode())

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            print(f"http://127.0.0.1:{server.server_port}/", flush=True)
            server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--serve",
        metavar="COORDINATOR",
        help="HOST:PORT of a coordinator; serves the model of --job instead of training",
    )
    parser.add_argument("--job", help="job whose model is served")
    parser.add_argument(
        "--port", type=int, default=0, help="port of the HTTP server; 0: any free port"
    )
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    if options.serve and not options.job:
        parser.error("--serve needs --job")
    if options.serve:
        serve(options.serve, options.job, options.port)
    else:
        train(options.epochs)
