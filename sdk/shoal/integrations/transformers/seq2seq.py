"""Seq2SeqTrainer of transformers for an elastic job. Its evaluation can generate text
(`predict_with_generate=True`).

Under every strategy, each rank has all parameters during an evaluation. A rank can therefore
generate the outputs for its own batches without waiting for other ranks (`shoal.evaluate`).
"""

from __future__ import annotations

import transformers

from shoal.integrations.transformers.arguments import TrainingArguments
from shoal.integrations.transformers.trainer import Trainer


class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """Seq2SeqTrainingArguments of transformers with the same changes as `TrainingArguments`."""


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """Seq2SeqTrainer of transformers whose training, as with `Trainer`, survives the death of
    workers."""
