"""The parts of a layered model, run one after another, compute what the model computes. Unsupported
models raise an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.pipelining.micro_batches import Call, cut_batch, merge_outputs
from shoal_worker.pipelining.partial import partial_model
from shoal_worker.pipelining.split import split_model
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS = 6, 11


def _through(model: nn.Module, stages: int, call: Call, cut_points: list[str] | None = None) -> Any:
    split = split_model(model, stages, cut_points=cut_points)
    value: Any = None
    for stage in range(stages):
        value = partial_model(model, split, stage)(value, call)
    return value


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary: Any = None,
    ) -> torch.Tensor:
        y = torch.tanh(self.linear(hidden_states))
        if rotary is not None:
            y = y * rotary[0] + y.roll(1, -1) * rotary[1]
        return hidden_states + (y if attention_mask is None else y * attention_mask)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(WIDTH) / WIDTH, persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(x.shape[1])[:, None] * self.frequencies
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class LlamaLike(nn.Module):
    """A nested model with a rotary table registered after the layers, keyword arguments, and a
    mapping as output."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(WORDS, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.norm = nn.LayerNorm(WIDTH)
            self.rotary = Rotary()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed_tokens(input_ids)
            rotary = self.rotary(x)
            for layer in self.layers[:4]:
                x = layer(hidden_states=x, rotary=rotary)
            return self.norm(x)

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaLike.Inner()
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Mapping[str, Any]:
        logits = self.lm_head(self.model(input_ids))
        loss = (
            None
            if labels is None
            else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )
        return {"loss": loss, "logits": logits}


