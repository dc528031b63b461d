"""Small models with the structure and attribute names of popular libraries, without those
libraries."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16),
            nn.ReLU(),
            nn.Linear(16, 8),
            nn.GELU(),
            nn.Linear(8, 12),
            nn.Tanh(),
            nn.Linear(12, 5),
        )

    def forward(self, x):
        return self.layers(x)


class NanoAttention(nn.Module):
    """Karpathy's nanoGPT: sizes come from the input's shape; query, key and value are packed;
    attention is written out or torch's function."""

    def __init__(self, width, heads, dropout, flash):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout, self.flash = heads, width, dropout, flash
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class NanoMlp(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoBlock(nn.Module):
    def __init__(self, width, heads, dropout, flash):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), NanoAttention(width, heads, dropout, flash)
        self.ln_2, self.mlp = nn.LayerNorm(width), NanoMlp(width, dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, vocabulary=20, width=16, heads=4, blocks=1, dropout=0.0, flash=True):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocabulary, width), "wpe": nn.Embedding(16, width),
            "drop": nn.Dropout(dropout),
            "h": nn.ModuleList([NanoBlock(width, heads, dropout, flash) for _ in range(blocks)]),
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx):
        positions = torch.arange(idx.shape[1])
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class LlamaAttention(nn.Module):
    """Attention as in transformers: grouped heads, rotary positions, the number of heads only in
    the configuration, and a norm of each head as in Qwen 3."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(
            config.hidden_size, config.num_attention_heads * self.head_dim, bias=False
        )
        self.k_proj = nn.Linear(
            config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False
        )
        self.v_proj = nn.Linear(
            config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False
        )
        self.o_proj = nn.Linear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias=False
        )
        self.q_norm = RmsNorm(self.head_dim)

    def forward(self, hidden_states, position_embeddings, attention_mask):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = (t.unsqueeze(1) for t in position_embeddings)
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin
        if self.config.eager:
            b, n, s, d = key.shape
            key, value = (
                t[:, :, None]
                .expand(b, n, self.num_key_value_groups, s, d)
                .reshape(b, n * self.num_key_value_groups, s, d)
                for t in (key, value)
            )
            weights = (
                torch.matmul(query, key.transpose(2, 3)) * self.head_dim**-0.5 + attention_mask
            )
            output = torch.matmul(
                F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype), value
            )
        else:
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, enable_gqa=True
            )
        return self.o_proj(output.transpose(1, 2).reshape(*input_shape, -1).contiguous())


class LlamaMlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
        )
        self.down_proj, self.act_fn = nn.Linear(inner, width, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = (
            LlamaAttention(config),
            LlamaMlp(config.hidden_size, 3 * config.hidden_size),
        )
        self.input_layernorm, self.post_attention_layernorm = (
            RmsNorm(config.hidden_size),
            RmsNorm(config.hidden_size),
        )

    def forward(self, x, position_embeddings, attention_mask):
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings, attention_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama with untied embeddings; computes the loss itself if it gets labels, like
    transformers' models."""

    def __init__(self, vocabulary=20, eager=False, key_heads=4):
        super().__init__()
        config = SimpleNamespace(
            hidden_size=32, num_attention_heads=8, num_key_value_heads=key_heads, eager=eager
        )
        self.config = config
        self.embed_tokens = nn.Embedding(vocabulary, 32, padding_idx=3)
        self.layers = nn.ModuleList([LlamaLayer(config) for _ in range(1)])
        self.norm = RmsNorm(32)
        self.lm_head = nn.Linear(32, vocabulary, bias=False)
        self.register_buffer(
            "inv_freq", 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4), persistent=False
        )

    def forward(self, input_ids, labels=None):
        x = self.embed_tokens(input_ids)
        length = input_ids.shape[1]
        angles = torch.arange(length).to(x.dtype)[None, :, None] * self.inv_freq.to(x.dtype)
        angles = torch.cat((angles, angles), dim=-1)
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        for layer in self.layers:
            x = layer(x, (angles.cos(), angles.sin()), mask)
        logits = self.lm_head(self.norm(x))
        if labels is None:
            return logits
        shifted = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
        return {"loss": F.cross_entropy(shifted, labels[..., 1:].reshape(-1)), "logits": logits}


