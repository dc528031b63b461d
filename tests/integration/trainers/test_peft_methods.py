"""Methods of peft under every strategy: training, saving, loading and merging give what one process
of plain torch gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch

# importing peft and transformers takes ten seconds
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    # peft uses the older of the two names
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TOKENS = (5 * torch.arange(8)[None] + torch.arange(12)[:, None]) % 64
SECOND = "second"


def base_model() -> Any:
    import transformers

    torch.manual_seed(0)
    configuration = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(configuration).double()


def lora(net: Any, **options: Any) -> Any:
    import peft

    configuration = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)
    return peft.get_peft_model(net, configuration)


def ia3(net: Any) -> Any:
    import peft

    targets = ["k_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(
        net, peft.IA3Config(target_modules=targets, feedforward_modules=["down_proj"])
    )


def prompt_tuning(net: Any) -> Any:
    import peft

    return peft.get_peft_model(
        net, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )


def two_adapters(net: Any) -> Any:
    """Returns a model with two adapters, of which the second is trained."""
    import peft

    net = lora(net)
    net.add_adapter(SECOND, peft.LoraConfig(r=2, target_modules=["k_proj"]))
    net.set_adapter(SECOND)
    return net


METHODS: dict[str, Callable[[Any], Any]] = {
    "lora": lora,
    "dora": functools.partial(lora, use_dora=True),
    "ia3": ia3,
    "prompt tuning": prompt_tuning,
    "two adapters": two_adapters,
}


def build(method: str) -> tuple[Any, torch.optim.Optimizer]:
    """Returns a model whose adapter is not zero, and an optimizer of what is trained."""
    net = METHODS[method](base_model()).double()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net, torch.optim.AdamW(trained, lr=1e-2)


@functools.cache
def alone(method: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Trains with plain torch. Returns the model's state and its outputs."""
    net, optimizer = build(method)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for _ in range(4):
        net(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = {name: value.clone() for name, value in net.state_dict().items()}
    assert any(not torch.equal(after[name], before[name]) for name in before)
    return after, outputs(net)


@torch.no_grad()
def outputs(net: Any) -> torch.Tensor:
    logits: torch.Tensor = net.eval()(input_ids=TOKENS).logits
    return logits


def train(
    method: str, strategy: str, directory: Path
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Trains, saves the adapter, and merges it into a copy of the base model. Returns the trained
    state, and the outputs of the merged model."""
    model, optimizer = shoal.as_distributed(*build(method), strategy=strategy)
    loader = shoal.ElasticDataLoader(list(TOKENS), global_batch_size=len(TOKENS))
    for _ in loader.epochs(4):
        for tokens in loader:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state, copy = model.full_state_dict(), model.clone()
    whole: Any = getattr(copy, "module", copy)  # under ddp the copy is a ShardedModel too
    if shoal.is_main_process():
        whole.save_pretrained(directory)
    if method == "prompt tuning":  # has nothing to merge
        return state, None
    return state, outputs(whole.merge_and_unload())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "pipeline"]
)
def test_method_matches_one_process(tmp_path: Path, method: str, strategy: str) -> None:
    import peft

    expected, logits = alone(method)
    if strategy == "pipeline":
        with pytest.raises(shoal.ConfigurationError):
            shoal.launch(train, method, strategy, tmp_path, world_size=2)
        return
    state, merged = shoal.launch(train, method, strategy, tmp_path, world_size=2)[0]
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
    if merged is not None:
        torch.testing.assert_close(merged, logits, rtol=0, atol=1e-6)
    place = tmp_path / SECOND if method == "two adapters" else tmp_path
    loaded = peft.PeftModel.from_pretrained(base_model(), str(place)).double()
    torch.testing.assert_close(outputs(loaded), logits, rtol=0, atol=1e-6)
