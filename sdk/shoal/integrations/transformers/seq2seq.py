"""transformers' Seq2SeqTrainer in an elastic job: evaluation can generate
(`predict_with_generate=True`).

Under every strategy each rank has all parameters while it evaluates, so it generates the outputs of
its own batches without waiting for others (`shoal.evaluate`).
"""

from __future__ import annotations

import transformers

from shoal.integrations.transformers.arguments import TrainingArguments
from shoal.integrations.transformers.trainer import Trainer


class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """transformers' Seq2SeqTrainingArguments, changed as `TrainingArguments` is."""


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer, whose training survives the death of workers as `Trainer`'s
    does."""