class Conv1D(nn.Module):
    """transformers.pytorch_utils.Conv1D: a linear layer that stores its weight transposed."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = (
            nn.Parameter(torch.randn(nx, nf) * 0.2),
            nn.Parameter(torch.randn(nf)),
        )

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class Gpt2Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.embed_dim = self.split_size = width
        self.num_heads, self.head_dim = heads, width // heads
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)

    def forward(self, hidden_states):
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        shape = (*query.shape[:-1], -1, self.head_dim)
        query, key, value = (t.view(shape).transpose(1, 2) for t in (query, key, value))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return self.c_proj(output.reshape(*output.shape[:-2], -1).contiguous())


class Gpt2Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj, self.act = (
            Conv1D(4 * width, width),
            Conv1D(width, 4 * width),
            nn.GELU(approximate="tanh"),
        )

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class Gpt2(nn.Module):
    def __init__(self, width=16, heads=4, vocabulary=21):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(width),
            Gpt2Attention(width, heads),
            nn.LayerNorm(width),
            Gpt2Mlp(width),
        )

    def forward(self, input_ids):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]).unsqueeze(0))
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return F.linear(x, self.wte.weight)


class BertSelf(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = (
            heads,
            width // heads,
            width,
        )
        self.query, self.key, self.value = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, hidden_states, mask):
        def heads(x):
            return x.view(
                *x.size()[:-1], self.num_attention_heads, self.attention_head_size
            ).permute(0, 2, 1, 3)

        query, key, value = (
            heads(self.query(hidden_states)),
            heads(self.key(hidden_states)),
            heads(self.value(hidden_states)),
        )
        scores = (
            torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.attention_head_size) + mask
        )
        context = (
            torch.matmul(nn.functional.softmax(scores, dim=-1), value)
            .permute(0, 2, 1, 3)
            .contiguous()
        )
        return context.view((*context.size()[:-2], self.all_head_size))


class BertOutput(nn.Module):
    def __init__(self, inner, width):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inner, width), nn.LayerNorm(width)

    def forward(self, x, residual):
        return self.LayerNorm(self.dense(x) + residual)


class BertAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.self, self.output = BertSelf(width, heads), BertOutput(width, width)

    def forward(self, x, mask):
        return self.output(self.self(x, mask), x)


class BertLayer(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.attention = BertAttention(width, heads)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(width, 4 * width)
        self.output = BertOutput(4 * width, width)

    def forward(self, x):
        mask = torch.zeros(x.shape[0], 1, 1, x.shape[1], dtype=x.dtype)
        mask[..., -1] = -1e4
        x = self.attention(x, mask)
        return self.output(F.gelu(self.intermediate.dense(x)), x)


class Vit(nn.Module):
    """timm's attention: query, key and value by reshape and unbind; a Sequential MLP; a
    classification head."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, width)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7)

    def forward(self, x):
        B, N, C = x.shape
        qkv = (
            self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        )
        q, k, v = qkv.unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))
        return self.head(self.norm(x + self.mlp(x))[:, 0])


class Odd(nn.Module):
    """A block whose attribute names reveal nothing; uses torch's attention function."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.alpha, self.beta, self.gamma, self.delta = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second, self.third = (
            nn.Linear(width, 24),
            nn.Linear(width, 24),
            nn.Linear(24, width),
        )
        self.count = heads

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.count, -1)).transpose(1, 2)
            for layer in (self.alpha, self.beta, self.gamma)
        )
        x = x + self.delta(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.third(torch.sigmoid(self.first(x)) * self.second(x))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 8, mode="mean")
        self.top = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, ids):
        return self.top(self.bag(ids))


class EncoderDecoder(nn.Module):
    def __init__(self, dropout=0.0, batch_first=True, norm_first=False):
        super().__init__()
        options = {"dropout": dropout, "batch_first": batch_first, "norm_first": norm_first}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, **options), 1, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, **options), 1)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.decoder(x, self.encoder(x, mask=mask, is_causal=True), tgt_mask=mask)


def tokens():
    return torch.randint(0, 20, (2, 8), generator=torch.Generator().manual_seed(1))


def activations(width):
    return lambda: torch.randn(
        2, 8, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()


MODELS = {
    "mlp": (Mlp, activations(8)),
    "nano-gpt": (NanoGpt, tokens),
    "nano-gpt, attention spelled out": (lambda: NanoGpt(flash=False), tokens),
    "llama": (Llama, tokens),
    "llama, attention spelled out": (lambda: Llama(eager=True), tokens),
    "gpt-2": (Gpt2, tokens),
    "bert": (BertLayer, activations(16)),
    "vit": (Vit, activations(16)),
    "embedding bag": (Bag, tokens),
    "torch encoder and decoder": (EncoderDecoder, activations(16)),
    "torch encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.0, norm_first=True),
        activations(16),
    ),
}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Builds a model in float64, with the same values on each call, and an input."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    return make().double(), inputs()


class LlamaBlock(LlamaLayer):
    """A Llama layer without the norm of each head; the caller passes its positions."""

    def __init__(self):
        super().__init__(
            SimpleNamespace(
                hidden_size=32, num_attention_heads=8, num_key_value_heads=4, eager=False
            )
        )
        self.self_attn.q_norm = nn.Identity()

    def forward(self, x):
        angles = torch.arange(x.shape[1], dtype=x.dtype)[None, :, None] * torch.ones(
            4, dtype=x.dtype
        )
        return super().forward(x, (angles.cos(), angles.sin()), None)


class Gpt2Block(Gpt2):
    def __init__(self):
        super().__init__()
        del self.wte, self.wpe

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


BLOCKS = {
    "nanoGPT": (lambda: NanoBlock(16, 4, 0.0, True), 16),
    "nanoGPT, attention spelled out": (lambda: NanoBlock(16, 4, 0.0, False), 16),
    "llama": (LlamaBlock, 32),
    "gpt-2": (Gpt2Block, 16),
    "bert": (BertLayer, 16),
    "torch": (lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 16),
}
"""One transformer block of each model, and its width."""
