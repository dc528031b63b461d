"""transformers' Trainer in an elastic job: `Trainer(..., strategy="zero2")` and `TrainingArguments`
(docs/guides/trainers.md)."""

from shoal.integrations.transformers.arguments import TrainingArguments
from shoal.integrations.transformers.trainer import Trainer

__all__ = ["Trainer", "TrainingArguments"]
