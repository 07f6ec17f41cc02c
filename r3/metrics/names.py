"""What other projects call these metrics, and what differs. docs/kl-diagnostic.md shows this table; a test runs veRL's own code.

Each entry: ours -> (project, their name, note). Read in veRL 0.9.1 (`verl/trainer/ppo/rollout_corr_helper.py`,
`verl/utils/debug/metrics.py`), slime (`slime/backends/megatron_utils/loss.py`), miles (`training_utils/loss_hub/losses.py`), NeMo
RL (`nemo_rl/algorithms/loss_functions.py`), prime-rl and AReaL.
"""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    """A metric's name elsewhere.

    Attributes:
        ours: Attribute of GapMetrics or SequenceMetrics.
        project, theirs: `verl`, `rollout_corr/kl`.
        note: What differs; "" where nothing does.
    """

    ours: str
    project: str
    theirs: str
    note: str = ""


NAMES = (
    Name("k1", "verl", "rollout_corr/kl"),
    Name("k3", "verl", "rollout_corr/k3_kl"),
    Name("k3", "prime-rl", "mismatch_kl", "current trainer against older rollout weights: staleness is in it"),
    Name("k3", "NeMo RL", "gen_kl_error"),
    Name("k3", "AReaL", "rollout_train_k3_kl", "labelled KL(train || rollout), which rollout samples do not estimate"),
    Name("k3", "miles", "train_rollout_kl", "log-ratio clamped at 10"),
    Name("k3_reverse", "NeMo RL", "policy_kl_error"),
    Name(
        "mean_abs",
        "slime, miles, vime",
        "train_rollout_logprob_abs_diff",
        "mean over samples of means, if so configured",
    ),
    Name("mult_prob", "NeMo RL", "token_mult_prob_error"),
    Name("js", "NeMo RL", "js_divergence_error"),
    Name("prob_diff_mean", "verl", "training/rollout_probs_diff_mean"),
    Name("prob_diff_max", "verl", "training/rollout_probs_diff_max"),
    Name("prob_diff_std", "verl", "training/rollout_probs_diff_std"),
    Name("pearson", "verl", "training/rollout_actor_probs_pearson_corr"),
    Name("mean_ratio", "verl", "rollout_corr/rollout_is_mean", "theirs after truncation at the threshold"),
    Name("chi2_token", "verl", "rollout_corr/chi2_token"),
    Name("ess", "verl", "rollout_corr/rollout_is_eff_sample_size", "theirs after truncation at the threshold"),
    Name("ess", "miles", "ess_ratio"),
    Name("chi2_seq", "verl", "rollout_corr/chi2_seq"),
    Name("training_ppl", "verl", "rollout_corr/training_ppl"),
    Name("rollout_ppl", "verl", "rollout_corr/rollout_ppl"),
    Name("training_log_ppl", "verl", "rollout_corr/training_log_ppl"),
    Name("rollout_log_ppl", "verl", "rollout_corr/rollout_log_ppl"),
    Name("k1_mean[mean]", "verl", "rollout_corr/log_ppl_diff"),
    Name("k1_mean[max]", "verl", "rollout_corr/log_ppl_diff_max"),
    Name("k1_mean[min]", "verl", "rollout_corr/log_ppl_diff_min"),
    Name("log_ppl_abs_diff", "verl", "rollout_corr/log_ppl_abs_diff"),
    Name("ppl_ratio", "verl", "rollout_corr/ppl_ratio"),
    Name("unchanged", "PR2 (arXiv 2606.00395)", "zero-deviation share"),
)
