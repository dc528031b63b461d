"""Shoal's trainers for TRL: the arguments and classes that they refuse, and the values that they
combine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shoal_common.errors import ConfigurationError
from torch import nn

# importing TRL takes almost twenty seconds
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_session"),
    # TRL uses the older of the two names
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]


def plain_arguments(directory: Path) -> Any:
    from shoal.integrations.transformers import TrainingArguments

    return TrainingArguments(str(directory), report_to=[])


def preferences(directory: Path, **arguments: Any) -> Any:
    from shoal.integrations.trl import DPOConfig

    return DPOConfig(str(directory), report_to=[], bf16=False, **arguments)


def supervised(directory: Path) -> Any:
    from shoal.integrations.trl import SFTTrainer

    return SFTTrainer(nn.Linear(1, 1), plain_arguments(directory))


def preferring(**arguments: Any) -> Callable[[Path], Any]:
    def make(directory: Path) -> Any:
        from shoal.integrations.trl import DPOTrainer

        return DPOTrainer(nn.Linear(1, 1), args=preferences(directory, **arguments))

    return make


def with_quantized_reference(directory: Path) -> Any:
    """A stand-in for bitsandbytes, as in tests/unit/worker_strategies/test_odd_parameters.py."""
    import torch
    from shoal.integrations.trl import DPOTrainer

    quantized: Any = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    reference = nn.Linear(1, 1)
    reference.weight = quantized(torch.zeros(1, 1), requires_grad=False)
    return DPOTrainer(nn.Linear(1, 1), reference, preferences(directory))


def rewarding(directory: Path) -> Any:
    import trl
    from shoal.integrations.transformers import Trainer

    class Rewarding(Trainer, trl.RewardTrainer):
        pass

    return Rewarding(nn.Linear(1, 1), plain_arguments(directory))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (supervised, "expected a shoal.integrations.trl.SFTConfig"),
        (preferring(sync_ref_model=True), "sync_ref_model=True is not supported"),
        (preferring(precompute_ref_log_probs=True), "precompute_ref_log_probs=True is not"),
        (preferring(loss_type=["aot"]), "loss_type='aot' depends on the batch as a whole"),
        (preferring(loss_type=["sigmoid", "sft"]), "loss_type='sft' depends on the batch"),
        (with_quantized_reference, "Expected a reference model that is not quantized"),
        (rewarding, "Rewarding inherits from TRL's RewardTrainer"),
    ],
)
def test_settings_that_would_give_wrong_values_are_refused(
    tmp_path: Path, make: Callable[[Path], Any], error: str
) -> None:
    with pytest.raises(ConfigurationError, match=error):
        make(tmp_path)


def small_tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2, "<unk>": 3}, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<eos>", eos_token="<eos>", unk_token="<unk>"
    )


def small_model() -> Any:
    import transformers

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=1, **shape))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_named_model_is_not_spread_over_gpus(tmp_path: Path, kind: str) -> None:
    import datasets
    from shoal.integrations.trl import DPOTrainer, SFTConfig, SFTTrainer

    small_model().save_pretrained(tmp_path / "base")
    row = {"prompt": "a", "completion": "b"} if kind == "sft" else {}
    trainer_class: Any = SFTTrainer if kind == "sft" else DPOTrainer
    trainer = trainer_class(
        str(tmp_path / "base"),
        args=SFTConfig(str(tmp_path), report_to=[], bf16=False)
        if kind == "sft"
        else preferences(tmp_path),
        train_dataset=datasets.Dataset.from_list(
            [row or {"prompt": "a", "chosen": "b", "rejected": "a"}]
        ),
        processing_class=small_tokenizer(),
    )
    assert trainer.args.model_init_kwargs == {"device_map": None}
    assert getattr(trainer.model, "hf_device_map", None) is None


def test_a_micro_batch_without_trained_tokens_counts_in_the_logged_values(tmp_path: Path) -> None:
    import datasets
    from shoal.integrations.trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        small_model(),
        args=SFTConfig(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            logging_steps=1,
            max_length=None,  # otherwise TRL drops such rows
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=False,
            use_cpu=True,
        ),
        train_dataset=datasets.Dataset.from_list(
            [
                {"input_ids": [0, 1, 0], "labels": [0, 1, 0]},
                {"input_ids": [1, 0], "labels": [-100, -100]},
            ]
        ),
        processing_class=small_tokenizer(),
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["num_tokens"] == 5
    # the mean over both micro-batches; TRL's entropy of one without trained tokens is 0
    assert 0 < logged["entropy"] <= math.log(4) / 2 + 1e-6


def test_different_reference_model_is_refused_for_a_joiner_and_at_a_resume() -> None:
    from shoal.integrations.trl import _Counted

    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = _Counted(one).state_dict()
    _Counted(one).load_state_dict(state)
    for mine in (_Counted(other), _Counted(None)):
        with pytest.raises(ConfigurationError, match="reference model") as raised:
            mine.load_state_dict(state)
        assert raised.value.reason == "REFERENCE_MODEL_DIFFERS"


def test_values_are_means_over_micro_batches_or_over_the_samples_of_divided_batches() -> None:
    from shoal.integrations.trl import _Counted

    counted = _Counted(None)
    counted.add([(1, 3.0, 5, {"entropy": 4.0}), (0, 1.0, 7, {"entropy": 2.0})], divided=False)
    restored = _Counted(None)
    restored.load_state_dict(counted.state_dict())
    restored.add([(0, 1.0, 1, {"entropy": 9.0})], divided=False)
    assert restored.take() == {"entropy": 5.0, "num_tokens": 13}
    assert restored.take() == {}
    restored.add([(1, 3.0, 5, {"entropy": 4.0}), (0, 1.0, 7, {"entropy": 2.0})], divided=True)
    assert restored.take() == {"entropy": 3.5, "num_tokens": 25}
    restored.add([(1, 0.0, 5, {"entropy": 0.0}), (0, 0.0, 7, {"entropy": 0.0})], divided=True)
    assert restored.take() == {"entropy": 0.0, "num_tokens": 37}
