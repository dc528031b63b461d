"""Trains with transformers in an elastic job: `Trainer(..., strategy="zero2")`, `Seq2SeqTrainer`,
and their arguments (docs/guides/trainers.md)."""

from shoal.integrations.transformers.arguments import TrainingArguments
from shoal.integrations.transformers.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
from shoal.integrations.transformers.trainer import Trainer

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]
