"""Small tokenizers with the chat templates and special tokens of model families.

tests/data/chat_templates holds the templates as the models ship them (from trl 1.16, Apache-2.0; the
templates of Mistral and DeepSeek-V3.1 are written after the models' own). The vocabulary is trained here, on
a few sentences, with the families' special tokens.
"""

import functools

from tests.spawn import ROOT

DEEPSEEK = [
    f"<\uff5c{name}\uff5c>"
    for name in (
        "User",
        "Assistant",
        *(
            f"tool\u2581{what}\u2581{edge}"
            for what in ("calls", "call", "outputs", "output")
            for edge in ("begin", "end")
        ),
        "tool\u2581sep",
    )
]
QWEN = ["<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TOKENS = {
    # family: eos, bos, further special tokens, further end tokens
    "qwen2.5": ("<|im_end|>", None, [*QWEN, "<|endoftext|>"], ["<|endoftext|>"]),
    "qwen3": ("<|im_end|>", None, [*QWEN, "<|endoftext|>", "<think>", "</think>"], ["<|endoftext|>"]),
    "llama3.1": (
        "<|eot_id|>",
        "<|begin_of_text|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>"],
        ["<|eom_id|>"],
    ),
    "mistral": (
        "</s>",
        "<s>",
        "[INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS]".split()
        + ["[/AVAILABLE_TOOLS]"],
        [],
    ),
    "deepseek-v3": (
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        DEEPSEEK,
        [],
    ),
    "deepseek-v3.1": (
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        [*DEEPSEEK, "<think>", "</think>"],
        [],
    ),
    "glm4.5": (
        "<|endoftext|>",
        None,
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> "
        "</tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>".split(),
        ["<|user|>", "<|observation|>"],
    ),
}
# How Qwen 2 and Llama 3 split text into words before the merges.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    'Look a key up. {"name": "lookup", "arguments": {"key": "a"}} The answer to the question is 42.\n\n',
    "You may call one or more functions to assist with the user query. reason and answer, then think again\n",
]


@functools.cache
def template(family: str) -> str:
    return (ROOT / f"tests/data/chat_templates/{family}.jinja").read_text().removesuffix("\n")


@functools.cache
def tokenizer_of(family: str):
    """Return a byte-level BPE tokenizer with the family's special tokens and template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    eos, bos, special, _ = TOKENS[family]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(CORPUS * 20, trainer)
    bpe.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in [eos, bos, *special] if t])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=eos,
        bos_token=bos,
        chat_template=template(family),
        name_or_path=family,
        clean_up_tokenization_spaces=False,
    )


def end_ids(family: str) -> list[int]:
    return tokenizer_of(family).convert_tokens_to_ids(TOKENS[family][3])
