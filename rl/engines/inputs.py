"""The input of a run, read before any model is built, so that invalid input is refused within seconds."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers.models.auto import modeling_auto

from rl.config import wing
from rl.config.adapter_checks import adapters_of
from rl.config.functions import load_function
from rl.config.layout_checks import check_has_experts, check_judge, check_layout
from rl.config.needs import (
    algorithm_of,
    has_prediction_head,
    learns,
    learns_from_data,
    learns_from_samples,
    needs_engine,
    needs_reward,
    validates,
)
from rl.config.options import ConfigError
from rl.config.reward_sources import RewardPlan, make_plan
from rl.config.run_models import RunModel, hf_config_of, run_models
from rl.config.schema import Config
from rl.data.chat_template import kept_ids, set_variables
from rl.data.curriculum import CurriculumOrder, load_order
from rl.data.preferences import Labelled, PreferencePair, load_labelled, load_preferences
from rl.data.prompt_order import MixedOrder, PromptOrder
from rl.data.prompts import Prompt, end_token_ids, load_prompts, load_tokenizer
from rl.data.reading import check_data_files
from rl.data.rendering import check_rendering
from rl.data.responses_again import check_responses
from rl.data.special_tokens import allow_in_content
from rl.data.token_ids import check_model_ids, check_rows, check_stops, check_tokenizer
from rl.models import SUPPORTED, architecture, check_options, read_hf_config, value_model, value_weights
from rl.models import mtp as prediction
from rl.models.files import check_quantisation, refuse_extra, tensor_files
from rl.models.json_files import check_files
from rl.models.peft import check_peft
from rl.rewards.mixture import Mixture

if TYPE_CHECKING:
    from rl.data.images import ImageReader


@dataclass(frozen=True)
class ModelFiles:
    """A Hugging Face checkpoint that the run reads."""

    path: str
    hf: dict
    """Its config.json."""


class Inputs:
    """Configs of the models, tokenizers, prompts and reward functions of a run.

    Raises ValueError or ConfigError with a message for the user, for example if a teacher has another
    vocabulary than the policy. Not collective; every rank reads its own copy.
    """

    def __init__(self, config: Config, world_size: int):
        self.config = config
        needs = algorithm_of(config).needs
        if learns(config):
            check_data_files(config.data.train, key="data.train")
        if validates(config):
            check_data_files(config.data.val, key="data.val")
        models = run_models(config)
        on_grid = [model for model in models.values() if model.on_training_grid]
        self.models = {model.name: self._read(model, world_size) for model in on_grid}
        self.tokenizer = load_tokenizer(config.model.path)
        own = self.models["policy"].hf
        unread = vars(architecture(own)).get("UNREAD_TOKENS", ())
        check_tokenizer(config.model.path, self.tokenizer, own["vocab_size"], unread=unread)
        check_stops(config.rollout.stop_token_ids, own["vocab_size"])
        set_variables(self.tokenizer, config.data.template_kwargs)
        if config.data.allow_special_tokens:
            allow_in_content(self.tokenizer)
        ends = end_token_ids(config.model.path) | set(config.rollout.stop_token_ids)
        keep = config.reward.keep_special_tokens
        self.kept_ids = kept_ids(self.tokenizer, keep, ends, key="reward.keep_special_tokens")
        read = wing.door(config, "inputs")
        self.teachers: Any = read and read(config, self.tokenizer, own)
        """Tokenizers of the teachers; None without a teacher."""
        for model in on_grid:
            if model.reads_tokens and not (model.is_teacher and self.teachers.reads_text(model)):
                self._same_tokens(model)
        served = [models["judge"].path] if "judge" in models else []
        if (draft := config.rollout.draft.path) and needs_engine(config):
            served.append(draft)
            self._same_tokens(RunModel("draft", "rollout.draft.path", draft, draft))
        for path in served:  # only vLLM loads these models, later
            check_files(path)
        check_has_experts(config, [files.hf for files in self.models.values()])
        self.judge_parser = None
        if "judge" in models:
            judge = config.reward.judge
            check_judge(config, world_size, read_hf_config(judge.path, key="reward.judge.path"))
            check_template(judge.template)
            self.judge_parser = load_function(judge.parser, key="reward.judge.parser")
        others = models.keys() & {"reward_model", "judge"}
        self.tokenizers = {name: load_tokenizer(models[name].path) for name in others}
        self.prompts: list = []
        """Rows of data.train. With run.mode=evaluate, which reads none, the rows of data.val."""
        if learns(config):
            self.prompts = self._pairs(needs) if {"pairs", "labels"} & {*needs} else self._training_prompts()
        if self.teachers is not None:
            self.teachers.check_prompts(self.prompts)
        self.order = load_order(config.data.curriculum) if config.data.curriculum and learns(config) else None
        self.held_out: list[Prompt] = []
        if validates(config):
            self.held_out = self._prompts(
                config.data.val,
                responses=config.validation.loss,
                max_prompts=config.validation.max_prompts,
                ground_truth_key=config.data.ground_truth_key,
            )
        read = {"data.train": self.prompts, "data.val": self.held_out}
        self.prompts = self.prompts if learns(config) else self.held_out
        self.prompt_order()  # refuses a curriculum that returns no order
        for key, rows in read.items():
            # Pairs have rules of their own.
            prompts = [row for row in rows if isinstance(row, Prompt)]
            check_rows(key, rows, self.tokenizer, own["vocab_size"])
            check_responses(rows, self.tokenizer, config.data, ends)
            check_rendering(prompts, self.tokenizer, key=key, max_prompt_tokens=config.data.max_prompt_tokens)
        self.rewards: RewardPlan | None = None
        if needs_reward(config):
            self.rewards = make_plan(config.reward.function, config.reward.kwargs, config.reward.sources)
            Mixture(self.rewards)  # refuses a function that is missing or cannot be called

    def prompt_order(self) -> PromptOrder | MixedOrder | CurriculumOrder:
        """Return the order of the training prompts, as it is at the beginning of a run."""
        data, seed = self.config.data, self.config.run.seed
        if self.order is not None:
            return CurriculumOrder(self.prompts, self.order, seed=seed)
        if data.train_weights and learns(self.config):
            files = np.array([prompt.source for prompt in self.prompts])
            sources = [np.flatnonzero(files == number) for number in range(len(data.train))]
            return MixedOrder(sources, data.train_weights, seed=seed, shuffle=data.shuffle)
        return PromptOrder(len(self.prompts), seed=seed, shuffle=data.shuffle)

    def _read(self, model: RunModel, world_size: int) -> ModelFiles:
        """Return a model's files after checking architecture, layout, tensors and the policy's adapters."""
        path, own_path, key = model.path, model.own_path, model.key
        hf = hf_config_of(self.config, model, read_hf_config(path, key=key if own_path else "model.path"))
        check_files(path)
        body = value_model(hf) if model.head else hf
        try:
            check_layout(self.config, world_size, body, SUPPORTED, path=path if own_path else None)
        except ConfigError as error:
            raise ConfigError(f"{key}={path}: {error}" if own_path else str(error)) from error
        check_class(path, hf)
        file = architecture(body)
        try:
            check_options(body)
            file.megatron_config(body)
            needs_head = model.head == "needed"
            weights = value_weights(body, needs_head=needs_head) if model.head else file.weights(body)
        except KeyError as missing:
            raise ValueError(f"{path}/config.json lacks the key {missing}; copy it again.") from missing
        except (TypeError, AttributeError, ArithmeticError, IndexError) as error:
            raise ValueError(f"{path}/config.json has values that do not fit together: {error}.") from error
        if model.name == "policy":
            pairs, adapter = adapters_of(self.config, weights), self.config.adapter
            if adapter.path:
                check_peft(adapter.path, pairs, kind=adapter.kind, rank=adapter.rank, scale=adapter.scale)
            if has_prediction_head(self.config):
                mtp = self.config.training.mtp
                key = (
                    f"training.mtp.head_lr={mtp.head_lr:g}"
                    if mtp.head_lr
                    else self.config.rollout.draft.setting
                )
                prediction.check(body, key=key, path=path)
                weights = [*weights, *prediction.weights(body)]
        check_quantisation(path, hf, files := tensor_files(path, weights))
        refuse_extra(path, files, weights, body)
        check_model_ids(path, hf["vocab_size"])
        return ModelFiles(path, hf)

    def _same_tokens(self, model: RunModel) -> None:
        """Raise ConfigError if a model that reads the policy's token ids has another vocabulary."""
        policy = self.config.model.path
        if model.path == policy:
            return
        files = read_hf_config(model.path, key=model.key), self.models["policy"].hf
        theirs, own = load_tokenizer(model.path).get_vocab(), self.tokenizer.get_vocab()
        sizes = [hf["vocab_size"] for hf in files]
        differing = sorted(theirs.items() ^ own.items(), key=lambda pair: (pair[1], pair[0]))
        if differing:
            token = differing[0][0]
            reason = f"the id of token {token!r} is {theirs.get(token)} there and {own.get(token)} here"
        elif sizes[0] < sizes[1] or (model.name == "draft" and sizes[0] != sizes[1]):
            reason = f"vocab_size is {sizes[0]} there and {sizes[1]} here"
        else:
            return
        raise ConfigError(
            f"{model.key}={model.path} has another vocabulary than model.path={policy}, whose token ids it "
            f"reads: {reason}; use a checkpoint with the same tokenizer"
            + ", or teacher.advantage_coef with single turns and the whole distribution" * model.is_teacher
            + "."
        )

    def _training_prompts(self) -> list[Prompt]:
        """Return the prompts of data.train. Their ground truths are read only if something uses them."""
        config, data = self.config, self.config.data
        uses_truths = learns_from_samples(config) or data.curriculum or config.algorithm.endswith(".py")
        return self._prompts(
            data.train,
            responses=learns_from_data(config),
            max_prompts=data.max_rows,
            ground_truth_key=data.ground_truth_key if uses_truths else "",
        )

    def _prompts(
        self, files: list[str], *, responses: bool, max_prompts: int, ground_truth_key: str
    ) -> list[Prompt]:
        """Return the prompts, or conversations, of the files. responses: also read the data's responses."""
        data = self.config.data
        if data.messages_key:
            from rl.data.chats import load_chats

            return load_chats(
                files,
                self.tokenizer,
                messages_key=data.messages_key,
                train_on=data.train_on,
                end_token_ids=end_token_ids(self.config.model.path),
                max_tokens=data.max_prompt_tokens,
                overlong=data.overlong_prompts,
                max_chats=max_prompts,
            )
        found = load_prompts(
            files,
            self.tokenizer,
            prompt_key=data.prompt_key,
            string_prompts=data.string_prompts,
            max_prompt_tokens=data.max_prompt_tokens,
            overlong=data.overlong_prompts,
            ground_truth_key=ground_truth_key,
            response_key=data.response_key if responses else None,
            max_prompts=max_prompts,
            images=self._image_reader(),
        )
        if data.image_key:
            from rl.data.patches_again import check_patches

            check_patches(found, self.config.model.path, data.max_pixels)
        return found

    def _image_reader(self) -> "ImageReader | None":
        """Return the reader of the rows' images; None if the run has no images."""
        data, model = self.config.data, self.models["policy"]
        if not data.image_key:
            return None
        from rl.data.images import ImageReader, image_format

        return ImageReader(data.image_key, image_format(model.path, model.hf, max_pixels=data.max_pixels))

    def _pairs(self, needs: Collection[str]) -> list[PreferencePair] | list[Labelled]:
        """Return pairs of responses, or responses with labels."""
        data = self.config.data
        limits: dict[str, Any] = dict(
            prompt_key=data.prompt_key,
            max_prompt_tokens=data.max_prompt_tokens,
            max_response_tokens=self.config.rollout.max_response_tokens,
            overlong=data.overlong_prompts,
            end_token_ids=end_token_ids(self.config.model.path),
            max_pairs=data.max_rows,
        )
        if "labels" in needs:
            return load_labelled(
                data.train, self.tokenizer, response_key=data.response_key, label_key=data.label_key, **limits
            )
        return load_preferences(
            data.train, self.tokenizer, chosen_key=data.chosen_key, rejected_key=data.rejected_key, **limits
        )


def check_class(path: str, hf: dict) -> None:
    """Raise ValueError if `architectures` and `model_type` in config.json contradict each other.

    vLLM reads `architectures`. transformers reads `model_type`, and derives defaults of missing keys from it.
    """
    name, kind = hf["architectures"][0], str(hf.get("model_type"))
    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )
    known = [table[kind] for table in tables if kind in table]
    if known and name not in known:
        raise ValueError(
            f"{path}/config.json has architectures={name}, but model_type={kind}, the type of "
            f"{' and '.join(known)}; correct the one that is wrong."
        )


def check_template(template: str) -> None:
    """Raise ConfigError if a judge's template has fields other than prompt, response and ground_truth."""
    try:
        template.format(prompt="", response="", ground_truth="")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"reward.judge.template cannot be formatted ({type(error).__name__}: {error}); its fields are "
            "{prompt}, {response} and {ground_truth}, and any other brace must be doubled."
        ) from error
