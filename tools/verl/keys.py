"""Names and values of verl's settings beside this project's."""

import re
from typing import Any

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
    "dro": "dro",
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

FILTRATIONS = {"pow": "power", "max_min": "best-worst", "max_random": "best-random"}
"""algorithm.pf_ppo.reweight_method -> objective.filtration."""

REPLAY = {"disabled": "none", "R2": "old_policy", "R3": "engine"}
"""actor.router_replay.mode -> training.router_replay."""

WEIGHTS = {"token": "truncate_tokens", "sequence": "truncate_samples"}
"""algorithm.rollout_correction.rollout_is -> key of rollout_correction."""

MATH_DAPO = ("math_dapo", "math_dapo_reasoning", "math", "aime", "aime24", "aime25", "aime2024", "aime2025")
CODE = ("codecontests", "apps", "codeforces", "taco")
SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SOURCES: dict[str, list[dict[str, Any]]] = {
    "openai/gsm8k": [{"function": "rl.rewards.gsm8k:score"}],
    **{name: [{"function": "rl.rewards.dapo:score"}] for name in (*MATH_DAPO, "aime_2024", "aime_2025")},
    **{name: [{"function": "rl.rewards.code:score"}] for name in CODE},
    **{f"searchR1_{name}": [{"function": "rl.rewards.qa:score"}] for name in SEARCH},
    "hiyouga/geometry3k": [
        {"function": "rl.rewards.math:score", "weight": 0.9},
        {
            "function": "rl.rewards.format:score",
            "weight": 0.1,
            "kwargs": {"pattern": r"<think>.*</think>.*\\boxed\{.*\}.*"},
        },
    ],
}
"""Reward functions by data_source that verl chooses itself; for others rl.rewards.math:score."""
MANAGERS = ("naive", "batch", "prime", "dapo", "gdpo", "remote")
"""Reward managers of verl; all of them call its reward functions by data_source."""

RENAMED = {
    r"^reward\.custom_reward_function\.": "custom_reward_function.",
    r"^reward\.reward_kwargs\.": "reward_model.reward_kwargs.",
    r"^reward\.reward_manager\.name$": "reward_model.reward_manager",
    r"^reward\.reward_model\.model_path$": "reward_model.model.path",
    r"^reward\.reward_model\.": "reward_model.",
    r"\.actor\.(megatron|veomni|fsdp_config)\.router_replay\.": ".actor.router_replay.",
    r"\.actor\.policy_loss\.tau_(pos|neg)$": r".actor.tau_\1",
    r"\.(fsdp_config|veomni)\.ulysses_(sequence_)?parallel_size$": ".ulysses_sequence_parallel_size",
    r"^engine\.ulysses_sequence_parallel_size$": "ulysses_sequence_parallel_size",
    r"\bengine\.tp(_size)?$": "megatron.tensor_model_parallel_size",
    r"\bengine\.pp(_size)?$": "megatron.pipeline_model_parallel_size",
    r"\bengine\.vpp$": "megatron.virtual_pipeline_model_parallel_size",
    r"\bengine\.cp(_size)?$": "megatron.context_parallel_size",
    r"\bengine\.ep(_size)?$": "megatron.expert_model_parallel_size",
    r"\bengine\.etp$": "megatron.expert_tensor_parallel_size",
    r"^engine\.(\w+_parallel_size|sequence_parallel|override_transformer_config)": r"megatron.\1",
    r"\.lora\.(rank|alpha|adapter_path|target_modules|exclude_modules)$": r".lora_\1",
    r"\.lora_(target_modules|exclude_modules)$": r".\1",
    r"^model\.partial_pretrain$": "model.path",
    r"^data\.multiturn\.": "data.",
    r"\.optim\.grad_clip$": ".optim.clip_grad",
}
"""Pattern of a setting -> its name before it was moved, or in verl's other engines."""

TARGETS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
    "linear_q": ["q_proj"],
    "linear_k": ["k_proj"],
    "linear_v": ["v_proj"],
    "linear_fc1_gate": ["gate_proj"],
    "linear_fc1_up": ["up_proj"],
}
"""Megatron's linear layers -> the checkpoint's layers, for adapter.targets."""

