"""What a run reads before any model is built, so that input that cannot work is refused in seconds."""

from collections.abc import Callable

from rl.config import Config, learns_from_samples, needs_engine
from rl.config_checks import check_layout
from rl.data.prompts import Prompt, load_prompts, load_tokenizer
from rl.models import SUPPORTED, architecture, read_hf_config
from rl.models.files import tensor_files
from rl.rewards.loading import load_reward_function


class Inputs:
    """Model config, tokenizer, prompts and reward function.

    Raises ValueError (ConfigError among them) with one sentence for the user. Not collective: each rank reads for itself.
    """

    def __init__(self, config: Config, world_size: int):
        self.hf = read_hf_config(config.model.path)
        check_layout(config, world_size, self.hf, SUPPORTED)
        file = architecture(self.hf)
        try:
            file.check(self.hf)
            file.megatron_config(self.hf)
            weights = file.weights(self.hf)
        except KeyError as missing:
            raise ValueError(f"{config.model.path}/config.json lacks the key {missing}.") from missing
        tensor_files(config.model.path, weights)
        self.tokenizer = load_tokenizer(config.model.path)
        response_key = None if learns_from_samples(config) else config.data.response_key
        self.prompts = self._load(config, config.data.train, response_key=response_key)
        self.held_out: list[Prompt] = []
        if config.data.val and config.validation.every:
            self.held_out = self._load(config, config.data.val, max_prompts=config.validation.max_prompts)
        self.reward: Callable | None = load_reward_function(config.reward.function, kwargs=config.reward.kwargs) if needs_engine(config) else None

    def _load(self, config: Config, files: list[str], *, response_key: str | None = None, max_prompts: int = 0):
        return load_prompts(
            files,
            self.tokenizer,
            prompt_key=config.data.prompt_key,
            max_prompt_tokens=config.data.max_prompt_tokens,
            overlong=config.data.overlong_prompts,
            response_key=response_key,
            max_prompts=max_prompts,
        )
