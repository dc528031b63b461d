"""Fine-tunes a small language model with LoRA (peft) in a plain loop; see docs/guides/peft.md.

    shoal run --standalone --nproc-per-node 3 examples/lora.py

The model is tiny and its weights are random, so that nothing is downloaded. Replace `base_model`
and `Words` with your own model and data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peft
import shoal
import torch
import transformers


def base_model() -> transformers.PreTrainedModel:
    """Returns the model to adapt; usually `AutoModelForCausalLM.from_pretrained(...)`."""
    torch.manual_seed(0)  # every rank creates the same model, as if all had read the same file
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


class Words(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences in which each token determines the next one."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        return (5 * torch.arange(16) + index) % 64


def main() -> None:
    """Trains an adapter, saves a checkpoint after each epoch, and finally writes the adapter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("lora"))
    options = parser.parse_args()

    shoal.init()
    configuration = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    net = peft.get_peft_model(base_model(), configuration)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(trained, lr=1e-2), strategy=options.strategy
    )
    loader = shoal.ElasticDataLoader(Words(), global_batch_size=12, seed=0)
    shoal.resume(options.out / "checkpoints")

    for epoch in loader.epochs(options.epochs):
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        shoal.print_once(f"epoch {epoch}: loss {loss.item():.4f}")
        shoal.save_checkpoint(options.out / "checkpoints")

    complete = model.clone()
    if shoal.is_main_process():
        complete.save_pretrained(options.out / "adapter")


if __name__ == "__main__":
    main()