REFUSED = {
    r"^data\.(video|audio)_key$": "videos and sounds are not supported; train on text or images.",
    r"agent_loop_config_path": (
        "an agent loop of verl has to be written again as an environment (docs/agents.md), named in "
        "agents.environment."
    ),
    r"\bmtp\.enable": (
        "only the heads of DeepSeek-V3 and GLM-4.5 are read, with training.mtp.head_lr and "
        "rollout.draft.method=mtp; leave it out to train the model alone."
    ),
    r"^async_training\.": "choose the trainers and generators in the section roles (docs/asynchrony.md).",
    r"^trainer\.val_only$": "samples of held-out prompts alone are run.mode=rollout_only (docs/report.md).",
    r"^data\.(custom_cls|datagen)\.path$": (
        "a data set class of verl has to be written again as rows of a file (docs/extending.md)."
    ),
    r"^data\.sampler\.class_path$": (
        "a sampler of verl has to be written again as a function of an epoch, named in data.curriculum."
    ),
    r"reward_manager\.module\.path$|reward_loop_module_path$": (
        "a reward manager of your own has to be written again as a reward function (docs/extending.md)."
    ),
    r"^(?!(actor_rollout_ref\.)?model\.).*custom_chat_template$": (
        "the tokenizer is the policy's; write the template into the model's chat_template.jinja."
    ),
    r"function_tool_path$": (
        "a function of verl has to be written again as a tool of an environment (docs/agents.md)."
    ),
    r"rollout\.ignore_eos$": "a response ends at its end token; the setting must be False.",
    r"\.lora\.dropout$": "adapters have no dropout; the setting must be 0.",
    r"rollout_token_veto_threshold$": "use rollout_correction.rollout_rs=token_k1 with a bound.",
}
"""Pattern of a setting without which the run would be another one -> what is needed instead."""
MODELS = {
    r"DeepSeek-V(3\.2|4)|GLM-?5": "sparse attention is not supported; docs/models.md lists what is.",
    r"MiMo": "Qwen2 with heads of its own for multi-token prediction is not supported; see docs/models.md.",
    r"Nemotron-(?!3-Nano)(3|H|Nano)": "the architecture is not supported; docs/models.md lists what is.",
    r"MiniCPM": "the architecture is not supported; docs/models.md lists what is.",
    r"-MoE-merge$": "VeOmni's merged checkpoint cannot be read; name the one from which it was made.",
    r"Omni|(?<!Qwen2\.5-)(?<!Qwen3-)VL\b|4\.\dV|Kimi-K2\.[5-9]": (
        "of models that see or hear, Qwen2.5-VL, Qwen3-VL and Qwen3.5 are supported (docs/models.md)."
    ),
}
"""Pattern of the name of a published model -> why it cannot be trained."""
BY_CLASS = r"(?i)gemma-(1|2|7)|Qwen1\.5-MoE|Nemotron-3-Nano|\bHy3"
"""Pattern of the names of models that train as their class in transformers."""
TEXT_ALONE = r"Qwen3\.[5-9]"
"""Pattern of the names of models with a vision tower and a trainable text model."""
SEES = r"Qwen(2\.5|3)-VL"
"""Pattern of the names of models that read images."""
SAMPLER = {
    "path": "pkg://tests.utils.dataset.test_create_rl_sampler_on_cpu",
    "name": "RandomCurriculumSampler",
}
"""data.sampler.class_* of verl's scripts: a class that only shuffles."""
RAY_TOOLS = r"\.(SearchTool|SandboxFusionTool|CustomSandboxFusionTool|ImageZoomInTool)$"
"""Pattern of verl's classes of tools that are actors of Ray."""
EXPERTS = r"(?i)A\d+B\b|MoE|gpt-oss|Mixtral|DeepSeek-(V[23]|R1)|Moonlight|Kimi-K2|GLM-4\.[5-7]|MiniMax-M2"
"""Pattern of the names of mixtures of experts."""

LEGACY_TUNING = {
    **{"optim.lr": 1e-5, "optim.betas": [0.9, 0.95], "optim.lr_warmup_steps_ratio": 0.1},
    **{"optim.lr_scheduler": "cosine", "trainer.n_gpus_per_node": 8},
}
"""Defaults of fsdp_sft_trainer, verl's older fine-tuning, that differ from sft_trainer's."""

OFF: tuple[Any, ...] = (None, False, "", [], {}, "none", "None", "null")
"""Values of settings that are switched off."""

