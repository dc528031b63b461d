"""TRL's SFTTrainer or DPOTrainer, elastic, with a small Llama. Each rank prints its final state.

Arguments: a directory, a strategy, a kind, and optionally "kill" or "slow". Kinds: "sft", "dpo",
either of them with "-lora", "sft-packed" (sequences packed into rows of equal length), and
"sft-divided" or "dpo-divided" (each step is one batch, which is divided among the ranks), and
"dpo-differing" (each rank has a different reference model). The strategy "plain" uses TRL's own
classes. "kill": the second worker kills itself in its 6th step, before the update, and the others
wait after step 8 for its replacement. "slow": each step takes 0.3 s.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import peft
import shoal
import torch
import transformers
import trl
from shoal.integrations.trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from xxhash import xxh3_64_hexdigest

WORDS = 60


class Fault(transformers.TrainerCallback):
    """Kills the second worker once and holds the others until it has been replaced; or slows the
    steps."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.mode, self.killed, self.came = mode, directory / "killed", directory / "came"
        self.second = os.environ.get("LOCAL_RANK") == "1"

    def begins(self) -> None:
        """Lets the others continue if this process is the replacement. Called just before it
        joins."""
        if self.second and self.killed.exists():
            self.came.touch()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        kills = self.mode == "kill" and self.second and state.global_step == 5
        if kills and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        if self.mode == "slow":
            time.sleep(0.3)
            return
        give_up_at = time.monotonic() + 120
        while state.global_step >= 8 and not self.came.exists() and time.monotonic() < give_up_at:
            time.sleep(0.05)
        if state.global_step >= 8 and shoal.world_size() < int(os.environ["WORLD_SIZE"]):
            time.sleep(1.0)


def digest(state: dict[str, torch.Tensor]) -> str:
    return xxh3_64_hexdigest(
        b"".join(value.contiguous().numpy().tobytes() for _, value in sorted(state.items()))
    )


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = [*(f"w{number}" for number in range(WORDS)), "<pad>", "<eos>", "<unk>"]
    made = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def base_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS + 4,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def text(begin: int, step: int, length: int) -> str:
    return " ".join(f"w{(begin + step * number) % WORDS}" for number in range(length))


def rows(kind: str, count: int) -> datasets.Dataset:
    if kind.startswith("sft"):
        return datasets.Dataset.from_list(
            [{"text": text(5 * row, 1, 6 + row % 5)} for row in range(count)]
        )
    return datasets.Dataset.from_list(
        [
            {
                "prompt": text(5 * row, 1, 4),
                "chosen": " " + text(5 * row + 4, 1, 3 + row % 3),
                "rejected": " " + text(7 * row, 3, 2 + row % 4),
            }
            for row in range(count)
        ]
    )


def main() -> None:
    directory, strategy, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    mode = sys.argv[4] if len(sys.argv) > 4 else ""
    directory.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    plain, divided = strategy == "plain", kind.endswith("-divided")
    sft = kind.startswith("sft")
    settings: dict[str, Any] = {"max_length": 16}
    if kind == "sft-packed":
        settings = {"packing": True, "packing_strategy": "wrapped", "max_length": 8}
    config_class = {
        (True, True): trl.SFTConfig,
        (True, False): trl.DPOConfig,
        (False, True): SFTConfig,
        (False, False): DPOConfig,
    }[plain, sft]
    config = config_class(
        output_dir=str(directory),
        num_train_epochs=6,
        per_device_train_batch_size=8 if divided else 2,
        gradient_accumulation_steps=1 if divided else 4,
        per_device_eval_batch_size=2,
        learning_rate=1e-2,
        eval_strategy="epoch",
        logging_steps=2,
        save_strategy="no" if plain else "epoch",
        save_total_limit=1,
        bf16=False,
        use_cpu=True,
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    fault = Fault(directory, mode)
    named: dict[str, Any] = {
        "train_dataset": rows(kind, 24),
        "eval_dataset": rows(kind, 7),
        "processing_class": tokenizer(),
        "callbacks": [fault] if mode else [],
    }
    if kind.endswith("-lora"):
        named["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    elif not sft:
        rank = int(os.environ.get("RANK", "0"))
        named["ref_model"] = base_model(rank if kind == "dpo-differing" else 0)
    if plain:
        trainer_class = trl.SFTTrainer if sft else trl.DPOTrainer
    else:
        trainer_class = SFTTrainer if sft else DPOTrainer
        named |= {
            "strategy": strategy,
            "strategy_options": {} if divided else {"deterministic": True},
        }
    trainer = trainer_class(base_model(), args=config, **named)
    fault.begins()
    loss = trainer.train(**({} if plain else {"resume_from_checkpoint": True})).training_loss
    evaluated = trainer.evaluate(rows(kind, 5))
    state = trainer.model.state_dict() if plain else trainer.model_wrapped.full_state_dict()
    torch.save(state, directory / f"state-{os.environ.get('RANK', '0')}.pt")
    ignored = ("_runtime", "_per_second", "total_flos")  # Shoal does not count the last
    history = [
        {name: round(value, 5) for name, value in entry.items() if not name.endswith(ignored)}
        for entry in trainer.state.log_history
    ]
    if not plain:
        trainer.save_model(str(directory / "model"))
    told = {
        "state": digest(state),
        "loss": round(loss, 6),
        "steps": trainer.state.global_step,
        "world": 1 if plain else shoal.world_size(),
        "history": history,
        "evaluated": {
            name: round(value, 5) for name, value in evaluated.items() if not name.endswith(ignored)
        },
    }
    print(f"told {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main()
