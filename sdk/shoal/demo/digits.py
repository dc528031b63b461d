"""Handwritten digits (scikit-learn's bundled data set: UCI, 1797 images of 8 x 8 pixels) and a
small convolutional network that classifies them.

The data file is read without importing scikit-learn, because the import would delay the start of
every worker, including replacements, by a second.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.utils.data import TensorDataset

CLASSES: Final = 10
_TEST_IMAGES: Final = 360
_GREY_LEVELS: Final = 16


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Returns the training set and the test set, which are the same in every process: 1437 and 360
    images, (1, 8, 8) float32 in 0..1.

    Raises:
        ConfigurationError: scikit-learn is not installed, or lacks the file.
    """
    # each image's 64 pixels and its digit
    rows = np.loadtxt(_file(), delimiter=",", dtype=np.float32)
    np.random.default_rng(0).shuffle(rows)
    return _dataset(rows[_TEST_IMAGES:]), _dataset(rows[:_TEST_IMAGES])


def network() -> nn.Module:
    """Returns a network of two convolutions and a classifier, with dropout; about 200 000
    parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 160),
        nn.ReLU(),
        nn.Linear(160, CLASSES),
    )


def _file() -> Path:
    found = find_spec("sklearn")  # finds the package without importing it
    if found is None or found.origin is None:
        raise ConfigurationError(
            "the demo uses the digits of scikit-learn, which is not installed; run `pip install "
            "scikit-learn`"
        )
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.exists():
        raise ConfigurationError(
            f"scikit-learn does not contain its digits at {file}; install version 1.9.1, which does"
        )
    return file


def _dataset(rows: np.ndarray) -> TensorDataset:
    images = torch.from_numpy(rows[:, :-1] / _GREY_LEVELS).reshape(-1, 1, 8, 8)
    return TensorDataset(images, torch.from_numpy(rows[:, -1]).long())
