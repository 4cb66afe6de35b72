"""Names and values of verl's settings beside those of this project, for tools/from_verl.py."""

import re

ALGORITHMS: dict[str, tuple[str, str | None]] = {
    "gae": ("ppo", None),
    "grpo": ("grpo", None),
    "grpo_vectorized": ("grpo", None),
    "grpo_passk": ("grpo", "grpo-passk"),
    "rloo": ("rloo", None),
    "rloo_vectorized": ("rloo", None),
    "reinforce_plus_plus": ("reinforce_pp", None),
    "reinforce_plus_plus_baseline": ("grpo", "reinforce++-baseline"),
    "remax": ("remax", None),
    "opo": ("grpo", "opo"),
    "gpg": ("grpo", "gpg"),
    "gdpo": ("grpo", "gdpo"),
    "optimal_token_baseline": ("grpo", "optimal-token-baseline"),
}
"""algorithm.adv_estimator -> algorithm, and objective.advantage if it is not the algorithm's own."""

LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip-cov",
    "kl_cov": "kl-cov",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "dppo_tv": "dppo-tv",
    "dppo_kl": "dppo-kl",
}
"""actor.policy_loss.loss_mode -> objective.loss."""

AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
}
"""actor.loss_agg_mode -> objective.aggregation."""

KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
"""actor.kl_loss_type without "+", or algorithm.kl_penalty -> estimator."""

REPLAY = {"disabled": "none", "R2": "old_policy", "R3": "engine"}
"""actor.router_replay.mode -> training.router_replay."""

WEIGHTS = {"token": "truncate_tokens", "sequence": "truncate_samples"}
"""algorithm.rollout_correction.rollout_is -> key of rollout_correction."""

SOURCES = {
    "openai/gsm8k": "rl.rewards.gsm8k:score",
    "math_dapo": "rl.rewards.dapo:score",
    "math": "rl.rewards.dapo:score",
    "codecontests": "rl.rewards.code:score",
    "apps": "rl.rewards.code:score",
    "codeforces": "rl.rewards.code:score",
    "taco": "rl.rewards.code:score",
}
"""Reward functions by data_source that verl chooses itself; for others rl.rewards.math:score."""

OFF = (None, False, "", [], {}, "none", "None", "null")
"""Values of settings that are switched off."""

NOT_NEEDED = {
    r"(_target_|use_legacy_worker_impl|hybrid_engine|ray_|transfer_queue|\.strategy$|trainer\.device)": (
        "there is no Ray, and one kind of worker"
    ),
    r"(use_remove_padding|use_dynamic_bsz|log_prob_.*|forward_max_token_len_per_gpu|micro_batch_size.*)$": (
        "sequences are always packed, and all passes of a step use training.micro_batch_tokens"
    ),
    r"(param|grad|optimizer)_offload$": "training.offload=auto moves state to the host during generation",
    r"^critic\.(model\.(use_remove_padding|enable_gradient|fsdp)|megatron|ppo_|optim|strategy)": (
        "the critic has the grid, micro-batches and recomputation of the policy"
    ),
    r"^actor_rollout_ref\.ref\.": "the reference policy has the grid of the policy",
    r"(fsdp_config|fsdp_size|forward_prefetch|reshard_after_forward|wrap_policy)": "Megatron replaces FSDP",
    r"(enable_chunked_prefill|enable_prefix_caching|free_cache_engine|max_num_batched_tokens|load_format)$": (
        "vLLM's chunked prefill and prefix cache are on, and its memory is free during training"
    ),
    r"rollout\.(mode|name|dtype|max_model_len|disable_log_stats|skip_tokenizer_init|calculate_log_probs)$": (
        "the engine is in the process of the trainer, and always returns log-probs"
    ),
    r"(use_fused_kernels|fused_kernel_options|use_liger|use_torch_compile|entropy_from_logits)": (
        "log-probs and entropy are computed in chunks, by a fused kernel on CUDA"
    ),
    r"(use_mbridge|vanilla_mbridge|use_dist_checkpointing|dist_checkpointing|use_distributed_optimizer)": (
        "Hugging Face weights are read directly, and checkpoints are sharded"
    ),
    r"override_transformer_config\.(attention_backend|num_layers_in|account_for|recompute_|apply_|moe_)": (
        "the layer specification follows from config.json; pipeline stages may differ by one layer"
    ),
    r"recompute_(method|num_layers|modules)$": "training.recompute recomputes every layer",
    r"(balance_batch|balance_dp)$": "samples are always balanced over data parallel ranks",
    r"^trainer\.(project_name|n_gpus_per_node|nnodes|default_hdfs_dir|ray_wait.*|del_local_ckpt.*)$": (
        "runs are named by run.name, and the launcher gives the number of ranks"
    ),
    r"checkpoint\.(save_contents|load_contents)": "a checkpoint always has all that an exact resume needs",
    r"data\.(return_.*|filter_overlong_prompts_w|dataloader_num|reward_fn_key|gen_batch)": (
        "the data is read once, with data_source for the choice of the reward function"
    ),
    r"(nccl_timeout|update_weights_bucket|checkpoint_engine)": "watchdog.limits and refit.buffer_mib",
    r"(algorithm\.(gamma|lam)|rollout_correction\.loss_type)$": "the algorithm's own loss and advantage",
    r"trust_remote_code$": "models are built from config.json without remote code",
}
"""Pattern of a setting -> why this project does without it."""

MISSING = {
    r"virtual_pipeline_model_parallel_size": "interleaved pipeline stages are not supported",
    r"lora": "see the section adapter (docs/adapters.md)",
    r"(multi_turn|tool_config_path|interaction_config|agent)": "see agents.* (docs/agents.md)",
    r"val_kwargs": "validation samples with the rollout's top_p and top_k",
    r"override_config": "edit the model's config.json",
    r"(wandb|mlflow|swanlab|log_val_generations|rollout_data_dir)": "see logging.rollouts",
    r"(image|video|multi_modal|freeze_vision)": "vision models are not supported",
    r"resume_from_path": "verl's checkpoints cannot be read; export one to Hugging Face as model.path",
    r"(profiler|trace)": "see the section trace (docs/traces.md)",
    r"prometheus": "not offered",
    r"(quantization|fp8)": "see docs/models.md",
    r"rollout_is_batch_normalize": "weights are not normalised over the batch",
    r"rollout_rs: ": "a bound on a sum or a maximum rejects long samples for their length",
    r"rollout_correction\.rollout_(is|rs)": "rollout_correction.bypass neither weighs nor rejects",
    r"mtp": "heads for several tokens are not trained",
    r"sandbox_fusion": "rl.rewards.code runs programs in its own sandbox on the nodes",
    r"(over_sample_rate|pf_ppo|use_prefix_grouper)": "see rollout.carry_over, and training.shared_prefix",
}
"""Pattern of a setting -> what to do about it."""


def reason(key: str, table: dict[str, str]) -> str:
    """Return the text of the first pattern that occurs in a key, else ""."""
    return next((text for pattern, text in table.items() if re.search(pattern, key)), "")
