"""Log-probabilities and entropies from hidden states, a few tokens at a time.

A [tokens, vocabulary] tensor of a batch is what runs out of memory first: 16k tokens of a 151k vocabulary are 10 GB a
copy, and softmax with its gradient wants several. Here only a chunk of it ever lives, in the forward pass and, computed
again, in the backward pass; and only tokens that carry loss are looked at. The mathematics is that of
`objective.token_logprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Logits that may live at once, in elements of float32: small on a CPU (cache), large on a GPU (launches).
_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}


class TokenScores(NamedTuple):
    """logprobs: log-probability (nats) of each target; entropy: of the distribution it was drawn from. [N] float32."""

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class HeadForm:
    """What a model does to the product of hidden states and output embedding, and what sampling does to the logits.

    logits = softcap * tanh(scale * product / softcap) / temperature, `banned` ids left out. scale: Cohere, Granite;
    softcap: Gemma (arXiv 2408.00118, section 2); None for none.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    banned: tuple[int, ...] = ()


def head_form(config, temperature: float, banned: tuple[int, ...]) -> HeadForm:
    """The form that a model's config states. `linear_head` tests whether that is all the model does."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return HeadForm(scale, getattr(config, "final_logit_softcapping", None), temperature, tuple(banned))


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens a chunk."""
    return max(64, _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cuda"]) // vocabulary)


def chunked_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    form: HeadForm,
    bans: Tensor | None = None,
    chunk: int | None = None,
) -> TokenScores:
    """Scores of targets [N] given hidden states [N, H] and an output embedding [V, H], differentiable in all three.

    bans: [N, B] ids to leave out at each token beside `form.banned`, filled up with -1. Both outputs carry gradients.
    Matrix products run in autocast's type where it is on, the rest in float32.
    """
    chunk = chunk or chunk_tokens(weight.shape[0], hidden.device)
    return TokenScores(*_ChunkedScores.apply(hidden, weight, bias, targets, bans, form, chunk))


class _ChunkedScores(torch.autograd.Function):
    """Saves hidden states and one number a token; logits are computed again in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, bans, form: HeadForm, chunk: int):
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        ctx.form, ctx.chunk = form, chunk
        wide = torch.promote_types(ctx.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        lse, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        with torch.autocast(kind, enabled=False):
            w = weight.to(ctx.dtype)
            for part in _parts(len(hidden), chunk):
                z, _ = _logits(hidden[part].to(ctx.dtype), w, bias, form, _cut(bans, part))
                lse[part] = z.logsumexp(dim=-1)
                logprobs[part] = z.gather(-1, targets[part, None])[:, 0] - lse[part]
                p = (z - lse[part, None]).exp_()
                entropy[part] = lse[part] - p.mul_(z).sum(dim=-1)  # -sum p (z - lse)
        ctx.save_for_backward(hidden, weight, bias, targets, bans, lse, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, bans, lse, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        form = ctx.form
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(ctx.dtype)
            for part in _parts(len(hidden), ctx.chunk):
                h = hidden[part].to(ctx.dtype)
                z, capped = _logits(h, w, bias, form, _cut(bans, part))
                grads = _cut(grad_logprobs, part), _cut(grad_entropy, part)
                g = _grad_logits(z, targets[part], lse[part], entropy[part], *grads)
                g.mul_(form.scale / form.temperature)
                if capped is not None:
                    g.mul_(1.0 - (capped / form.softcap) ** 2)
                if need_bias:
                    grad_bias += g.sum(dim=0)
                g = g.to(ctx.dtype)
                if need_hidden:
                    grad_hidden[part] = (g @ w).to(hidden.dtype)
                if need_weight:  # sums in float32: dozens of chunks would lose bits in bfloat16
                    if g.dtype == grad_weight.dtype:
                        grad_weight.addmm_(g.T, h)
                    else:
                        grad_weight += g.T @ h
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if need_weight else None,
            grad_bias.to(bias.dtype) if need_bias else None,
            *[None] * 4,
        )


def _parts(n: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, n)) for i in range(0, n, chunk)]


def _cut(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _logits(
    h: Tensor, w: Tensor, bias: Tensor | None, form: HeadForm, bans: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """[n, V] float32 logits, and, with a softcap, the capped values before temperature (its derivative needs them)."""
    z = _at_least_float32(h @ w.T)
    if bias is not None:
        z += bias
    if form.scale != 1.0:
        z *= form.scale
    capped = None
    if form.softcap is not None:
        z = (z / form.softcap).tanh_().mul_(form.softcap)
        capped = z
    if form.temperature != 1.0:
        z = z / form.temperature
    return without(z, form.banned, bans), capped


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without(logits: Tensor, banned: tuple[int, ...], bans: Tensor | None) -> Tensor:
    """Logits [n, V] with ids that cannot be drawn at a probability of 0: `banned` at every token, bans [n, B] at each.

    They become low but finite, so that p * log p and its gradient are 0 for them and not NaN.
    """
    never = -1e30
    if banned:
        logits = logits.index_fill(-1, torch.tensor(banned, device=logits.device), never)
    if bans is not None:
        token, slot = (bans >= 0).nonzero(as_tuple=True)
        logits = logits.index_put((token, bans[token, slot]), logits.new_tensor(never))
    return logits


def _grad_logits(
    z: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """d loss / d z. logp: onehot - p; entropy H: -p (log p + H)."""
    logp = z - lse[:, None]
    p = logp.exp()
    g = (
        torch.zeros_like(p)
        if grad_entropy is None
        else logp.add_(entropy[:, None]).mul_(p).mul_(-grad_entropy[:, None])
    )
    if grad_logprobs is not None:
        g.sub_(p.mul_(grad_logprobs[:, None]))
        g.scatter_add_(-1, targets[:, None], grad_logprobs[:, None].to(g.dtype))
    return g


def logit_scores(
    logits: Tensor, targets: Tensor, temperature: float, banned: tuple[int, ...], bans: Tensor | None = None
) -> TokenScores:
    """The same from logits [N, V] that are there already; both outputs carry gradients."""
    z = without(_at_least_float32(logits) / temperature, banned, bans)
    logp = torch.log_softmax(z, dim=-1)
    return TokenScores(logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1))


# --------------------------------------------------------------------------- on a model


def attach_scores(model: nn.Module) -> None:
    """Give a causal LM the method `token_scores`. Call `share_scores` after FSDP2 has sharded it."""
    model.token_scores = MethodType(_token_scores, model)


def share_scores(model: nn.Module) -> None:
    """Let FSDP2 gather the parameters of the root around `token_scores`, as it does around `forward`."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(model, "token_scores")


