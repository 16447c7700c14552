"""Which models, on which meshes, must come out as on one device? The zoo, our reference models, and four plans."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from zoo import IGNORED, ZOO, Case

from megalith.models.gpt import GPT, GPTConfig
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding.recipes import data_parallel, specs_for, tensor_parallel, zero

# --- the reference models as cases of the zoo ----------------------------------------------------------------


def seeded(make):
    def build():
        torch.manual_seed(0)
        model = make().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.15)
        return model

    return build


def tokens(vocab=64, batch=4, seq=16):
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(vocab, (batch, seq + 1), generator=generator)
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}


def next_token_loss(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


TINY = dict(vocab=64, dim=32, n_layers=2, n_heads=4)
LLAMA = Case("our_llama", seeded(lambda: Llama(LlamaConfig(**TINY, hidden=64, n_kv_heads=4))), tokens, next_token_loss)
GROUPED = Case(
    "our_llama_gqa",
    seeded(lambda: Llama(LlamaConfig(**TINY, hidden=64, n_kv_heads=2))),
    tokens,
    next_token_loss,
)
TIED = Case(
    "our_llama_tied",
    seeded(lambda: Llama(LlamaConfig(**TINY, hidden=64, n_kv_heads=4, tied=True))),
    tokens,
    next_token_loss,
)
OUR_GPT = Case("our_gpt", seeded(lambda: GPT(GPTConfig(**TINY, positions=16))), tokens, next_token_loss)
CASES = {**ZOO, **{case.name: case for case in (LLAMA, GROUPED, TIED, OUR_GPT)}}


# --- plans ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A mesh and what is split over it."""

    mesh: str
    stored: bool = False  # parameters at rest split over dp too

    def specs(self, params, batch):
        recipes = [data_parallel()] if "dp" in self.mesh else []
        recipes += [tensor_parallel()] if "tp" in self.mesh else []
        return specs_for(params, batch, *recipes, *([zero(3)] if self.stored else []))


PLANS = {
    "dp2_tp2": Plan("dp=2 tp=2"),
    "tp4": Plan("tp=4"),
    "dp4": Plan("dp=4"),
    "stored_dp2_tp2": Plan("dp=2 tp=2", stored=True),
}


class Bound:
    """A pure function of parameters that looks like its module."""

    def __init__(self, fn, params):
        self.fn, self.params = fn, params

    def parameters(self):
        return iter(self.params.values())

    def __call__(self, *args, **kwargs):
        return self.fn(self.params, *args, **kwargs)


def error(mine, theirs, least=0.0):
    """The largest difference, relative to the largest element (at least `least`)."""
    return ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=least or 1e-300)).item()
