"""Tensor-parallel plans: derivation, refusals and printed tables. Only shapes matter, so the models
have no values and there is no process group."""

from __future__ import annotations

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.tensor_parallel import Split, Style, make_plan
from torch import nn

from tests.integration.tensor_parallel.models import Bag, BertLayer, Gpt2, Llama, NanoGpt, Odd, Vit


@pytest.fixture(autouse=True)
def _on_meta():
    with torch.device("meta"):
        yield


def styles(plan):
    return {
        entry.module: entry.style.value
        for entry in plan.entries
        if entry.style is not Style.REPLICATE
    }


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            NanoGpt,
            {
                "transformer.wte": "vocabulary",
                "transformer.wpe": "vocabulary",
                "transformer.h.0.attn.c_attn": "packed_column",
                "transformer.h.0.attn.c_proj": "row",
                "transformer.h.0.mlp.c_fc": "column",
                "transformer.h.0.mlp.c_proj": "row",
                "lm_head": "column_gathered",
            },
        ),
        (
            Llama,
            {
                "embed_tokens": "vocabulary",
                "layers.0.self_attn.q_proj": "column",
                "layers.0.self_attn.k_proj": "column",
                "layers.0.self_attn.v_proj": "column",
                "layers.0.self_attn.o_proj": "row",
                "layers.0.mlp.gate_proj": "column",
                "layers.0.mlp.up_proj": "column",
                "layers.0.mlp.down_proj": "row",
                "lm_head": "column_gathered",
            },
        ),
        (
            Gpt2,
            {
                "wte": "vocabulary",
                "wpe": "vocabulary",
                "attn.c_attn": "packed_column",
                "attn.c_proj": "row",
                "mlp.c_fc": "column",
                "mlp.c_proj": "row",
            },
        ),
        (
            BertLayer,
            {
                "attention.self.query": "column",
                "attention.self.key": "column",
                "attention.self.value": "column",
                "attention.output.dense": "row",
                "intermediate.dense": "column",
                "output.dense": "row",
            },
        ),
        (
            Vit,
            {
                "qkv": "packed_column",
                "proj": "row",
                "mlp.0": "column",
                "mlp.3": "row",
                "head": "column_gathered",
            },
        ),
        (Bag, {"bag": "embedding_dimension", "top.0": "column", "top.2": "row"}),
        (
            lambda: nn.TransformerDecoderLayer(16, 4, 32),
            {
                "self_attn": "attention",
                "self_attn.out_proj": "row",
                "multihead_attn": "attention",
                "multihead_attn.out_proj": "row",
                "linear1": "column",
                "linear2": "row",
            },
        ),
    ],
    ids=["nanoGPT", "llama", "gpt-2", "bert", "vit", "embedding bag", "torch"],
)
def test_known_structures_are_split_in_pairs(model, expected):
    assert styles(make_plan(model(), 2, minimum_parameter_group_size=0)) == expected


def test_a_model_on_meta_has_the_plan_of_one_with_values():
    with torch.device("cpu"):
        valued = NanoGpt()
    assert make_plan(NanoGpt(), 2) == make_plan(valued, 2)


def test_blocks_with_unknown_names_are_found_by_tracing():
    plan = make_plan(
        Odd(), 2, minimum_parameter_group_size=0, example_inputs=(torch.zeros(1, 3, 16),)
    )
    columns = ("alpha", "beta", "gamma", "first", "second")
    assert styles(plan) == {**dict.fromkeys(columns, "column"), "delta": "row", "third": "row"}
    alone = make_plan(Odd(), 2, minimum_parameter_group_size=0)
    assert set(styles(alone).values()) == {"column_gathered"}, (
        "without inputs, each layer is planned separately"
    )
    named = make_plan(
        Odd(), 2, minimum_parameter_group_size=0, example_inputs={"x": torch.zeros(1, 3, 16)}
    )
    assert named == plan


def test_tracing_refuses_models_that_need_values():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x):
            return self.one(x) if x.sum() > 0 else x

    with pytest.raises(ConfigurationError, match="cannot be traced on the meta device"):
        make_plan(Looks(), 2, example_inputs=(torch.zeros(1, 4),))


def test_the_plan_prints_as_a_table():
    printed = str(make_plan(NanoGpt(), 2, minimum_parameter_group_size=1024))
    assert printed.splitlines()[0].split() == [
        "module",
        "kind",
        "style",
        "shape",
        "split",
        "bytes/rank",
        "why",
    ]
    assert "transformer.h.0.mlp.c_fc" in printed
    assert "below 1024 elements" in printed
    assert "norm" in printed
    lines = {
        line.split()[0]: line.split()
        for line in str(make_plan(NanoGpt(), 4, minimum_parameter_group_size=0)).splitlines()
    }
    assert lines["transformer.h.0.mlp.c_fc"][:6] == [
        "transformer.h.0.mlp.c_fc",
        "Linear",
        "column",
        "64x16",
        "0",
        "1,088",
    ]
    assert lines["transformer.h.0.mlp.c_proj"][2:6] == ["row", "16x64", "1", "1,088"]
    assert lines["transformer.h.0.attn.c_attn"][2:6] == ["packed_column", "48x16", "1", "816"]
    assert "tied to transformer.wte" in " ".join(lines["lm_head"])
    assert lines["lm_head"][5] == "0"