class BertLike(nn.Module):
    """A model with an embedding module of several tables and a norm, an encoder with the layers, a
    pooler and a classifier."""

    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.types, self.norm = (
                nn.Embedding(WORDS, WIDTH),
                nn.Embedding(2, WIDTH),
                nn.LayerNorm(WIDTH),
            )

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.norm(self.words(ids) + self.types(torch.zeros_like(ids)))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for index in range(3):
                x = self.layer[index](x, attention_mask=mask)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.encoder = BertLike.Embeddings(), BertLike.Encoder()
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, 2)
        self.cls = nn.Parameter(torch.ones(1, 1, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(ids)
        x += self.cls
        mask = (ids != 0).unsqueeze(-1).to(x.dtype)
        x = self.encoder(x, mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", [LlamaLike, BertLike])
def test_models_of_known_structure_run_in_stages(kind: type[nn.Module], stages: int) -> None:
    torch.manual_seed(0)
    model, ids = kind(), torch.randint(0, WORDS, (3, 5))
    found = _through(
        model, stages, Call.of({"input_ids": ids, "labels": ids} if kind is LlamaLike else ids)
    )
    if kind is LlamaLike:
        expected = model(ids, ids)
        assert torch.equal(found["loss"], expected["loss"])
        assert torch.equal(found["logits"], expected["logits"])
    else:
        assert torch.equal(found, model(ids))


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


class _LongSkip(_Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(self.run(x) + x)


class _SkipIntoLayers(_Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(self.run(x, attention_mask=x))


class _TiedByHand(_Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.run(self.embedding(ids)) @ self.embedding.weight.T


class _DecidesByValues(_Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if x.sum() > 0:
            x = -x
        return self.head(self.run(x))


class _HeadRunsFirst(_Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.run(
            self.embedding(ids) + self.head.weight.sum() + self.head(self.embedding(ids)).sum()
        )


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (_LongSkip, "around the layers"),
        (_SkipIntoLayers, "not only its first argument"),
        (_TiedByHand, "without calling that module"),
        (_DecidesByValues, "branches on values that exist only on another pipeline stage"),
        (_HeadRunsFirst, "without calling that module|runs it on this stage"),
    ],
)
def test_values_reaching_another_stage_by_an_unsupported_path_are_refused(
    kind: type[nn.Module], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        _through(kind(), 2, Call.of(torch.randint(0, WORDS, (3, 5))), cut_points=["layers.1"])


class _Checkpointed(Layer):
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary: Any = None,
    ) -> torch.Tensor:
        return checkpoint(super().forward, hidden_states, use_reentrant=False)


def test_module_of_another_stage_is_queried_once_per_kind_of_input() -> None:
    shapes: list[tuple[int, ...]] = []

    class Asked(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if ids.is_meta:
                shapes.append(tuple(ids.shape))
            return super().forward(ids)

    class Plain(_Base):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.run(self.embedding(ids)))

    model = Plain()
    model.embedding = Asked(WORDS, WIDTH)
    split = split_model(model, 2, cut_points=["layers.1"])
    parts = [partial_model(model, split, stage) for stage in range(2)]
    for rows in (3, 3, 2, 2, 3):
        ids = torch.randint(0, WORDS, (rows, 5))
        assert torch.equal(parts[1](parts[0](None, Call.of(ids)), Call.of(ids)), model(ids))
    assert shapes == [(3, 5), (2, 5), (3, 5)]


@torch.no_grad()
@pytest.mark.parametrize("compile_layer", [None, "wrapped", "in place"])
def test_layers_that_take_the_models_input_directly_are_split(compile_layer: str | None) -> None:
    """No module runs before the layers, and the input is added to their result."""

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x
            for layer in self.layers:
                y = layer(y)
            return self.head(y + x)

    torch.manual_seed(0)
    model, x = Perceptron(), torch.randn(3, WIDTH)
    expected = model(x)
    for number, layer in enumerate(model.layers):
        if compile_layer == "wrapped":
            model.layers[number] = torch.compile(layer, backend="eager")
        elif compile_layer == "in place":
            layer.compile(backend="eager")
    assert torch.equal(_through(model, 2, Call.of(x)), expected)
    assert torch.equal(_through(model, 4, Call.of(x)), expected)


def test_layer_of_an_earlier_stage_that_is_reused_is_refused() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (*self.layers, self.layers[0]):
                x = layer(x)
            return x

    with pytest.raises(ConfigurationError, match="a layer of an earlier pipeline stage after"):
        _through(Reused(), 2, Call.of(torch.randn(3, WIDTH)))


def test_activation_checkpointing_around_and_within_layers_gives_the_same_gradients() -> None:
    """A checkpointed layer that runs again in the backward pass uses its own input, although its
    stage has processed another micro-batch in between."""
    torch.manual_seed(0)
    model = LlamaLike()
    for layer in model.model.layers:
        layer.__class__ = _Checkpointed
    batches = [torch.randint(0, WORDS, (3, 5)) for _ in range(2)]
    split = split_model(model, 2, cut_points=["model.layers.2"])
    parts = [partial_model(model, split, stage) for stage in range(2)]
    outputs = []
    for ids in batches:
        border = parts[0](None, Call.of(ids))
        outputs.append(parts[1](border, Call.of(ids))["logits"].sum())
    sum(outputs).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    sum(model(ids)["logits"].sum() for ids in batches).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def test_batch_is_split_into_sizes_that_differ_by_one_and_merged_again() -> None:
    inputs = {"x": torch.arange(14).view(7, 2), "flag": True, "scale": torch.tensor(2.0)}
    parts = cut_batch(inputs, torch.arange(7), count=3)
    assert [one.samples for one in parts] == [3, 2, 2]
    assert [one.weight for one in parts] == [3.0, 2.0, 2.0]
    assert all(one.inputs["flag"] is True and one.inputs["scale"] == 2 for one in parts)
    assert parts[1].signature == parts[2].signature != parts[0].signature
    assert torch.equal(merge_outputs([one.inputs["x"] for one in parts], [3, 2, 2]), inputs["x"])
    assert float(merge_outputs([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])) == 2.0
    assert len(cut_batch(torch.zeros(2, 1), count=4)) == 2
    with pytest.raises(ConfigurationError, match="tensors have 3 and 7 rows"):
        cut_batch(torch.zeros(3), torch.zeros(7), count=2)
    with pytest.raises(ConfigurationError, match="the batch has 0 rows"):
        cut_batch(torch.zeros(0, 2), count=2)
    with pytest.raises(ConfigurationError, match="weight_fn returned nan for micro-batch 0"):
        cut_batch(torch.zeros(2), count=2, weight_fn=lambda *_: float("nan"))