NOT_NEEDED = {
    r"(_target_|use_legacy_worker_impl|hybrid_engine|ray_|transfer_queue|\.strategy$|trainer\.device)": (
        "there is no Ray, and one kind of worker"
    ),
    r"(use_remove_padding|use_dynamic_bsz|max_token_len_per_gpu|micro_batch_size.*)$": (
        "sequences are always packed, and all passes of a step use training.micro_batch_tokens"
    ),
    r"(param|grad|optimizer)_offload$": "training.offload=auto moves state to the host during generation",
    r"^critic\.(model\.(use_remove|enable_grad|fsdp|lora)|megatron|ppo_|optim|strategy|ulysses)": (
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
    r"override_transformer_config\.(?!pipeline|dsa|mhc|fp8|\w*offload)": (
        "the layer specification follows from config.json; pipeline stages may differ by one layer"
    ),
    r"use_prefix_grouper$": "a prompt is computed once for its samples (training.shared_prefix)",
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
    r"(^|\.)(model_engine|engine|optim|model)$|^hydra\.|@": "there is one training engine",
    r"(engine_kwargs|cudagraph|layered_summon|multi_stage_wake_up|use_shm|moe_tensor_parallel_size)": (
        "the options of vLLM follow from those of the section rollout"
    ),
    r"rollout\.(prompt_length|response_length)$": "lengths are those of the section data and rollout",
    r"^(actor_rollout_ref\.actor\.)?(veomni|automodel)\.": "Megatron replaces FSDP",
    r"(^|actor\.)engine\.": "Megatron replaces the engine",
    r"^trainer\.seed$": "see run.seed",
    r"^algorithm\.(use_pf_ppo|pf_ppo\.)": "verl reads it with adv_estimator=gae and use_pf_ppo=True only",
    r"^reward_model\.reward_kwargs\.": "the punishment to which it belongs is off",
    r"megatron\.(dtype|seed|use_megatron_fsdp)$|model\.torch_dtype$|master_weights|store_param_remainders": (
        "weights are model.dtype, and master weights and gradient sums float32"
    ),
    r"(entropy_checkpointing|calculate_sum_pi_squared|pad_to_length|calculate_entropy|pad_mode)": (
        "sequences are packed, and statistics that a loss needs are computed with it"
    ),
    r"^algorithm\.kl_ctrl\.|kl_loss_(coef|type)$": "the KL term to which it belongs is off",
    r"^reward_model\.(use_reward_loop|num_workers|rollout\.)|^reward\.num_workers": (
        "a reward model is a frozen model on the training grid, and functions run in reward.workers processes"
    ),
    r"^data\.(val_(batch_size|max_s)|train_max_s|max_token_len|ignore_input_ids|use_dynamic|enable$)": (
        "validation is one generation, and batches are packed"
    ),
    r"optim\.(optimizer_impl|lr_warmup_init|init_lr_ratio)|(overlap_cpu|decoupled_weight|precision_aware)": (
        "the optimizer is Adam in Megatron's distributed optimizer"
    ),
    r"^distillation\.(n_gpus|nnodes|teacher_models\.\w+\.(inference|num_replicas|key))": (
        "the teacher is a frozen model on the training grid"
    ),
    r"max_critic_ckpt_to_keep$": "a checkpoint has the policy and the critic",
    r"trust_remote_code$": "models are built from config.json without remote code",
}
"""Pattern of a setting -> why this project does without it."""

MISSING = {
    r"pipeline_model_parallel_layout|dsa_|mhc_": "stages are split by their layers' weights",
    r"activation_offload|override_transformer_config\.\w*offload": (
        "activations stay on the GPU; see training.recompute"
    ),
    r"lora": "see the section adapter (docs/adapters.md)",
    r"exclude_modules": "name the layers in adapter.targets",
    r"(multi_turn|tool_config_path|interaction_config|agent)": "see agents.* (docs/agents.md)",
    r"val_kwargs": "see the section validation",
    r"override_config": "edit the model's config.json",
    r"(wandb|mlflow|swanlab|log_val_generations|rollout_data_dir)": "see logging.rollouts",
    r"(image|video|multi_modal|freeze_vision|mm_)": "see docs/vision.md",
    r"resume_from_path": "verl's checkpoints cannot be read; export one to Hugging Face as model.path",
    r"(profiler|trace)": "see the section trace (docs/traces.md)",
    r"prometheus": "not offered",
    r"(quantization|fp8|\bqat\b)": "see docs/models.md",
    r"rollout_is_batch_normalize": "weights are not normalised over the batch",
    r"rollout_rs: ": "a bound on a sum or a maximum rejects long samples for their length",
    r"rollout_correction\.rollout_(is|rs)": "rollout_correction.bypass neither weighs nor rejects",
    r"mtp": "see training.mtp.head_lr and rollout.draft.method",
    r"sandbox_fusion": "rl.rewards.code runs programs in its own sandbox on the nodes",
    r"over_sample_rate": "verl 0.7 and later do not read it; see rollout.carry_over",
    r"data\.(sampler|custom_cls|datagen)": "belongs to a class that is not used",
    r"distillation_loss\.(loss_max_clamp|log_prob_min_clamp)": "divergences are not clamped",
    r"gdpo_reward_keys": "gdpo reads every term that the reward function returns",
}
"""Pattern of a setting -> what to do about it."""


def reason(key: str, table: dict[str, str]) -> str:
    """Return the text of the first pattern that occurs in a key, else ""."""
    return next((text for pattern, text in table.items() if re.search(pattern, key)), "")
