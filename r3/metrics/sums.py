"""Every metric is a function of per-token sums, kept by sequence: one row of 27 numbers per sequence and pass.

That row is all that the means, their confidence intervals and the sequence-level metrics need, so memory grows with the
number of sequences (216 B each) and not with that of tokens, ranks merge by stacking rows, and a bootstrap over sequences is one
matrix product: weights [B, S] @ rows [S, C], then `metrics_of` on [B, C].

S sequences, C columns, B resamples.
"""

from __future__ import annotations

import numpy as np

from r3.metrics.definitions import CLAMP, TAUS, Float, js_terms, k3_terms

_EXCEED = tuple(f"exceed_{tau:g}" for tau in TAUS)
COLUMNS = (
    *("tokens", "k1", "k2", "k3", "k3_reverse", "mean_abs", *_EXCEED, "unchanged"),
    *("ratio", "ratio_squared", "mult_prob", "js", "prob_diff", "prob_diff_squared"),
    *("train_logprob", "rollout_logprob", "p_train", "p_rollout", "p_train_squared", "p_rollout_squared", "p_product"),
    "sequences",
)
INDEX = {name: i for i, name in enumerate(COLUMNS)}
_MEANS = (*("k1", "k2", "k3", "k3_reverse", "mean_abs", *_EXCEED, "unchanged", "mult_prob", "js", "prob_diff"),)
# Metrics of single sequences, averaged over sequences.
SEQUENCE_MEANS = (
    *("sequence_k1_sum", "sequence_k1_mean", "sequence_k3_mean", "training_log_ppl", "rollout_log_ppl"),
    *("training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_abs_diff", "chi2_seq"),
)


def token_sums(train_logprobs: Float, rollout_logprobs: Float, d: Float) -> Float:
    """The row [C] of one sequence of n tokens, from [n] float64 vectors."""
    absolute = np.abs(d)
    ratio = np.exp(np.clip(d, -CLAMP, CLAMP))
    p_train, p_rollout = np.exp(train_logprobs), np.exp(rollout_logprobs)
    probability = np.abs(p_train - p_rollout)
    with np.errstate(
        over="ignore"
    ):  # the reverse k3 of a token that the trainer finds impossible is inf, and is shown so
        reverse = k3_terms(-d).sum()
    return np.array(
        [
            *(d.size, -d.sum(), (d @ d) / 2, k3_terms(d).sum(), reverse, absolute.sum()),
            *((absolute > np.log(tau)).sum() for tau in TAUS),
            *((d == 0).sum(), ratio.sum(), ratio @ ratio, np.exp(np.minimum(absolute, 700)).sum(), js_terms(d).sum()),
            *(probability.sum(), probability @ probability, train_logprobs.sum(), rollout_logprobs.sum()),
            *(p_train.sum(), p_rollout.sum(), p_train @ p_train, p_rollout @ p_rollout, p_train @ p_rollout),
            1.0,
        ],
        np.float64,
    )


def sequence_values(rows: Float) -> Float:
    """SEQUENCE_MEANS of each sequence [S, len(SEQUENCE_MEANS)], from rows [S, C] of sequences that have tokens."""
    column = {name: rows[:, i] for name, i in INDEX.items()}
    n = column["tokens"]
    total, train, rollout = column["k1"], -column["train_logprob"] / n, -column["rollout_logprob"] / n
    return np.stack(
        [
            *(total, total / n, column["k3"] / n, train, rollout, np.exp(train), np.exp(rollout)),
            *(np.exp(train - rollout), np.abs(train - rollout), np.expm1(2 * np.clip(-total, -CLAMP, CLAMP))),
        ],
        axis=1,
    )


def metrics_of(sums: Float) -> dict[str, Float]:
    """All metrics by name, from column sums [..., C + len(SEQUENCE_MEANS)]; each of shape [...].

    `k1` to `prob_diff` are means over tokens. `mean_ratio` is 1 where both sides are normalised and the rollout's
    log-probs are those of the policy that sampled. `ess` is a share of the tokens. `pearson` is of probabilities.
    """
    column = {name: sums[..., i] for name, i in INDEX.items()}
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        n = column["tokens"]
        out = {name: column[name] / n for name in _MEANS}
        out["mean_ratio"] = column["ratio"] / n
        out["chi2_token"] = column["ratio_squared"] / n - 1
        out["ess"] = column["ratio"] ** 2 / column["ratio_squared"] / n
        variance = column["prob_diff_squared"] / n - out["prob_diff"] ** 2
        out["prob_diff_std"] = np.sqrt(np.maximum(variance, 0) * n / np.maximum(n - 1, 1))  # unbiased, as torch.std
        x, y = column["p_train"] / n, column["p_rollout"] / n
        spread = (column["p_train_squared"] / n - x * x) * (column["p_rollout_squared"] / n - y * y)
        out["pearson"] = (column["p_product"] / n - x * y) / np.sqrt(np.maximum(spread, 0))
        for i, name in enumerate(SEQUENCE_MEANS):
            out[name] = sums[..., len(COLUMNS) + i] / column["sequences"]
    return out


METRICS = tuple(metrics_of(np.ones(len(COLUMNS) + len(SEQUENCE_MEANS))))


class SequenceRows:
    """Rows [S, C] that grow, one per sequence."""

    def __init__(self) -> None:
        self._rows: list[Float] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Float) -> None:
        self._rows.append(row)

    def merge(self, other: SequenceRows) -> None:
        self._rows += other._rows

    def array(self) -> Float:
        """[S, C]."""
        return np.array(self._rows, np.float64).reshape(-1, len(COLUMNS))


def with_sequence_values(rows: Float) -> Float:
    """[S, C + len(SEQUENCE_MEANS)]: what `metrics_of` reads once it is summed over sequences."""
    return np.concatenate([rows, sequence_values(rows)], axis=1)
