"""Where does real text come from without a download, and how is it cut into batches and sampled again?"""

from collections.abc import Callable, Iterator
from importlib import import_module
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor


def documentation() -> str:
    """The text of Python's own documentation topics, about half a million characters, in sorted order of topic.

    Raises ModuleNotFoundError where the Python distribution left `pydoc_data` out.
    """
    topics = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def train_tokenizer(text: str, vocab: int = 2048) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab` tokens; its alphabet is all 256 bytes, so nothing is unknown.

    Example:
        >>> tokenizer = train_tokenizer("low lower lowest " * 9, vocab=262)
        >>> tokenizer.decode(tokenizer.encode("a slow λ").ids)
        'a slow λ'
    """
    if vocab < 256:
        raise ValueError(f"vocab={vocab} cannot hold the 256 bytes; give at least 256")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    # Split on lines: one huge string would be a single unit of work for the trainer.
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def encode(text: str, tokenizer: Tokenizer | None = None) -> Tensor:
    """Token ids [n], int64; without a tokenizer the ids are the UTF-8 bytes."""
    if tokenizer is None:
        return torch.tensor(list(text.encode()), dtype=torch.long)
    return torch.tensor(tokenizer.encode(text).ids, dtype=torch.long)


def decode(ids: Tensor, tokenizer: Tokenizer | None = None) -> str:
    """The text of token ids [n]; bytes that are no UTF-8 become U+FFFD."""
    if tokenizer is None:
        return bytes(ids.tolist()).decode(errors="replace")
    return tokenizer.decode(ids.tolist())


def batch_at(tokens: Tensor, batch: int, seq: int, seed: int, step: int) -> dict[str, Tensor]:
    """The global batch of one step: random windows of `tokens`, a pure function of (seed, step).

    Args:
        tokens: ids [n], n > seq.

    Returns:
        `input_ids` and `labels`, both [batch, seq] int64; `labels` is `input_ids` shifted by one.
    """
    if len(tokens) <= seq:
        raise ValueError(f"a window of seq={seq} and its label need {seq + 1} tokens, tokens has {len(tokens)}")
    uniform = Random(f"{seed} {step}").random  # Python promises this stream on every platform and release
    starts = torch.tensor([int(uniform() * (len(tokens) - seq)) for _ in range(batch)])  # [batch]
    windows = tokens[starts[:, None] + torch.arange(seq + 1)].long()  # [batch, seq + 1]
    return {"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


def batches(tokens: Tensor, batch: int, seq: int, seed: int = 0, start: int = 0) -> Iterator[dict[str, Tensor]]:
    """Endless global batches from step `start` on; the same on any number of processes, and after a resume."""
    step = start
    while True:
        yield batch_at(tokens, batch, seq, seed, step)
        step += 1


def generate(
    logits_fn: Callable[[Tensor], Tensor],
    prompt_ids: Tensor,
    n: int,
    temperature: float = 1.0,
    seed: int = 0,
    window: int = 128,
) -> Tensor:
    """Continues a prompt by n sampled tokens, the whole window computed again for each.

    Every call of `logits_fn` has the same shape, so a traced function is traced once.

    Args:
        logits_fn: token ids [1, window] -> logits [1, window, vocab], causal.
        prompt_ids: ids [p], p >= 1; only the last `window` matter.
        temperature: 0 is greedy.

    Returns:
        ids [p + n]
    """
    if len(prompt_ids) == 0:
        raise ValueError("prompt_ids is empty; give at least one token")
    generator = torch.Generator().manual_seed(seed)
    ids = prompt_ids.long()
    for _ in range(n):
        context = ids[-window:]
        # Causal: the padding on the right cannot reach the position that is read.
        padded = torch.cat([context, context.new_zeros(window - len(context))])
        with torch.no_grad():
            logits = logits_fn(padded[None])[0, len(context) - 1].float().cpu()  # [vocab]
        if temperature == 0:
            token = logits.argmax(keepdim=True)
        else:
            token = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        ids = torch.cat([ids, token.to(ids.device)])
    return ids
