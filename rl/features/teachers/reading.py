"""Tokenizers and lengths of the teachers' inputs: the policy's tokens, or its texts in another tokenizer."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rl.config.layout_checks import check_positions
from rl.config.needs import algorithm_of, needs_sampling_masks
from rl.config.options import ConfigError
from rl.config.run_models import RunModel
from rl.config.schema import Config
from rl.data.prompts import Prompt, load_tokenizer
from rl.models import read_hf_config


class TeacherInputs:
    """The tokenizers of the teachers, and the checks of what teachers read.

    Args:
        tokenizer, hf: tokenizer and config.json of the policy.

    Raises ConfigError for a teacher.top_k or teacher.max_prompt_tokens that the policy does not allow.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, hf: dict):
        self._config, self._tokenizer = config, tokenizer
        self.others: dict[str, PreTrainedTokenizerBase] = {}
        """Tokenizers of the teachers that have another one than the policy, by path."""
        teacher, limit = config.teacher, config.rollout.max_response_tokens
        if teacher.self_taught != "none":
            prompt = "teacher.max_prompt_tokens", teacher.max_prompt_tokens
            check_positions(hf, prompt, ("rollout.max_response_tokens", limit))
        if teacher.top_k >= (size := hf["vocab_size"]):
            raise ConfigError(
                f"teacher.top_k={teacher.top_k} is not below the vocabulary's {size} tokens; use a "
                "smaller number, or 0 for the whole vocabulary."
            )

    def reads_text(self, model: RunModel) -> bool:
        """Return whether a teacher has another tokenizer and reads the text of single turns.

        Raises ConfigError if its tokenizer cannot.
        """
        config, other = self._config, load_tokenizer(model.path)
        compares_spans = "teacher" not in algorithm_of(config).needs
        needs_ids = config.agents.is_on or config.data.image_key or needs_sampling_masks(config)
        if not compares_spans or needs_ids or other.get_vocab() == self._tokenizer.get_vocab():
            return False
        for key, tokenizer in {"model.path": self._tokenizer, model.key: other}.items():
            if not tokenizer.is_fast or tokenizer.eos_token_id is None:
                raise ConfigError(
                    f"{model.key}={model.path} has another tokenizer than the policy, so that texts are "
                    f"aligned, but the tokenizer of {key} has no tokenizer.json or no eos_token; use a "
                    "checkpoint with both."
                )
        self.others[model.path] = other
        return True

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError for prompts without a teacher, or with messages that a teacher cannot render."""
        teacher = self._config.teacher
        found = {prompt.data_source for prompt in prompts} - set(teacher.sources)
        if teacher.sources and not teacher.path and found:
            raise ConfigError(
                f"data_source={sorted(found)[0]} of data.train has no teacher; add it to teacher.sources, or "
                "set teacher.path, the teacher of all other sources."
            )
        if self._config.data.image_key:
            self._check_images(prompts)
        for path, tokenizer in self.others.items():
            if tokenizer.chat_template is None and any(prompt.messages for prompt in prompts):
                raise ConfigError(
                    f"teacher.path={path} has another tokenizer without a chat template, but prompts are "
                    "messages; write the template to its chat_template.jinja."
                )

    def _check_images(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError for prompts whose images their teacher does not read as the policy does."""
        from rl.data.images import image_format

        teacher, limit = self._config.teacher, self._config.data.max_pixels
        for path in teacher.paths:
            hf = read_hf_config(path)
            own = image_format(path, hf, max_pixels=limit) if "vision_config" in hf else None
            others = [prompt for prompt in prompts if prompt.images and prompt.images[0].format != own]
            sources = {prompt.data_source for prompt in others}
            if self._config.agents.is_on and others:  # environments give images to any prompt
                sources |= {prompt.data_source for prompt in prompts}
            if wrong := [name for name in sources if teacher.sources.get(name, teacher.path) == path]:
                raise ConfigError(
                    f"a prompt of data_source={wrong[0]} has images, but its teacher {path} reads none, or "
                    "reads them in other patches, colours or limits than the policy; use a teacher of the "
                    "policy's family."
                )
