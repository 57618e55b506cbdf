"""How much of a draft is right: speculative decoding that leaves the output's distribution as it is.

Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2): a token x drafted from q is accepted with
probability min(1, p(x) / q(x)), where p is what the model itself would draw from; the first one refused is replaced
by a draw from max(p - q, 0), normalised.

A draft that was looked up has all of q on one token d. Then the rule reads: accept d with probability p(d), else draw
from p without d. That is the same as drawing from p and seeing whether d came, which is how it is done here: it takes
one random number for each token, so text and seed belong together, whether there was a draft or not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from diffserve.runtime.decoding.uniforms import Uniforms, draw


def matching(tokens: Sequence[int], draft: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """What is said when the model's own ``tokens`` (k + 1) are held against a looked-up ``draft`` (k).

    Its tokens up to and with the first that is not the draft's, or that ends the text.
    """
    said: list[int] = []
    for index, token_id in enumerate(tokens):
        said.append(token_id)
        if index == len(draft) or token_id != draft[index] or token_id in stop_ids:
            break
    return said


def accept_or_resample(
    probs: Tensor, draft: Sequence[int], draft_probs: Tensor, uniforms: Uniforms, stop_ids: Collection[int]
) -> list[int]:
    """What is said when ``draft`` (k) was drawn from ``draft_probs`` (k, V); the model has ``probs`` (k + 1, V)."""
    for index, token_id in enumerate(draft):
        p, q = probs[index], draft_probs[index].to(probs)
        if uniforms.take(1)[0] * float(q[token_id]) >= float(p[token_id]):
            return [*draft[:index], _resample(p, q, uniforms)]
        if token_id in stop_ids:
            return list(draft[: index + 1])
    return [*draft, *draw(probs[-1:], uniforms.take(1))]


def _resample(p: Tensor, q: Tensor, uniforms: Uniforms) -> int:
    rest = (p - q).clamp_min(0)  # (V,); all zero only when p and q differ by rounding alone
    weights = rest if bool(rest.any()) else p
    return draw(weights[None], uniforms.take(1))[0]
