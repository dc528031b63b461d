"""Writes train.bin and val.bin: the source of Python's standard library, one byte per token."""

import sysconfig
from pathlib import Path

import numpy as np

files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
tokens = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.uint16)
tokens[: len(tokens) * 9 // 10].tofile("train.bin")
tokens[len(tokens) * 9 // 10 :].tofile("val.bin")