def _token_scores(
    self: nn.Module,
    source: Tensor,
    targets: Tensor,
    temperature: float,
    banned: tuple[int, ...],
    bans: Tensor | None,
    linear: bool,
    **inputs,
) -> TokenScores:
    """Scores of targets [N], read at indices `source` [N] of a forward pass of one row; bans as in `chunked_scores`.

    linear=False takes the model's own logits, all N at once: for heads that `HeadForm` does not describe.
    """
    if not linear:
        logits = self.forward(**inputs, logits_to_keep=source).logits[0]
        return logit_scores(logits, targets, temperature, banned, bans)
    hidden = self.get_decoder()(**inputs).last_hidden_state[0].index_select(0, source)
    head = self.get_output_embeddings()
    return chunked_scores(hidden, head.weight, head.bias, targets, head_form(self.config, temperature, banned), bans)


@torch.no_grad()
def linear_head(model: nn.Module) -> bool:
    """Whether logits are `HeadForm` of the decoder's last hidden states: looked at, then tried on three tokens.

    Run it on a model as loaded: on the CPU, and not sharded.
    """
    head = model.get_output_embeddings()
    if head is None or type(head).forward is not nn.Linear.forward or getattr(model, "get_decoder", None) is None:
        return False
    kept: list[Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda m, args, out: kept.append(out[0]))
    kind, training = model.config._attn_implementation, model.training
    model.config._attn_implementation_internal = "eager"  # flash and flex need a GPU
    try:
        ids = torch.arange(3, device=head.weight.device)[None]
        logits = model.eval()(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        model.config._attn_implementation_internal = kind
        model.train(training)
        hook.remove()
    ours, _ = _logits(kept[-1][0], head.weight, head.bias, head_form(model.config, 1.0, ()))
    return bool((logits - ours).abs().max() <= 0.02 * logits.abs().max())


@torch.no_grad()
def linear_scores(model: nn.Module, device: torch.device | str) -> bool:
    """`linear_head` of a sharded model: both ways to score three tokens agree. Collective over ranks.

    device: where it computes.
    """
    head = model.get_output_embeddings()
    if head is None or type(head).forward is not nn.Linear.forward or getattr(model, "get_decoder", None) is None:
        return False
    kind, training = model.config._attn_implementation, model.training
    model.config._attn_implementation_internal = "eager"
    try:
        ids = torch.arange(3, device=device)
        inputs = {"input_ids": ids[None], "use_cache": False}
        model.eval()
        ours, theirs = (model.token_scores(ids, ids, 1.0, (), None, linear, **inputs) for linear in (True, False))
    finally:
        model.config._attn_implementation_internal = kind
        model.train(training)
    return all(
        bool((a - b).abs().max() <= 0.02 * b.abs().max().clamp(min=1.0)) for a, b in zip(ours, theirs, strict=True)
    )
