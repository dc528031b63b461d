"""Attention and MLPs of less usual structure: their shards compute correct results, if not always
at the lowest cost."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.integration.tensor_parallel.models import LlamaMlp


class NeoxAttention(nn.Module):
    """GPT-NeoX: query, key and value are packed head by head."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.num_attention_heads, self.head_size = heads, width // heads

    def forward(self, x):
        B, T, _ = x.shape
        packed = self.query_key_value(x).view(B, T, self.num_attention_heads, 3 * self.head_size)
        q, k, v = packed.transpose(1, 2).chunk(3, dim=-1)
        return self.dense(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(B, T, -1)
        )


class T5Layer(nn.Module):
    """T5: a learned bias for each head is added in place."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.n_heads, self.key_value_proj_dim, self.inner_dim = heads, width // heads, width
        self.relative_attention_bias = nn.Embedding(32, heads)
        self.wi, self.wo = nn.Linear(width, 64, bias=False), nn.Linear(64, width, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (
            layer(x).view(B, -1, self.n_heads, self.key_value_proj_dim).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = torch.matmul(q, k.transpose(3, 2))
        distance = (torch.arange(T)[None] - torch.arange(T)[:, None]).abs()
        scores += self.relative_attention_bias(distance).permute(2, 0, 1).unsqueeze(0)
        weights = F.softmax(scores.double(), dim=-1).type_as(scores)
        x = x + self.o(
            torch.matmul(weights, v).transpose(1, 2).contiguous().view(B, -1, self.inner_dim)
        )
        return x + self.wo(F.relu(self.wi(x)))


class Alibi(nn.Module):
    """A learned slope for each head in the mask, a gate after the sum, and attention by einsum and
    baddbmm."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.num_heads = heads
        self.slopes, self.gate = nn.Parameter(torch.rand(heads)), nn.Parameter(torch.ones(width))

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (
            layer(x).reshape(B, T, self.num_heads, -1).permute(0, 2, 1, 3)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mask = self.slopes.view(1, -1, 1, 1) * torch.arange(T)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(B, -1, T, -1))
        nothing = torch.zeros(B * self.num_heads, T, T, dtype=x.dtype)
        scores = torch.baddbmm(
            nothing, q.reshape(-1, T, 4), k.reshape(-1, T, 4).transpose(1, 2)
        ).view(B, self.num_heads, T, T)
        output = output + torch.einsum("bhts,bshd->bhtd", scores.softmax(-1), v.transpose(1, 2))
        return self.out_proj(output.transpose(1, 2).flatten(-2)) * self.gate


class Experts(nn.Module):
    """Mixtral's experts: each is a block, and gets the tokens that are routed to it."""

    def __init__(self, width=16):
        super().__init__()
        self.gate = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList([LlamaMlp(width, 24) for _ in range(3)])

    def forward(self, x):
        tokens = x.view(-1, x.shape[-1])
        weights, chosen = torch.topk(F.softmax(self.gate(tokens), -1), 2, -1)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            which, place = torch.where(number == chosen.T)
            output.index_add_(0, place, expert(tokens[place]) * weights[place, which, None])
        return output.view_as(x)


class BatchNormed(nn.Module):
    """A batch norm between the two layers, which needs its full input."""

    def __init__(self):
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)

    def forward(self, x):
        return self.fc2(F.relu(self.bn(self.fc1(x[:, 0]))))


MORE = {
    "gpt-neox": (NeoxAttention, {"query_key_value": "column", "dense": "row"}),
    "t5": (T5Layer, {"q": "column", "k": "column", "v": "column", "o": "row",
                     "relative_attention_bias": "vocabulary",
                     "wi": "column", "wo": "row"}),
    "alibi": (Alibi, {"q_proj": "column", "k_proj": "column", "v_proj": "column",
                      "out_proj": "row"}),
    "experts": (Experts, {"gate": "column_gathered", **{
        f"experts.{i}.{name}": style for i in range(3)
        for name, style in (("gate_proj", "column"), ("up_proj", "column"), ("down_proj", "row"))
    }}),
    "batch norm": (BatchNormed, {"fc1": "column", "fc2": "row"}),
}  # fmt: skip
"""Model -> constructor and input, and the style of each sharded module."""
