"""sampling: the log-probs that a rollout needs, and the draw of the next tokens.

transformers' own step returns the log-prob of the *processed* distribution (after temperature, top-k and top-p) and draws every
request from one generator of the process, for every row of the batch, prompt rows included. A trainer's gap to the rollout is
measured on raw log-probs (`logprobs_mode="raw_logprobs"`, vLLM's default), and a seeded sample must be the same whatever shares
its batch. So the last method of the step, `_sample`, is replaced: it reads the float32 logits that the engine hands it, takes
log-softmax of the rows that are sampled from, and draws each with its request's generator.

n rows that are sampled from, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner

from r3.rollout.transformers.params import Params
from r3.rollout.transformers.requests import Run


class RawLogprobsRunner(ModelRunner):  # type: ignore[misc]
    """transformers' model runner with that one method replaced; no logits processor is configured, so logits come raw."""

    def _sample(self, scores: torch.Tensor, logits_indices: torch.Tensor, output_ids: torch.Tensor) -> None:
        runs = [each.state.run for each in self.inputs_and_outputs.requests_in_batch if each.has_new_token]
        if not runs:
            return
        n = len(runs)
        logits = scores[0].index_select(0, logits_indices[:n])  # [n, V] float32
        logprobs = logits.log_softmax(-1)
        tokens = draw(logits, [run.params for run in runs], [run.generator for run in runs])
        _note_top(logprobs, runs)
        output_ids[0, :n].copy_(tokens)
        # The engine's own way to carry floats in its int32 output: the bits.
        output_ids[1, :n].copy_(logprobs.gather(1, tokens[:, None])[:, 0].contiguous().view(torch.int32))


def draw(logits: torch.Tensor, params: Sequence[Params], generators: Sequence[torch.Generator]) -> torch.Tensor:
    """One token a row.

    Temperature, then top-k, then top-p on what is left, as vLLM orders them. The draw is by exponential race (argmax of p / e
    with e ~ Exp(1)): one call of the request's generator for each token, so that it depends on nothing else in the batch.

    Args:
        logits: [n, V] float32.

    Returns:
        [n] int64.
    """
    tokens = logits.argmax(-1)
    drawn = [i for i, each in enumerate(params) if each.temperature > 0]
    if not drawn:
        return tokens
    rows = torch.tensor(drawn, device=logits.device)
    chosen = [params[i] for i in drawn]
    probabilities = warped(logits.index_select(0, rows), chosen).softmax(-1)
    race = torch.empty_like(probabilities)
    for row, i in enumerate(drawn):
        race[row].exponential_(generator=generators[i])
    return tokens.index_copy(0, rows, (probabilities / race).argmax(-1))


def warped(logits: torch.Tensor, params: Sequence[Params]) -> torch.Tensor:
    """[n, V] logits over the temperature, -inf outside of top-k and top-p. Ties with the k-th largest are kept."""
    # From the largest down, so that a temperature near 0 gives 0 and -inf, and not inf for every token that is likely.
    temperatures = logits.new_tensor([each.temperature for each in params]).clamp_min(1e-30)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]
    width = logits.shape[-1]
    if any(0 < each.top_k < width for each in params):
        ks = torch.tensor([min(each.top_k, width) if each.top_k else width for each in params], device=logits.device)
        kth = logits.sort(-1, descending=True).values.gather(1, (ks - 1)[:, None])
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if any(each.top_p < 1 for each in params):
        ascending, order = logits.sort(-1)
        below = ascending.softmax(-1).cumsum(-1) <= 1 - logits.new_tensor([each.top_p for each in params])[:, None]
        below[:, -1] = False  # the most likely token always stays
        logits = logits.masked_fill(below.scatter(1, order, below), -torch.inf)
    return logits


def _note_top(logprobs: torch.Tensor, runs: Sequence[Run]) -> None:
    wanted = max(run.params.top_logprobs for run in runs)
    if not wanted:
        return
    values, ids = (each.tolist() for each in logprobs.topk(min(wanted, logprobs.shape[-1])))
    for run, value, token in zip(runs, values, ids, strict=True):
        count = run.params.top_logprobs
        if count:
            run.top.append(list(zip(token[:count], value[:count], strict=True)))