def test_bytes_per_rank_fall_with_the_number_of_ranks():
    model = nn.TransformerEncoderLayer(64, 4, 256)
    whole = make_plan(model, 1).total_bytes
    small = sum(
        p.numel() * 4
        for n, p in model.named_parameters()
        if "norm" in n or n in ("linear2.bias", "self_attn.out_proj.bias")
    )
    for size in (1, 2, 4):
        plan = make_plan(model, size)
        assert plan.total_bytes == whole
        assert plan.bytes_per_rank == (whole - small) // size + small


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(64, 64))


class Unsaid(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(64, 64) for _ in range(4))


def _wide_heads():
    return NanoGpt(width=32, heads=2)


def _narrow_heads():
    return Llama(key_heads=2)


class Standardized(nn.Conv2d):
    """A layer whose class computes something different from torch's class."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_wide_heads, r"transformer.h.0.attn .*its 2 attention heads are not divisible by "
                      r"4.*plan=\{\"transformer.h.0.attn\": \"replicate\"\}"),
        (_narrow_heads, r"layers.0.self_attn .*its 2 key and value heads are not divisible by 4"),
        (lambda: nn.MultiheadAttention(60, 6), r"split the model .*num_heads=6\): its 6 heads are "
                                               r"not divisible by 4"),
        (lambda: nn.MultiheadAttention(64, 4, add_bias_kv=True), "add_bias_kv and add_zero_attn "
                                                                 "add a position"),
        (lambda: nn.Sequential(nn.Linear(64, 66), nn.ReLU(), nn.Linear(66, 64)), r"0 \(Linear, "
                                                                                 r"4,290 "
                                                                                 r"elements\): "
                                                                                 r"its "
                                                                                 r"66 "
                                                                                 r"output "
                                                                                 r"features"),
        (lambda: nn.Sequential(nn.Conv2d(16, 64, 3, groups=4)), r"there is no style for Conv2d, .* "
                                                                r"has 2,304 .*\(64x4x3x3\)"),
        (lambda: nn.Sequential(Standardized(16, 64, 3)), r"there is no style for Standardized, "
                                                         r"whose parameter weight has 9,216 "),
        (lambda: nn.Sequential(nn.Conv2d(16, 63, 3)), r"its 63 output channels are not divisible"),
        (Bare, r"there is no style for Bare, whose parameter table has 4,096 .*plan=\{\"table\": "
               r"\"replicate\"\}"),
        (lambda: nn.Embedding(9, 128), "its 9 rows, in pieces of 3, leave at least one of "
                                     "4 ranks without rows"),
        (lambda: nn.Embedding(64, 64, max_norm=1.0), "Embedding with max_norm=1.0 needs the whole "
                                                     "table"),
        (lambda: nn.EmbeddingBag(64, 66), "its 66 columns are not divisible by 4"),
        (Unsaid, "the number of heads of this attention block is "
                 "unknown.*num_heads.*example_inputs"),
    ],
    ids=[
        "heads", "key heads", "torch heads", "bias_kv", "features", "groups", "own forward",
        "channels", "parameter", "rows",
        "max_norm", "bag", "unknown",
    ],
)  # fmt: skip
def test_unsplittable_layers_are_refused_with_the_size_and_the_remedy(model, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        make_plan(model(), 4)
    assert str(refused.value).startswith("tensor parallelism over 4 ranks cannot split")
    assert "elements" in str(refused.value)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (lambda: NanoGpt(width=32, heads=2), {"transformer.h.*.attn": "replicate"}),
        (lambda: nn.Sequential(nn.Conv2d(16, 64, 3)), {"0": Style.REPLICATE}),
        (Bare, {"table": "replicate"}),
        (Bare, {"": "replicate"}),
    ],
)
def test_the_remedy_named_helps(model, plan):
    assert "requested" in {entry.reason for entry in make_plan(model(), 4, plan=plan).entries}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"transformer.*.nothing": "row"},
            "no module or parameter matches 'transformer.*.nothing'",
        ),
        (
            {"lm_head": "diagonal"},
            "'diagonal' is not a style; expected one of column, packed_column",
        ),
        (
            {"transformer.ln_f": "column"},
            "transformer.ln_f is a LayerNorm, which does not support the style 'column'",
        ),
        ({"transformer.ln_f.weight": "column"}, "is a parameter, not a module"),
        (
            {"lm_head": "row"},
            "lm_head.weight is tied to transformer.wte.weight, but the plan splits one along "
            "dimension 1",
        ),
        (
            {"transformer.h.*.mlp.c_fc": Split(style=Style.PACKED_COLUMN, parts=3)},
            "its 64 output features in 3 parts are not divisible by 2",
        ),
        (
            {"transformer.h.*.attn.c_attn": Split(style=Style.PACKED_COLUMN, parts=3, heads=3)},
            "its 3 heads are not divisible by 2",
        ),
    ],
)
def test_invalid_user_plan_is_refused(plan, message):
    with pytest.raises(ConfigurationError, match=message.replace("*", r"\*")):
        make_plan(NanoGpt(), 2, plan=plan, minimum_parameter_group_size=0)


def test_a_split_whose_parts_do_not_fit_its_style_is_refused():
    with pytest.raises(ConfigurationError, match="expected at least 2 parts for packed_column"):
        Split(style=Style.COLUMN, parts=2)


def test_small_layers_are_replicated_and_reported():
    plan = make_plan(NanoGpt(), 2, minimum_parameter_group_size=10_000)
    assert styles(plan) == {}
    assert {entry.reason.split(" block")[-1] for entry in plan.entries} >= {
        "norm",
        "below 10000 elements",
    }
    assert plan.communication == ()
