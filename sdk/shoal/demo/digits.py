"""Real handwritten digits (scikit-learn's bundled set: UCI, 1797 images of 8 x 8 pixels) and a small convolutional network for them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

CLASSES = 10


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Training set and test set, the same in every process: 1437 and 360 images, (1, 8, 8) float32 in 0..1."""
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images / 16.0, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    return _dataset(train_x, train_y), _dataset(test_x, test_y)


def network() -> nn.Module:
    """Two convolutions and a classifier, with dropout; about 200 000 parameters."""
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


def _dataset(images: object, labels: object) -> TensorDataset:
    return TensorDataset(torch.as_tensor(images, dtype=torch.float32).unsqueeze(1), torch.as_tensor(labels, dtype=torch.int64))
