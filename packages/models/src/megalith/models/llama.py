"""What does a Llama look like as a plain single-device program?

Parameter names are those of Hugging Face's `LlamaForCausalLM`, so its state dict loads as it is.
Letters in comments: b batch, s sequence, e embedding, h heads, k key-value heads, d head, f feed-forward, v vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    vocab: int = 2048
    dim: int = 256
    hidden: int = 704
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.dim % self.n_heads or self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads must divide dim, and n_kv_heads must divide n_heads; "
                f"got dim={self.dim}, n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


def rope(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [s, d] of the rotary angles at integer positions [s], float32 (Su et al., arXiv:2104.09864)."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim  # [d/2]
    angles = positions.float()[:, None] * (1.0 / theta**exponent)  # [s, d/2]
    angles = torch.cat([angles, angles], dim=-1)  # [s, d]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [b, h, s, d]; dims i and i + d/2 are a pair."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention: n_heads / n_kv_heads query heads share a key-value head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)  # (h d) e
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)  # (k d) e
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)  # (k d) e
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)  # e (h d)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            rearrange(proj(x), "b s (h d) -> b h s d", d=self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(rearrange(y, "b h s d -> b s (h d)"))


class MLP(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)  # f e
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)  # f e
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)  # e f

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Logits [b, s, v] of token ids [b, s].

    Example:
        >>> model = Llama(LlamaConfig(vocab=64, dim=32, hidden=64, n_layers=1))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        embed_tokens = nn.Embedding(config.vocab, config.dim)  # v e
        self.model = nn.ModuleDict(
            dict(
                embed_tokens=embed_tokens,
                layers=nn.ModuleList(Block(config) for _ in range(config.n_layers)),
                norm=nn.RMSNorm(config.dim, config.norm_eps),
            )
        )
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)  # v e
        if config.tied:
            self.lm_head.weight = embed_tokens.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:  # the norms' weights stay 1
                nn.init.normal_(parameter, std=config.init_std)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(input_ids)  # b s -> b s e
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        cos, sin = rope(positions, self.config.head_dim, self.config.rope_theta)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))  # b s e -> b s v
